"""The dispatch observer: the same events in pure Python, where no compiler is and under ``FakeTensorMode``.

Differences to the native observer, each with its reason:

* Memory that an operator allocates and frees within one call (workspace) is not seen: below the dispatcher there is no
  hook in Python.
* torch itself behaves a little differently under a mode in Python: where autograd sums gradients, or an operator adds a
  bias, it adds out of place, so that each such sum is a block of its own.
* A block's allocation is seen when the operator that made it returns, so its time is the operator's end.
* Fake tensors have sizes but no addresses; their address is null.
* Memory that changes size in place (``Tensor.resize_``) keeps the size it was first seen with.
* Other threads are seen only as far as torch carries its modes there: autograd's threads, not the user's own.
* It is slow: see BENCHMARKS.md for both.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves

from memtrace.format.schema import EVENT_KINDS, NAME_KINDS, PHASES, SPAN_KINDS
from memtrace.recording.observers import COLUMN_DTYPES, Batch, CudaRow

_KIND: Final = {kind: code for code, kind in enumerate(EVENT_KINDS)}
_NAME: Final = {kind: code for code, kind in enumerate(NAME_KINDS)}
_OF_SEGMENTS: Final = tuple(
    _KIND[kind] for kind in ("segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom")
)
_SPAN: Final = {kind: code for code, kind in enumerate(SPAN_KINDS)}
_FORWARD, _BACKWARD, _OPTIMIZER, _OTHER = (PHASES.index(name) for name in ("forward", "backward", "optimizer", "other"))
_OVERWRITES: Final = ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
                      "_foreach_copy_", "_foreach_zero_", "set_", "resize_", "eye_")  # fmt: skip
_UNTOUCHED: Final = ("set_data", "requires_grad_", "retain_grad", "record_stream", "is_", "_has_", "size", "stride",
                     "resize_", "set_", "sym_", "detach", "alias")  # fmt: skip
_VIEWS: Final = ("_unsafe_view", "_reshape_alias")  # their schemas do not say so
FORWARD_KEPT: Final = 1 << 17
_MAX_DEPTH: Final = 128


def fake_mode_active() -> bool:
    """Whether the calling thread runs under a FakeTensorMode."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return any(isinstance(mode, FakeTensorMode) for mode in _get_current_dispatch_mode_stack())


@dataclass(frozen=True)
class _Operator:
    """What the schema says of an operator: for each argument, by position and name, whether it is read and written."""

    name: int
    uses: dict[int | str, tuple[bool, bool]]
    writes_result: bool
    untouched: bool


@dataclass
class _Thread:
    index: int
    modules: list[tuple[int, int]] = field(default_factory=list)
    ranges: list[tuple[str, int]] = field(default_factory=list)
    backward_calls: int = 0
    optimizer_ranges: int = 0
    wait_ranges: int = 0
    modules_outside: int = 0
    forward: tuple[int, int] | None = None
    last_sequence: int = 0


@dataclass
class _Block:
    number: int
    size: int
    device: int
    address: int
    labels: set[int] = field(default_factory=set)
    reference: Any = None


class DispatchObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """See the module's docstring and ``Observer`` for the contract."""

    kind = "dispatch"

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._lock = threading.RLock()
        self._drained = threading.Event()
        self._local = threading.local()
        self._rows: dict[str, list[tuple[int, ...]]] = {name: [] for name in COLUMN_DTYPES}
        self._new_names: list[tuple[int, int, str, list[int]]] = []
        self._name_ids: dict[Any, int] = {}
        self._operators: dict[Any, _Operator] = {}
        self._blocks: dict[int, _Block] = {}
        self._forward: OrderedDict[tuple[int, int], tuple[int, int]] = OrderedDict()
        self._num_blocks = self._num_ops = self._num_threads = 0
        self._hidden: set[CodeType] = set()
        self._active = False

    # Start and end.

    def start(self, *, accesses: bool, stacks: bool, stack_min_bytes: int, device_time_min_bytes: int) -> None:
        """See ``Observer.start``. Nothing is timed on a GPU."""
        self._accesses, self._stacks, self._stack_min_bytes = accesses, stacks, stack_min_bytes
        self._t0 = time.perf_counter_ns()
        self._active = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> None:
        """See ``Observer.stop``."""
        if not self._active:
            return
        self._end_forward(self._thread())
        self._active = False
        if self in _get_current_dispatch_mode_stack():
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._blocks.clear()
        self._drained.set()

    def wait(self, seconds: float) -> int:
        """See ``Observer.wait``."""
        self._drained.wait(min(seconds, 0.5) if self._active else 0)
        return len(self._rows["events"])

    def wake(self) -> None:
        """See ``Observer.wake``."""
        self._drained.set()

    def overrun(self) -> bool:
        """Never: Python's own lock keeps the program from running ahead of the writer."""
        return False

    def drain(self, until_ns: int) -> Batch:
        """See ``Observer.drain``; rows of segments that are told late come later than they happened."""
        with self._lock:
            rows, self._rows = self._rows, {name: [] for name in COLUMN_DTYPES}
            names, self._new_names = self._new_names, []
        batch: Batch = {"names": names}
        for table, columns in COLUMN_DTYPES.items():
            values = list(zip(*rows[table], strict=True)) or [()] * len(columns)
            # The last columns of a table may be none of ours: they are left out.
            for (column, dtype), data in zip(columns.items(), values, strict=False):
                batch[f"{table}.{column}"] = np.array(data, dtype).tobytes()
        return batch

    # Marks.

    def now(self) -> int:
        """See ``Observer.now``."""
        return time.perf_counter_ns() - self._t0

    def name_id(self, kind: int, text: str) -> int:
        """See ``Observer.name_id``."""
        return self._intern(kind, (kind, text), text, [])

    def _intern(self, kind: int, key: Any, text: str, frames: list[int]) -> int:
        with self._lock:
            known = self._name_ids.get(key)
            if known is None:
                known = self._name_ids[key] = len(self._name_ids)
                self._new_names.append((known, kind, text, frames))
            return known

    def hide_frames_of(self, code: CodeType) -> None:
        """See ``Observer.hide_frames_of``."""
        self._hidden.add(code)

    def push_module(self, name: int) -> int:
        """See ``Observer.push_module``."""
        modules = self._thread().modules
        modules.append((name, self.now()))
        return len(modules)

    def pop_module(self, name: int) -> None:
        """See ``Observer.pop_module``."""
        modules = self._thread().modules
        if not any(module == name for module, _ in modules):
            return
        while True:
            module, started = modules.pop()
            self.span(_SPAN["module"], module, started, self.now(), -1)
            if module == name:
                return

    def begin_backward(self) -> int:
        """See ``Observer.begin_backward``."""
        thread = self._thread()
        if thread.backward_calls == 0:
            self._end_forward(thread)
            thread.modules_outside = len(thread.modules)
        thread.backward_calls += 1
        return self.now()

    def end_backward(self, started: int) -> None:
        """See ``Observer.end_backward``."""
        thread = self._thread()
        thread.backward_calls -= 1
        if thread.backward_calls == 0:
            thread.modules_outside = 0
            self.span(_SPAN["phase"], self.name_id(_NAME["range"], "backward"), started, self.now(), -1)

    def span(self, kind: int, name: int, start_ns: int, end_ns: int, index: int) -> None:
        """See ``Observer.span``."""
        thread = self._thread()
        if kind == _SPAN["step"]:
            self._end_forward(thread)
        if self._active:
            with self._lock:
                self._rows["spans"].append((kind, name, start_ns, end_ns - start_ns, thread.index, index))

    def waiting(self, on: bool) -> None:
        """See ``Observer.waiting``."""
        self._thread().wait_ranges += 1 if on else -1

    def label(self, tensors: list[torch.Tensor], category: int, names: list[int], gradient_category: int) -> None:
        """See ``Observer.label``."""
        if not self._active:
            return
        for tensor, name in zip(tensors, names, strict=True):
            self._label(tensor, category, name)
            if gradient_category >= 0 and tensor.is_leaf and tensor.grad is not None:
                self._label(tensor.grad, gradient_category, name)

    def _label(self, tensor: torch.Tensor, category: int, name: int) -> None:
        with self._lock:
            block = self._block_of(tensor)
            if block is not None and category not in block.labels:
                block.labels.add(category)
                self._rows["labels"].append((block.number, category, name))

    def baseline(self, tensors: list[torch.Tensor]) -> None:
        """See ``Observer.baseline``."""
        # Under a fake mode the real tensors of the process are not what is traced.
        fakes_only = fake_mode_active()
        for tensor in tensors:
            if not fakes_only or _is_fake(tensor):
                self._block_of(tensor)

    def times_devices(self) -> bool:
        """See ``Observer.times_devices``: no."""
        return False

    def attach_cuda(self) -> bool:
        """See ``Observer.attach_cuda``: there is no such hook in Python."""
        return False

    def cuda_settings(self, rounds_to_512: bool, max_split_size: int) -> None:
        """See ``Observer.cuda_settings``: the sizes of blocks come from tensors here, so nothing follows from it."""

    def cuda_events(self, rows: list[CudaRow]) -> None:
        """See ``Observer.cuda_events``; of blocks this observer knows by their tensors."""
        with self._lock:
            for kind, device, address, size, stream, pool, _, time_ns in rows:
                if kind in _OF_SEGMENTS:
                    now = self.now() if time_ns < 0 else time_ns
                    failed = kind == _KIND["oom"]
                    place, free = (-1, address) if failed else (address, -1)
                    self._rows["events"].append(
                        (now, kind, 1 + device, -1, size, -1, place, -1, stream, -1, pool, free)
                    )

    # Blocks.

    def _storage(self, tensor: torch.Tensor) -> torch.UntypedStorage | None:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None  # sparse and other tensors without a storage of their own
        fake = _is_fake(tensor)
        if tensor.device.type not in ("cpu", "cuda") or (storage.device.type == "meta" and not fake):
            return None
        return storage if storage.nbytes() > 0 else None

    def _block_of(self, tensor: torch.Tensor) -> _Block | None:
        """The block behind a tensor; one that is not known yet is older than the recording."""
        storage = self._storage(tensor)
        if storage is None:
            return None
        block = self._blocks.get(storage._cdata)
        return block or self._begin(tensor, storage, "baseline", self.now(), -1)

    def _begin(self, tensor: torch.Tensor, storage: torch.UntypedStorage, kind: str, now: int, op: int) -> _Block:
        device = 0 if tensor.device.type == "cpu" else 1 + (tensor.device.index or 0)
        address = -1 if _is_fake(tensor) else storage.data_ptr()
        with self._lock:
            block = _Block(self._num_blocks, int(storage.nbytes()), device, address)
            self._num_blocks += 1
            key = storage._cdata
            self._blocks[key] = block
            block.reference = weakref.ref(storage, lambda _: self._freed(key, block))
            self._event(kind, block, now, op, self._thread().index)
        return block

    def _freed(self, key: int, block: _Block) -> None:
        if not self._active:
            return
        with self._lock:
            if self._blocks.get(key) is block:
                del self._blocks[key]
            self._event("free", block, self.now(), -1, self._thread().index)

    def _event(self, kind: str, block: _Block, now: int, op: int, thread: int) -> None:
        access = kind in ("read", "write")
        size, address = (-1, -1) if access else (block.size, block.address)
        # On the CPU the allocator counts what was asked for.
        allocated = size if block.device == 0 else -1
        self._rows["events"].append(
            (now, _KIND[kind], block.device, block.number, size, allocated, address, op, -1, thread, -1, -1)
        )

    # Operators.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and write down what it read, wrote and allocated."""
        kwargs = kwargs or {}
        if not self._active:
            return func(*args, **kwargs)
        operator = self._operators.get(func) or self._inspect(func)
        if operator.untouched:
            result = func(*args, **kwargs)
            self._follow_range(func, args)
            return result
        thread = self._thread()
        op, started = self._num_ops, self.now()
        self._num_ops += 1
        used = self._used(operator, args, kwargs) if self._accesses else {}
        with self._lock:
            for block, (reads, _) in used.values():
                if reads:
                    self._event("read", block, started, op, thread.index)
        result = func(*args, **kwargs)
        self._finish(operator, thread, op, started, used, result)
        return result

    def _used(self, operator: _Operator, args: Any, kwargs: Any) -> dict[int, tuple[_Block, tuple[bool, bool]]]:
        used: dict[int, tuple[_Block, tuple[bool, bool]]] = {}
        for place, (reads, writes) in operator.uses.items():
            value = kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(tensor, torch.Tensor) and (block := self._block_of(tensor)) is not None:
                    before = used.get(block.number, (block, (False, False)))[1]
                    used[block.number] = (block, (before[0] or reads, before[1] or writes))
        return used

    def _finish(self, operator: _Operator, thread: _Thread, op: int, started: int, used: Any, result: Any) -> None:
        ended = self.now()
        fresh = []
        with self._lock:
            for tensor in tree_leaves(result):
                storage = self._storage(tensor) if isinstance(tensor, torch.Tensor) else None
                if storage is not None and storage._cdata not in self._blocks:
                    fresh.append(self._begin(tensor, storage, "alloc", ended, op))
            written = [block for block, (_, writes) in used.values() if writes] + (
                fresh if operator.writes_result else []
            )
            if self._accesses:
                for block in written:
                    self._event("write", block, ended, op, thread.index)
            self._add_call(operator, thread, op, started, ended, bool(used), sum(block.size for block in fresh))

    def _add_call(
        self,
        operator: _Operator,
        thread: _Thread,
        op: int,
        started: int,
        ended: int,
        touched: bool,
        allocated: int,
    ) -> None:
        sequence = _sequence_nr()
        made = range(thread.last_sequence, sequence)
        thread.last_sequence = sequence
        phase, recompute = self._phase(thread)
        if phase == _OTHER and len(made) > 0:
            phase = _FORWARD
        if phase == _FORWARD:
            thread.forward = (thread.forward[0] if thread.forward else started, ended)
        module = thread.modules[-1][0] if thread.modules else -1
        inherited, number = None, -1
        if phase == _BACKWARD and not recompute:
            node = torch._C._current_autograd_node()
            number = node._sequence_nr() if node is not None else -1
            number = number if number < 1 << 63 else -1  # AccumulateGrad: the largest unsigned number
            inherited = self._forward.get((0, number))
        elif len(made) > 0:
            number = made[0]
        large = allocated > 0 and allocated >= self._stack_min_bytes
        stack = self._stack() if self._stacks and inherited is None and (large or len(made) > 0) else -1
        if inherited is not None:
            module, stack = inherited
        elif phase != _BACKWARD or recompute:
            self._remember(made, module, stack)
        if touched or allocated > 0:
            self._rows["ops"].append(
                (
                    op,
                    operator.name,
                    started,
                    ended - started,
                    thread.index,
                    module,
                    phase,
                    stack,
                    number,
                    int(recompute),
                )
            )

    def _remember(self, made: range, module: int, stack: int) -> None:
        for number in made:
            self._forward[0, number] = (module, stack)
            if len(self._forward) > FORWARD_KEPT:
                self._forward.popitem(last=False)

    def _phase(self, thread: _Thread) -> tuple[int, bool]:
        deeper = len(thread.modules) > thread.modules_outside
        if thread.backward_calls > 0 or torch._C._current_autograd_node() is not None:
            return _BACKWARD, deeper
        if thread.optimizer_ranges > 0 and not deeper:
            return _OPTIMIZER, False
        return (_FORWARD if deeper else _OTHER), False

    def _follow_range(self, func: Any, args: Any) -> None:
        thread, name = self._thread(), func._schema.name
        if name.startswith("profiler::_record_function_enter"):
            thread.ranges.append((str(args[0]), self.now()))
            if str(args[0]).startswith("Optimizer."):
                if thread.optimizer_ranges == 0:
                    self._end_forward(thread)
                    thread.modules_outside = len(thread.modules)
                thread.optimizer_ranges += 1
        elif name.startswith("profiler::_record_function_exit") and thread.ranges:
            text, started = thread.ranges.pop()
            self.span(_SPAN["range"], self.name_id(_NAME["range"], text), started, self.now(), -1)
            if text.startswith("enumerate(DataLoader)#") and thread.wait_ranges == 0:
                self.span(_SPAN["data_wait"], -1, started, self.now(), -1)
            if text.startswith("Optimizer.") and thread.optimizer_ranges > 0:
                thread.optimizer_ranges -= 1
                if thread.optimizer_ranges == 0:
                    thread.modules_outside = 0
                    self.span(_SPAN["phase"], self.name_id(_NAME["range"], "optimizer"), started, self.now(), -1)

    def _end_forward(self, thread: _Thread) -> None:
        if thread.forward is not None:
            started, ended = thread.forward
            thread.forward = None
            self.span(_SPAN["phase"], self.name_id(_NAME["range"], "forward"), started, ended, -1)

    def _inspect(self, func: Any) -> _Operator:
        schema = func._schema
        short = schema.name.split("::")[-1]
        uses: dict[int | str, tuple[bool, bool]] = {}
        for place, argument in enumerate(schema.arguments):
            if "Tensor" not in str(argument.type):
                continue
            alias = argument.alias_info
            writes = alias is not None and alias.is_write
            if short in _VIEWS:
                continue
            reads = alias is None or (writes and not argument.is_out and not short.startswith(_OVERWRITES))
            if reads or writes:
                uses[argument.name if argument.kwarg_only else place] = (reads, writes)
        untouched = schema.name.startswith("profiler::_record_function") or short.startswith(_UNTOUCHED)
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        operator = _Operator(
            self.name_id(_NAME["operator"], name),
            uses,
            not short.startswith(("empty", "new_empty")),
            untouched,
        )
        self._operators[func] = operator
        return operator

    def _thread(self) -> _Thread:
        thread: _Thread | None = getattr(self._local, "thread", None)
        if thread is None:
            with self._lock:
                thread = self._local.thread = _Thread(self._num_threads, last_sequence=_sequence_nr())
                self._num_threads += 1
                self.name_id(_NAME["thread"], f"{thread.index}\t{threading.current_thread().name}")
        return thread

    def _stack(self) -> int:
        frame: FrameType | None = sys._getframe(1)
        positions: list[tuple[CodeType, int]] = []
        while frame is not None and len(positions) < _MAX_DEPTH:
            if frame.f_code not in self._hidden and frame.f_code.co_filename != __file__:
                positions.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        key = tuple(positions)
        known = self._name_ids.get(key)
        if known is not None:
            return known
        frames = [
            self.name_id(_NAME["frame"], f"{code.co_filename}\t{line}\t{getattr(code, 'co_qualname', code.co_name)}")
            for code, line in positions
        ]
        return self._intern(_NAME["stack"], key, "", frames)


def _sequence_nr() -> int:
    """The number of the next autograd node of this thread."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def _is_fake(tensor: torch.Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)
