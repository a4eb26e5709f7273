"""Observers, which see the allocations and accesses of the running process, and their common interface."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from memtrace.format.schema import OBSERVED_TABLES, batch_dtypes
from memtrace.format.stored import FindEventForms

if TYPE_CHECKING:
    import torch

Batch = dict[str, Any]
"""The result of ``Observer.drain``: columns as objects with the buffer protocol under "table.column", and new names
under "names" as tuples (id, index into NAME_KINDS, text, ids of the frames). An observer may add bitmaps, least
significant bit first: "table.column.valid" of a column with nulls, "table.column.bits" of a column of booleans. If it
adds one, it adds all. It may also add what the batch changes in the live set, under "changes.column"."""

CHANGES_DTYPES: Final = {
    "event_rows": np.int32,
    "event_order_ns": np.int64,
    "op_rows": np.int32,
    "level_device": np.int8,
    "level_time_ns": np.int64,
    "level_bytes": np.int64,
}
"""Columns and numpy dtypes of what a batch changes in the live set: the rows of ``events`` that still matter after the
batch, and the largest time up to each of them; the rows of ``ops`` that these refer to; and the points of the live
bytes by device, as in ``memtrace.format.keyframes.Level``."""

COLUMN_DTYPES: Final = {table: batch_dtypes(table) for table in OBSERVED_TABLES}
"""Columns and numpy dtypes of a batch. Kinds, phases and categories are codes into the tuples of
``memtrace.format.schema``, ``device`` is 0 for the CPU and 1 + i for cuda:i, -1 is null. A batch may leave out any
nullable column, which is null in every row then, except ``allocated_size``, which is ``size`` then."""

CudaRow = tuple[int, int, int, int, int, int, int, int]
"""An event of the CUDA allocator from a source other than the observer: kind, device number, address, size, stream,
pool, extra, time_ns.

