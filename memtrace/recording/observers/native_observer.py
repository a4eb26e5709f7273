"""The native observer: a dispatcher mode and allocator hooks in C++ (see ``native/`` and ``build``)."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np
import torch

from memtrace.format.schema import EVENT_KINDS
from memtrace.format.stored import EventForms, EventValues, FindEventForms, Keyframe
from memtrace.recording.excluded_memory import excluded_ranges
from memtrace.recording.observers import ModuleCalls, ModuleHook
from memtrace.recording.observers.build import load_native

_OOM: Final = EVENT_KINDS.index("oom")
_UINT64: Final = (1 << 64) - 1
COLLECT_RECORDS: Final = 1 << 14
"""Number of buffered records (events and operator calls, about 60 bytes each) that the writer collects at a time. It
looks when it expects so many."""
WAKE_RECORDS: Final = 1 << 16
"""Number of buffered records at which the writer is woken."""
LIMIT_RECORDS: Final = 1 << 18
"""Number of buffered records at which a training thread waits for the writer."""


class NativeObserver:
    """``Observer`` on top of the compiled module.

    Attributes:
        cuda_obstacle: why CUDA's allocator cannot be observed; None if it can, and where torch is not a CUDA build.

    Raises:
        BuildError: the module cannot be built or loaded.
    """

    kind = "native"
    _latest: ClassVar[NativeObserver | None] = None

    def __init__(self) -> None:
        build = load_native()
        native: Any = build.module
        self._native = native
        self.cuda_obstacle = build.cuda_obstacle
        # The functions of the module are used directly, without a Python wrapper: some run at every module call.
        self.abandon = native.abandon
        self.pause = native.pause
        self.resume = native.resume
        self.wait = native.wait
        self.wake = native.wake
        self.drain = native.drain
        self.now = native.now
        self.name_id = native.name_id
        self.hide_frames_of = native.hide_frames_of
        self.pop_module = native.pop_module
        self.begin_backward = native.begin_backward
        self.end_backward = native.end_backward
        self.span = native.span
        self.end_phase = native.end_phase
        self.waiting = native.waiting
        self.label = native.label
        self.label_inputs = native.label_inputs
        self.baseline = native.baseline
        self.live_instances = native.live_instances
        self.observed_kernel = native.observed_kernel
        self.watch_region = native.watch_region
        self.collected = native.collected
        self.attach_cuda = native.attach_cuda
        self.finish_cuda = native.finish_cuda
        self.cuda_settings = native.cuda_settings
        self.cuda_events = native.cuda_events
        self.find_event_forms: FindEventForms | None = self._find_event_forms

    def start(self, *, accesses: bool, stacks: bool, stack_min_bytes: int, device_time_min_bytes: int) -> None:
        """See ``Observer.start``.

        Raises:
            RuntimeError: another library uses the CPU allocator or the dispatch key.
        """
        _let_higher_order_operators_pass(self._native.status()["dispatch_key"])
        NativeObserver._latest = self
        self._native.exclude_memory(excluded_ranges())
        numbers = (COLLECT_RECORDS, WAKE_RECORDS, LIMIT_RECORDS)
        self._native.start(accesses, stacks, stack_min_bytes, device_time_min_bytes, *numbers)

    def stop(self) -> None:
        """See ``Observer.stop``. Without effect once another observer has started: the module has one state."""
        if NativeObserver._latest is self:
            self._native.stop()

    def allocation_failed(self, device: int, size: int, free: int) -> None:
        """See ``Observer.allocation_failed``."""
        self._native.cuda_events([(_OOM, device - 1, free & _UINT64, size, -1, -1, -1, -1)])

    def module_hook(self, calls: ModuleCalls) -> ModuleHook:
        """See ``Observer.module_hook``. Written in C: modules are called dozens of times in a step."""
        hook: ModuleHook = self._native.module_hook(calls.known, calls.name_module, calls.label_inputs, calls.failed)
        return hook

    def times_devices(self) -> bool:
        """See ``Observer.times_devices``. True if the module was built with the CUDA headers."""
        return bool(self._native.status()["device_time"])

    def sees_python_handlers(self) -> bool:
        """See ``Observer.sees_python_handlers``. True for the versions of torch that python_handlers.cpp knows."""
        return bool(self._native.status()["python_handlers"])

    def sees_threads(self) -> bool:
        """See ``Observer.sees_threads``. Always True: every thread that allocates or calls a module is switched on."""
        return True

    def _find_event_forms(self, events: EventValues, newest_block: int, keyframe: Keyframe) -> EventForms:
        """See ``memtrace.format.stored.find_event_forms``; without the interpreter lock."""
        time_ns = np.empty(0, np.int64) if events.time_ns is None else np.ascontiguousarray(events.time_ns, np.int64)
        elapsed_ns, reference, is_stored = self._native.event_forms(
            np.ascontiguousarray(events.kind, np.int8),
            time_ns,
            np.ascontiguousarray(events.block_id, np.int64),
            np.ascontiguousarray(events.block_is_known, np.uint8),
            np.ascontiguousarray(events.address, np.int64),
            np.ascontiguousarray(events.address_is_known, np.uint8),
            newest_block,
            np.ascontiguousarray(keyframe["block_id"], np.int64),
            np.ascontiguousarray(keyframe["address"], np.int64),
        )
        return EventForms(
            None if events.time_ns is None else np.frombuffer(b"" if elapsed_ns is None else elapsed_ns, np.int64),
            None if reference is None else np.frombuffer(reference, np.int32),
            None if is_stored is None else np.frombuffer(is_stored, np.bool_),
        )

    def failure(self) -> str | None:
        """See ``Observer.failure``."""
        failure: str | None = self._native.status()["failure"]
        return failure


def _let_higher_order_operators_pass(dispatch_key: int) -> None:
    """Let torch's higher-order operators (``flex_attention``, ``cond``) skip the dispatch key of the observer.

    They are dispatched in Python and fail for a key without a kernel. This stays after the recording: threads of the
    program keep the key switched on, and nothing else uses it.
    """
    from torch import _ops

    key = torch._C.DispatchKey(dispatch_key)
    default_keys = getattr(_ops, "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS", None)
    if default_keys is not None and key not in default_keys:
        default_keys.append(key)  # of operators that are defined later
        for operator in list(_ops._higher_order_ops.values()):
            operator.fallthrough(key)  # type: ignore[no-untyped-call]
