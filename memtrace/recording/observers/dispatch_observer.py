"""The dispatch observer: records the same events in pure Python, without a compiler and under ``FakeTensorMode``.

It differs from the native observer as follows:

* CPU memory that an operator allocates and frees in one call (workspace) is not recorded: Python has no hook below the
  dispatcher. CUDA allocations, frees and segments of all threads come from torch's allocator history, and get the
  operator that ran in their microsecond; where operators of several threads did, their operator is unknown.
* torch behaves differently under a Python dispatch mode: where autograd sums gradients, or an operator adds a bias, it
  adds out of place, and each such sum is a block of its own.
* The allocation of a CPU block is recorded when the operator returns, with the end time of the operator.
* Memory that no operator allocates (copies of storages, NumPy arrays, batches of DataLoader workers) begins where an
  operator or a label first refers to it.
* Fake tensors have sizes but no addresses; their address is null.
* Memory that changes its size in place (``Tensor.resize_``) keeps the size it had when it was first seen.
* Operators of threads that the program starts are recorded within module calls and backward passes only: the mode is
  on a thread's stack during that time, where the program has no mode of its own there. What else such threads do is
  missing, and the trace says so.
* It is slower; BENCHMARKS.md compares the two.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from memtrace.format.schema import EVENT_KINDS, NAME_KINDS, PHASES, SPAN_KINDS
from memtrace.format.stored import FindEventForms
from memtrace.recording.observers import Batch, CudaRow, ModuleCalls, ModuleHook
from memtrace.recording.observers.dispatch_blocks import BlockTable, LiveBlock, fake_mode_active, is_fake
from memtrace.recording.observers.dispatch_buffer import RecordBuffer
from memtrace.recording.observers.dispatch_cuda import CudaBlocks
from memtrace.recording.observers.dispatch_operators import (
    ArgumentAccess,
    OperatorInfo,
    inspect_operator,
    next_sequence_nr,
    running_node_sequence_nr,
)
from memtrace.recording.observers.dispatch_regions import ObservedKernel, Regions
from memtrace.recording.observers.dispatch_stacks import PythonStacks
from memtrace.recording.observers.dispatch_threads import (
    ForwardNodes,
    ObservedThread,
    enter_mode,
    leave_mode,
    needs_mode,
    phase_of,
)
from memtrace.recording.plain_access import instances_of, is_tensor, overrides_dispatch, tensors_in

_EVENT: Final = {kind: code for code, kind in enumerate(EVENT_KINDS)}
_NAME: Final = {kind: code for code, kind in enumerate(NAME_KINDS)}
_SPAN: Final = {kind: code for code, kind in enumerate(SPAN_KINDS)}
_FORWARD, _BACKWARD, _OPTIMIZER, _OTHER = (PHASES.index(name) for name in ("forward", "backward", "optimizer", "other"))


@dataclass
class _Call:
    """One call of an operator."""

    info: OperatorInfo
    name: int
    op: int
    thread: ObservedThread
    started_ns: int
    accesses: dict[int, tuple[LiveBlock, ArgumentAccess]]
    first_seen_bytes: int = 0
    """Bytes of arguments whose allocation was not seen."""


class DispatchObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """``Observer`` as a Python dispatch mode; see the docstring of this module."""

    kind = "dispatch"
    find_event_forms: FindEventForms | None = None
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffer = RecordBuffer()
        self._lock = self._buffer.lock
        self._drained = threading.Event()
        self._local = threading.local()
        self._operators: dict[Any, tuple[OperatorInfo, int]] = {}
        self._blocks = BlockTable(self._buffer, self.now, lambda: self._thread().index)
        self._forward = ForwardNodes()
        self._cuda = CudaBlocks()
        self._running: dict[int, int] = {}  # start of each operator call that has not returned
        self._num_ops = 0
        self._threads: list[ObservedThread] = []
        self._collections: list[tuple[int, int]] = []  # start and end
        self._collection_start_ns = 0
        self._regions = Regions()
        self._python_stacks = PythonStacks(self._buffer, self._regions, __file__)
        self.hide_frames_of(ObservedKernel.__call__.__code__)
        self._active = False
        self._is_paused = False
        self._window = 0
        self._has_baseline = False
        self._has_unseen_threads = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile under this mode, as it does without a recording."""
        return True

    # Start and stop.

    def start(self, *, accesses: bool, stacks: bool, stack_min_bytes: int, device_time_min_bytes: int) -> None:
        """See ``Observer.start``. Operators are not timed on a GPU."""
        self._accesses, self._stacks, self._stack_min_bytes = accesses, stacks, stack_min_bytes
        self._t0 = time.perf_counter_ns()
        self._records_fakes_only = fake_mode_active()
        self._thread()  # the thread that starts the recording is thread 0
        self._active = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """See ``Observer.stop``."""
        thread: ObservedThread | None = getattr(self._local, "thread", None)
        is_temporary = thread is not None and thread.has_own_mode  # the call that it was pushed for pops it
        if not is_temporary and self in _get_current_dispatch_mode_stack():  # the writer's thread has none
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if not self._runs:
            return
        for other in self._threads:
            self._end_forward(other)
        self._active = self._is_paused = False
        self._blocks.close()
        self._drained.set()

    @property
    def _runs(self) -> bool:
        return self._active or self._is_paused

    def pause(self) -> None:
        """See ``Observer.pause``."""
        if not self._active:
            return
        thread = self._thread()
        self._end_forward(thread)
        while thread.ranges:
            self._end_range(thread)
        self._is_paused, self._active = True, False
        if (stack := _get_current_dispatch_mode_stack()) and stack[-1] is self and not thread.has_own_mode:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._drained.set()

    def resume(self) -> None:
        """See ``Observer.resume``."""
        if not self._is_paused:
            return
        self._window += 1  # what threads were doing is not known any more
        thread = self._thread()
        self._active, self._is_paused = True, False
        if thread.index == 0 and self not in _get_current_dispatch_mode_stack():
            self.__enter__()  # type: ignore[no-untyped-call]

    def wait(self, seconds: float, enough_events: int) -> int:
        """See ``Observer.wait``."""
        self._drained.wait(min(seconds, 0.5) if self._runs else 0)
        self._drained.clear()
        return len(self._buffer.rows["events"])

    def wake(self) -> None:
        """See ``Observer.wake``."""
        self._drained.set()

    def failure(self) -> str | None:
        """Always None: the GIL keeps the program from running far ahead of the writer."""
        return None

    def abandon(self) -> None:
        """See ``Observer.abandon``. Below another mode this one stays on the stack, without effect."""
        self._active = self._is_paused = False
        self._lock = self._buffer.lock = threading.RLock()
        self._drained = threading.Event()
        self._blocks.close()
        if (stack := _get_current_dispatch_mode_stack()) and stack[-1] is self:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def drain(self, until_ns: int) -> Batch:
        """See ``Observer.drain``. Events of segments that arrive late are recorded later than they happened."""
        self._record_collections()
        with self._lock:
            if self._blocks.cuda is None:
                return self._buffer.drain()
            # Events of the allocator get their operators, so they wait for the calls that are running.
            until = None if until_ns < 0 else min([until_ns, *(start - 1 for start in self._running.values())])
            events, labels, self._blocks.num_blocks = self._cuda.take(until, self._blocks.num_blocks)
            self._buffer.rows["events"] += events
            self._buffer.rows["labels"] += labels
            return self._buffer.drain(sys.maxsize if until is None else until)

    # Marks.

    def now(self) -> int:
        """See ``Observer.now``."""
        return time.perf_counter_ns() - self._t0

    def name_id(self, kind: int, text: str) -> int:
        """See ``Observer.name_id``."""
        return self._buffer.name_id(kind, text)

    def hide_frames_of(self, code: CodeType) -> None:
        """See ``Observer.hide_frames_of``."""
        self._python_stacks.hidden.add(code)

    def module_hook(self, calls: ModuleCalls) -> ModuleHook:
        """See ``Observer.module_hook``."""

        def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
            try:
                if id(module) not in calls.known:
                    calls.name_module(module)
                named = calls.known.get(id(module))
                name = -1 if named is None else named.name_id
                if self._begin_module_call(name):
                    calls.label_inputs((args, kwargs))
                return name
            except Exception as error:
                calls.failed(error)
                return -1

        self.hide_frames_of(enter.__code__)
        return enter

    def _begin_module_call(self, name: int) -> bool:
        """Return whether the call is within no other one, and autograd records it."""
        thread = self._thread()
        self._enter_on(thread)
        modules = thread.modules
        modules.append((name, self.now()))
        with torch._C.DisableTorchFunction():
            return len(modules) == 1 and torch.is_grad_enabled()

    def pop_module(self, name: int) -> None:
        """See ``Observer.pop_module``."""
        thread = self._thread()
        modules = thread.modules
        if any(module == name for module, _ in modules):
            while True:
                module, started_ns = modules.pop()
                self.span(_SPAN["module"], module, started_ns, self.now(), -1)
                if module == name:
                    break
        leave_mode(self, thread)

    def begin_backward(self) -> int:
        """See ``Observer.begin_backward``."""
        thread = self._thread()
        self._enter_on(thread)
        if thread.backward_calls == 0:
            self._end_forward(thread)
            thread.modules_outside = len(thread.modules)
        thread.backward_calls += 1
        return self.now()

    def end_backward(self, started_ns: int) -> None:
        """See ``Observer.end_backward``."""
        thread = self._thread()
        thread.backward_calls -= 1
        if thread.backward_calls == 0:
            thread.modules_outside = 0
            self.span(_SPAN["phase"], self.name_id(_NAME["range"], "backward"), started_ns, self.now(), -1)
        leave_mode(self, thread)

    def _enter_on(self, thread: ObservedThread) -> None:
        if self._active and needs_mode(self, thread):
            self._has_unseen_threads = True
            enter_mode(self, thread)

    def span(self, kind: int, name: int, start_ns: int, end_ns: int, index: int) -> None:
        """See ``Observer.span``."""
        thread: ObservedThread | None = getattr(self._local, "thread", None)  # memtrace's own threads have none
        if kind == _SPAN["step"] and thread is not None:
            self._end_forward(thread)
        if self._runs:
            index_of_thread = -1 if thread is None else thread.index
            self._buffer.add("spans", (kind, name, start_ns, end_ns - start_ns, index_of_thread, index))

    def end_phase(self) -> None:
        """See ``Observer.end_phase``."""
        if (thread := getattr(self._local, "thread", None)) is not None:
            self._end_forward(thread)

    def waiting(self, on: bool) -> None:
        """See ``Observer.waiting``."""
        self._thread().wait_ranges += 1 if on else -1

    def label(self, tensors: list[torch.Tensor], category: int, names: list[int], gradient_category: int) -> None:
        """See ``Observer.label``."""
        if not self._runs:
            return
        with torch._C.DisableTorchFunction():
            for tensor, name in zip(tensors, names, strict=True):
                self._label(tensor, category, name)
                if gradient_category >= 0 and tensor.is_leaf and tensor.grad is not None:
                    self._label(tensor.grad, gradient_category, name)

    def _label(self, tensor: torch.Tensor, category: int, name: int) -> None:
        with self._lock:
            block = self._blocks.find(tensor) or self._see_first(tensor)
            if block is not None:
                self._blocks.label(block, category, name)

    def label_inputs(self, tensors: list[torch.Tensor], category: int) -> None:
        """See ``Observer.label_inputs``."""
        with torch._C.DisableTorchFunction():
            inputs = [tensor for tensor in tensors if tensor.grad_fn is None]
        self.label(inputs, category, [-1] * len(inputs), -1)

    def baseline(self, tensors: list[torch.Tensor]) -> None:
        """See ``Observer.baseline``."""
        # Under a fake mode only fake tensors are recorded, not the real tensors of the process.
        with torch._C.DisableTorchFunction():
            for tensor in tensors:
                if not self._records_fakes_only or is_fake(tensor):
                    self._list(tensor)
                    if tensor.is_leaf and tensor.grad is not None:
                        self._list(tensor.grad)
        self._has_baseline = True

    def _list(self, tensor: torch.Tensor) -> None:
        if self._window or self._is_paused:  # it was allocated during a pause
            self._blocks.allocate(tensor, self.now(), -1)
        else:
            self._blocks.add_older(tensor)

    def allocation_failed(self, device: int, size: int, free: int) -> None:
        """See ``Observer.allocation_failed``."""
        row = (self.now(), _EVENT["oom"], device, -1, size, -1, -1, -1, -1, self._thread().index, -1, free)
        self._buffer.add("events", row)

    def observed_kernel(
        self, kernel: Callable[..., Any], method: str | None, name: int, accesses: bytes
    ) -> Callable[..., Any]:
        """See ``Observer.observed_kernel``."""
        return ObservedKernel(self._call_kernel, kernel, method, name, accesses)

    def _call_kernel(self, kernel: ObservedKernel, launch: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        # While an operator runs, which is recorded as a whole, the mode is not on the stack.
        if not self._active or all(mode is not self for mode in _get_current_dispatch_mode_stack()):
            return launch(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self._call(self._begin_call(kernel.info(args, kwargs), kernel.name), launch, args, kwargs)

    def watch_region(self, code: CodeType, sites: list[tuple[int, int, int, int, list[int]]]) -> None:
        """See ``Observer.watch_region``."""
        self._regions.add(code, sites)

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """See ``Observer.collected``."""
        # A collection can start anywhere, also while this thread holds the lock of the buffer.
        if phase == "start":
            self._collection_start_ns = self.now()
        elif info["collected"] > 0:
            self._collections.append((self._collection_start_ns, self.now()))

    def _record_collections(self) -> None:
        while self._collections:
            start_ns, end_ns = self._collections.pop()
            row = (_SPAN["range"], self.name_id(_NAME["range"], "gc"), start_ns, end_ns - start_ns, -1, -1)
            self._buffer.add("spans", row)

    def live_instances(self, types: tuple[type, ...]) -> list[list[Any]]:
        """See ``Observer.live_instances``."""
        instances = instances_of(types, gc.get_objects())
        return [[item for item in instances if issubclass(type(item), base)] for base in types]

    def times_devices(self) -> bool:
        """See ``Observer.times_devices``. Always False."""
        return False

    def sees_python_handlers(self) -> bool:
        """See ``Observer.sees_python_handlers``. Always True: other modes and subclasses run first."""
        return True

    def sees_threads(self) -> bool:
        """See ``Observer.sees_threads``."""
        return not self._has_unseen_threads

    def attach_cuda(self) -> bool:
        """See ``Observer.attach_cuda``. Always False: Python has no such hook."""
        return False

    def finish_cuda(self, rows: list[CudaRow], has_events: bool) -> None:
        """See ``Observer.finish_cuda``."""
        with self._lock:
            if has_events:
                self._blocks.cuda = self._cuda
            self.cuda_events(rows)

    def cuda_settings(self, divisions: tuple[int, ...] | None, max_split_size: int) -> None:
        """See ``Observer.cuda_settings``."""
        self._cuda.sizes.divisions, self._cuda.sizes.max_split_size = divisions, max_split_size

    def cuda_events(self, rows: list[CudaRow]) -> None:
        """See ``Observer.cuda_events``."""
        with self._lock:
            if self._runs and self._blocks.cuda is not None:
                self._cuda.add_rows(rows, self.now())

    # Operators.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record what it read, wrote and allocated."""
        kwargs = kwargs or {}
        # Tracers turn what is asked of a tensor's size into part of the program.
        is_traced = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        if not self._active or is_traced or not issubclass(type(func), torch._ops.OpOverload):
            return func(*args, **kwargs)
        if any(overrides_dispatch(kind) and not issubclass(kind, FakeTensor) for kind in types):
            # The operators that the tensor subclass calls are recorded instead. If it belongs to another mode, that
            # mode must run: only a call goes on to it.
            return func(*args, **kwargs) if _get_current_dispatch_mode_stack() else NotImplemented
        info, name = self._operators.get(func) or self._inspect(func)
        # ``__torch_function__`` of the arguments has run before the operator reached this mode.
        with torch._C.DisableTorchFunction():
            if not info.is_recorded:
                result = func(*args, **kwargs)
                self._follow_range(func, args)
                return result
            return self._call(self._begin_call(info, name), func, args, kwargs)

    def _call(self, call: _Call, func: Any, args: Any, kwargs: Any) -> Any:
        try:
            if self._accesses:
                call.accesses = self._argument_accesses(call, args, kwargs)
            with self._lock:
                for block, access in call.accesses.values():
                    if access.reads:
                        self._blocks.add_event("read", block, call.started_ns, call.op)
            result = func(*args, **kwargs)
            self._finish_call(call, result)
        finally:
            self._running.pop(call.op, None)
        return result

    def _begin_call(self, info: OperatorInfo, name: int) -> _Call:
        thread = self._thread()
        with self._lock:
            call = _Call(info, name, self._num_ops, thread, self.now(), {})
            self._num_ops += 1
            self._running[call.op] = call.started_ns
        return call

    def _inspect(self, func: Any) -> tuple[OperatorInfo, int]:
        info = inspect_operator(func)
        self._operators[func] = (info, self.name_id(_NAME["operator"], info.name))
        return self._operators[func]

    def _see_first(self, tensor: torch.Tensor, call: _Call | None = None) -> LiveBlock | None:
        """Record memory that no operator allocated at its first sight; None without memory.

        What exists when the recording starts is listed then (``baseline``). Autograd keeps memory alive that is not
        listed: tensors that were saved for a backward pass, buckets of DistributedDataParallel. Fake tensors can stand
        for real ones that are older.

        Args:
            tensor: a tensor of the memory.
            call: the operator call that accesses it; None outside all calls.
        """
        thread = self._thread()
        if not self._has_baseline or self._records_fakes_only or thread.backward_calls > 0:
            return self._blocks.add_older(tensor)
        if torch._C._current_autograd_node() is not None:
            return self._blocks.add_older(tensor)
        with self._lock:
            started_ns = self.now() if call is None else call.started_ns
            op = self._num_ops if call is None else call.op
            block = self._blocks.allocate(tensor, started_ns, op)
            if block is not None and call is not None:
                call.first_seen_bytes += block.size
            elif block is not None:
                self._num_ops += 1
                self._add_unnamed_call(thread, op, started_ns, block.size)
            return block

    def _add_unnamed_call(self, thread: ObservedThread, op: int, time_ns: int, allocated_bytes: int) -> None:
        """Add the call in which something happens outside all operators: it has a stack but no name."""
        phase, is_recompute = phase_of(thread)
        module = thread.modules[-1][0] if thread.modules else -1
        if (site := self._regions.running()) is not None:
            module = site.module if site.module >= 0 else module
            phase = site.phase if phase == _OTHER else phase
        has_stack = self._stacks and allocated_bytes >= self._stack_min_bytes
        stack = self._python_stacks.current() if has_stack else -1
        self._buffer.add("ops", (op, -1, time_ns, 0, thread.index, module, phase, stack, -1, int(is_recompute)))

    def _argument_accesses(self, call: _Call, args: Any, kwargs: Any) -> dict[int, tuple[LiveBlock, ArgumentAccess]]:
        """Blocks of the arguments by number, with their accesses."""
        blocks: dict[int, tuple[LiveBlock, ArgumentAccess]] = {}
        for key, access in call.info.accesses.items():
            value: Any = kwargs.get(key) if isinstance(key, str) else args[key] if key < len(args) else None
            for tensor in value if type(value) in (list, tuple) else (value,):
                if not is_tensor(tensor):
                    continue
                block = self._blocks.find(tensor) or self._see_first(tensor, call)
                if block is not None:
                    _, other = blocks.get(block.number, (block, ArgumentAccess(False, False)))
                    both = ArgumentAccess(access.reads or other.reads, access.writes or other.writes)
                    blocks[block.number] = (block, both)
        return blocks

    def _finish_call(self, call: _Call, result: Any) -> None:
        ended_ns = self.now()
        with self._lock:
            if self._blocks.cuda is not None:
                self._cuda.add_call(call.thread.index, call.op, call.started_ns, ended_ns)
            results = tensors_in(result)
            allocated = (self._blocks.allocate(tensor, ended_ns, call.op) for tensor in results)
            new_blocks = [block for block in allocated if block is not None]
            if self._accesses:
                written = [block for block, access in call.accesses.values() if access.writes]
                for block in written + (new_blocks if call.info.writes_result else []):
                    self._blocks.add_event("write", block, ended_ns, call.op)
            self._add_call(call, ended_ns, call.first_seen_bytes + sum(block.size for block in new_blocks))

    def _add_call(self, call: _Call, ended_ns: int, allocated_bytes: int) -> None:
        thread = call.thread
        sequence = next_sequence_nr()
        new_nodes = range(thread.last_sequence, sequence)
        thread.last_sequence = sequence
        phase, is_recompute = phase_of(thread)
        site = self._regions.running()
        if phase == _OTHER:
            phase = _FORWARD if len(new_nodes) > 0 else phase if site is None else site.phase
        if phase == _FORWARD:
            thread.forward = (thread.forward[0] if thread.forward else call.started_ns, ended_ns)
        is_backward = phase == _BACKWARD and not is_recompute
        module = thread.modules[-1][0] if thread.modules else -1
        inherited, sequence_nr = None, -1
        if is_backward:
            sequence_nr = running_node_sequence_nr()
            inherited = self._forward.find(thread, self._threads, sequence_nr)
        elif len(new_nodes) > 0:
            sequence_nr = new_nodes[0]
        if site is not None:
            module = site.module if site.module >= 0 else inherited[0] if inherited is not None else module
            stack = self._python_stacks.current() if self._stacks else -1
        elif inherited is not None:
            module, stack = inherited
        else:
            is_large = allocated_bytes > 0 and allocated_bytes >= self._stack_min_bytes
            stack = self._python_stacks.current() if self._stacks and (is_large or len(new_nodes) > 0) else -1
            if not is_backward:
                self._forward.keep(thread, new_nodes, module, stack)
        if call.accesses or allocated_bytes > 0:
            row = (
                call.op, call.name, call.started_ns, ended_ns - call.started_ns, thread.index, module, phase, stack,
                sequence_nr, int(is_recompute),
            )  # fmt: skip
            self._buffer.add("ops", row)

    def _follow_range(self, func: Any, args: Any) -> None:
        """Record the profiler ranges of the program, and the phases and waits for data that they stand for."""
        thread, name = self._thread(), func._schema.name
        if name.startswith("profiler::_record_function_enter"):
            thread.ranges.append((str(args[0]), self.now()))
            if str(args[0]).startswith("Optimizer."):
                if thread.optimizer_ranges == 0:
                    self._end_forward(thread)
                    thread.modules_outside = len(thread.modules)
                thread.optimizer_ranges += 1
        elif name.startswith("profiler::_record_function_exit") and thread.ranges:
            self._end_range(thread)

    def _end_range(self, thread: ObservedThread) -> None:
        text, started_ns = thread.ranges.pop()
        self.span(_SPAN["range"], self.name_id(_NAME["range"], text), started_ns, self.now(), -1)
        if text.startswith("enumerate(DataLoader)#") and thread.wait_ranges == 0:
            self.span(_SPAN["data_wait"], -1, started_ns, self.now(), -1)
        if text.startswith("Optimizer.") and thread.optimizer_ranges > 0:
            thread.optimizer_ranges -= 1
            if thread.optimizer_ranges == 0:
                thread.modules_outside = 0
                self.span(_SPAN["phase"], self.name_id(_NAME["range"], "optimizer"), started_ns, self.now(), -1)

    def _end_forward(self, thread: ObservedThread) -> None:
        if thread.forward is not None:
            start_ns, end_ns = thread.forward
            thread.forward = None
            name = self.name_id(_NAME["range"], "forward")
            if self._runs:
                self._buffer.add("spans", (_SPAN["phase"], name, start_ns, end_ns - start_ns, thread.index, -1))

    def _thread(self) -> ObservedThread:
        thread: ObservedThread | None = getattr(self._local, "thread", None)
        if thread is None:
            with self._lock:
                thread = self._local.thread = ObservedThread(
                    len(self._threads), self._window, last_sequence=next_sequence_nr()
                )
                self._threads.append(thread)
                self.name_id(_NAME["thread"], f"{thread.index}\t{threading.current_thread().name}")
        if thread.window != self._window:
            thread = self._thread_of_new_window(thread)
        return thread

    def _thread_of_new_window(self, known: ObservedThread) -> ObservedThread:
        thread = ObservedThread(known.index, self._window, last_sequence=next_sequence_nr())
        thread.has_own_mode = known.has_own_mode
        with self._lock:
            self._threads[known.index] = self._local.thread = thread
        return thread