Sizes are in bytes. ``address`` of an out-of-memory event is the free memory of the device. ``extra`` is the allocated
size of a baseline block, and 1 for an OLDER_SEGMENT that is expandable. ``time_ns`` -1 means now."""
FOUND_BLOCK: Final = 15
"""Kind of a ``CudaRow``, in addition to EVENT_KINDS: a block that was allocated during a pause. It becomes an
allocation without an operator; ``extra`` is its allocated size."""
OLDER_SEGMENT: Final = 13
"""Kind of a ``CudaRow``, in addition to EVENT_KINDS: a segment older than the recording. It creates no event."""


class Named(Protocol):
    """What has a name."""

    @property
    def name_id(self) -> int:
        """Id of the name."""


ModuleHook = Callable[["torch.nn.Module", tuple[Any, ...], dict[str, Any]], int]
"""Called with a module and its arguments when its forward starts; returns what ``Observer.pop_module`` gets."""


@dataclass(frozen=True)
class ModuleCalls:
    """What the hook of module calls uses.

    Attributes:
        known: modules that have a name, by id.
        name_module: called with modules that have none.
        label_inputs: called with the arguments of a module that is in no other module call, where autograd records.
        failed: called with an error of the hook.
    """

    known: Mapping[int, Named]
    name_module: Callable[[torch.nn.Module], None]
    label_inputs: Callable[[object], None]
    failed: Callable[[Exception], None]


class Observer(Protocol):
    """Sees every allocation, free, read and write between ``start`` and ``stop``.

    Hooks call the marking functions on the thread that a mark is about. Name ids come from ``name_id``; -1 is no name.
    """

    kind: str
    """Name of the observer in the manifest."""

    find_event_forms: FindEventForms | None
    """A faster function in the place of ``memtrace.format.stored.find_event_forms``; None if there is none."""

    def start(self, *, accesses: bool, stacks: bool, stack_min_bytes: int, device_time_min_bytes: int) -> None:
        """Start to observe this process: the calling thread immediately, other threads from their first allocation.

        Args:
            accesses: whether to record reads and writes.
            stacks: whether to record Python stacks.
            stack_min_bytes: operators that allocate fewer bytes get no stack unless they create autograd nodes.
            device_time_min_bytes: operators that access a GPU block of at least this size are timed on the GPU; -1
                times none.
        """

    def pause(self) -> None:
        """Observe nothing until ``resume``, except the frees of the blocks that are known; nothing if paused already.

        Called on the thread that is recorded. Spans, labels and ``baseline`` are still recorded.
        """

    def resume(self) -> None:
        """Observe again, as after ``start``, and know the same blocks as before; nothing if not paused.

        Raises:
            RuntimeError: another library has replaced what the observer hooks into.
        """

    def stop(self) -> None:
        """Stop observing and remove all hooks. A last ``drain`` returns the rest."""

    def wait(self, seconds: float, enough_events: int) -> int:
        """Sleep until there are ``enough_events`` to drain or the writer is needed for something else, ``seconds`` have
        passed or the observer stops; return the number of records.
        """

    def wake(self) -> None:
        """End a ``wait`` on another thread."""

    def drain(self, until_ns: int) -> Batch:
        """Return and remove the records up to ``until_ns``; -1 for all of them."""

    def failure(self) -> str | None:
        """Why the observer stopped by itself; None if it did not."""

    def abandon(self) -> None:
        """Become inert in a forked child: threads of the parent may have held any of the observer's locks."""

    def now(self) -> int:
        """Nanoseconds since ``start``."""

    def name_id(self, kind: int, text: str) -> int:
        """The id of a new or known name. ``kind`` is an index into NAME_KINDS."""

    def hide_frames_of(self, code: CodeType) -> None:
        """Leave the frames of a function out of Python stacks."""

    def module_hook(self, calls: ModuleCalls) -> ModuleHook:
        """Return the function that records the beginnings of module calls; its errors go to ``calls.failed``."""

    def pop_module(self, name: int) -> None:
        """Record that a module's forward ends, and with it any calls inside it that an exception ended.

        Args:
            name: what the hook returned.
        """

    def begin_backward(self) -> int:
        """Record that the autograd engine starts; return the time."""

    def end_backward(self, started_ns: int) -> None:
        """Record that the autograd engine has returned. ``started_ns`` is the result of ``begin_backward``."""

    def span(self, kind: int, name: int, start_ns: int, end_ns: int, index: int) -> None:
        """Record a span. ``kind`` is an index into SPAN_KINDS."""

    def end_phase(self) -> None:
        """End the forward phase of the calling thread, so that it is recorded: another recording begins or ends."""

    def waiting(self, on: bool) -> None:
        """Enter (True) or leave (False) a wait for data that the caller records itself.

        DataLoader ranges inside are then not recorded as waits as well.
        """

    def label(self, tensors: list[torch.Tensor], category: int, names: list[int], gradient_category: int) -> None:
        """Label the blocks of tensors with a category and names.

        Args:
            tensors: the tensors.
            category: index into CATEGORIES.
            names: a name id for each tensor.
            gradient_category: category for the gradients of the tensors; -1 leaves gradients unlabelled.
        """

    def label_inputs(self, tensors: list[torch.Tensor], category: int) -> None:
        """Label the blocks of tensors that autograd has not computed. ``category`` is an index into CATEGORIES."""

    def live_instances(self, types: tuple[type, ...]) -> list[list[Any]]:
        """For each type, the live objects that are instances of it by their own type; no code of the program runs."""

    def times_devices(self) -> bool:
        """Whether operators can be timed on a GPU."""

    def sees_python_handlers(self) -> bool:
        """Whether the operators are recorded that dispatch modes and tensor subclasses call."""

    def sees_threads(self) -> bool:
        """Whether all operators were recorded of the threads that the program started and that ran operators."""

    def attach_cuda(self) -> bool:
        """Start to observe torch's CUDA allocator, from the next snapshot that torch takes of it; False if that is not
        possible. ``finish_cuda`` must follow.
        """

    def finish_cuda(self, rows: list[CudaRow], has_events: bool) -> None:
        """Record the CUDA segments and blocks that exist, and record accesses to CUDA blocks from now on.

        Args:
            rows: segments and blocks that are older than the recording, before the first event of the allocator.
            has_events: whether the allocator's events follow, from ``attach_cuda`` or ``cuda_events``; otherwise blocks
                are known by the storages of tensors.
        """

    def cuda_settings(self, divisions: tuple[int, ...] | None, max_split_size: int) -> None:
        """Set the CUDA allocator settings that determine block sizes.

        Args:
            divisions: ``AllocatorSettings.roundup_power2_divisions``; None: unknown, and so are the sizes.
            max_split_size: in bytes; -1: none.
        """

    def cuda_events(self, rows: list[CudaRow]) -> None:
        """Add events of the CUDA allocator that the observer does not see itself."""

    def allocation_failed(self, device: int, size: int, free: int) -> None:
        """Record an allocation that failed during a pause, after the blocks that are live.

        Args:
            device: 0 for the CPU, 1 + i for cuda:i.
            size: requested bytes.
            free: free bytes of the device; -1: unknown.
        """

    def baseline(self, tensors: list[torch.Tensor]) -> None:
        """Record the blocks of tensors that are older than the recording, or were allocated during a pause.

        Those of a pause begin now, as allocations without an operator.
        """

    def observed_kernel(
        self, kernel: Callable[..., Any], method: str | None, name: int, accesses: bytes
    ) -> Callable[..., Any]:
        """Return an object to be used in place of a kernel that is called without the dispatcher.

        It records every call as an operator, unless an operator is running, and has the attributes of the kernel.

        Args:
            kernel: what is called.
            method: name of the method of ``kernel`` that launches it; None if it is called itself.
            name: name id of the operator.
            accesses: for each argument that is a tensor, in order: 1 if the kernel reads it, 2 if it writes it, 3 for
                both. Tensors beyond the last one count as read and written.
        """

    def watch_region(self, code: CodeType, sites: list[tuple[int, int, int, int, list[int]]]) -> None:
        """Attribute what the lines of generated code do to the lines of the program that they were generated from.

        Args:
            code: a function that torch.compile generated.
            sites: for ranges of lines, ascending: the first line, the name id of the module (-1: unknown), the index
                into PHASES of operators outside all module calls, the name id of the frame of the generated code, and
                the name ids of the frames of the program, innermost first.
        """

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """Take note of a garbage collection: an element of ``gc.callbacks``. Those that free objects become ranges."""
