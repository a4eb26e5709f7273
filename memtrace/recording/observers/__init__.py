"""Observers, which see the allocations and accesses of the running process, and their common interface."""

from __future__ import annotations

from types import CodeType
from typing import TYPE_CHECKING, Any, Final, Protocol

from memtrace.format.schema import OBSERVED_TABLES, batch_dtypes

if TYPE_CHECKING:
    import torch

Batch = dict[str, Any]
"""The result of ``Observer.drain``: columns as raw little-endian bytes under "table.column", and new names under
"names" as tuples (id, index into NAME_KINDS, text, ids of the frames)."""

COLUMN_DTYPES: Final = {table: batch_dtypes(table) for table in OBSERVED_TABLES}
"""Columns and numpy dtypes of a batch. Kinds, phases and categories are codes into the tuples of
``memtrace.format.schema``, ``device`` is 0 for the CPU and 1 + i for cuda:i, -1 is null. A batch may leave out any
nullable column, which is null in every row then, except ``allocated_size``, which is ``size`` then."""

CudaRow = tuple[int, int, int, int, int, int, int, int]
"""An event of the CUDA allocator from a source other than the observer: kind, device number, address, size, stream,
pool, extra, time_ns.

Sizes are in bytes. ``address`` of an out-of-memory event is the free memory of the device. ``extra`` is the allocated
size of a baseline block, and 1 for an OLDER_SEGMENT that is expandable. ``time_ns`` -1 means now."""
OLDER_SEGMENT: Final = 13
"""Kind of a ``CudaRow``, in addition to EVENT_KINDS: a segment older than the recording. It creates no event."""


class Observer(Protocol):
    """Sees every allocation, free, read and write between ``start`` and ``stop``.

    Hooks call the marking functions on the thread that a mark is about. Name ids come from ``name_id``; -1 is no name.
    """

    kind: str
    """Name of the observer in the manifest."""

    def start(self, *, accesses: bool, stacks: bool, stack_min_bytes: int, device_time_min_bytes: int) -> None:
        """Start to observe this process: the calling thread immediately, other threads from their first allocation.

        Args:
            accesses: whether to record reads and writes.
            stacks: whether to record Python stacks.
            stack_min_bytes: operators that allocate fewer bytes get no stack unless they create autograd nodes.
            device_time_min_bytes: operators that access a GPU block of at least this size are timed on the GPU; -1
                times none.
        """

    def stop(self) -> None:
        """Stop observing and remove all hooks. A last ``drain`` returns the rest."""

    def wait(self, seconds: float) -> int:
        """Sleep until there is much to drain, ``seconds`` have passed or the observer stops; return the number of
        records.
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

    def push_module(self, name: int) -> bool:
        """Record that a module's forward starts; return whether it is in no other module call and autograd records."""

    def pop_module(self, name: int) -> None:
        """Record that a module's forward ends, and with it any calls inside it that an exception ended."""

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

    def baseline(self, tensors: list[torch.Tensor]) -> None:
        """Record the blocks of tensors that are older than the recording."""

    def collected(self, phase: str, info: dict[str, int]) -> None:
        """Take note of a garbage collection: an element of ``gc.callbacks``. Those that free objects become ranges."""
