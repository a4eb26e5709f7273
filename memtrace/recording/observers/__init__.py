"""Observers: what sees allocations and accesses in the running process. Two of them, one contract."""

from __future__ import annotations

from types import CodeType
from typing import TYPE_CHECKING, Any, Final, Protocol

from memtrace.format.schema import OBSERVED_TABLES, batch_dtypes

if TYPE_CHECKING:
    import torch

# One drained batch: columns as raw little-endian bytes under "table.column", and the new names under "names"
# as tuples (id, index into NAME_KINDS, text, frames).
Batch = dict[str, Any]

COLUMN_DTYPES: Final = {table: batch_dtypes(table) for table in OBSERVED_TABLES}
"""Columns and numpy dtypes of a batch. Kinds, phases and categories are codes into the tuples of
``memtrace.format.schema``, ``device`` is 0 for the CPU and 1 + i for cuda:i, -1 is null. A batch may leave out any
nullable column, which is null in every row then, except ``allocated_size``, which is ``size`` then."""

CudaRow = tuple[int, int, int, int, int, int, int, int]
"""An event of CUDA's allocator told from outside: kind, number of the device, address (of an oom what the device had
free), size, stream, pool, extra (of a baseline its allocated size; of OLDER_SEGMENT 1 where it is expandable), time_ns
(-1: now). Bytes."""
OLDER_SEGMENT: Final = 13
"""A kind of row beside those of EVENT_KINDS: a segment older than the recording, which makes no event."""


class Observer(Protocol):
    """Sees every allocation, free, read and write from ``start`` to ``stop``; ``drain`` hands over what it saw.

    The marking functions are called by the session's hooks on the thread they speak of. Name ids come from
    ``name_id``; -1 stands for no name.
    """

    kind: str

    def start(self, *, accesses: bool, stacks: bool, stack_min_bytes: int, device_time_min_bytes: int) -> None:
        """Begin to observe this process; the calling thread at once, others with their first allocation.

        Operators that touch a block on a GPU of at least ``device_time_min_bytes`` are timed there; -1: none.
        """

    def stop(self) -> None:
        """End; nothing is left hooked. What was seen and not drained stays for one last ``drain``."""

    def wait(self, seconds: float) -> int:
        """Sleep until there is much to drain, the time is over or the observer stopped; the number of records."""

    def wake(self) -> None:
        """End a ``wait`` on another thread."""

    def drain(self, until_ns: int) -> Batch:
        """Take what was seen since the last call and until a time; -1: everything."""

    def overrun(self) -> bool:
        """Whether the observer ended itself because nobody drained it."""

    def now(self) -> int:
        """Nanoseconds since ``start``."""

    def name_id(self, kind: int, text: str) -> int:
        """The id of a name, new or known; kind is an index into NAME_KINDS."""

    def hide_frames_of(self, code: CodeType) -> None:
        """Leave the frames of a function of ours out of Python stacks."""

    def push_module(self, name: int) -> int:
        """A module's forward begins; the depth of module calls then."""

    def pop_module(self, name: int) -> None:
        """It ends, and with it calls inside it that an exception cut short."""

    def begin_backward(self) -> int:
        """The autograd engine starts; the time."""

    def end_backward(self, started: int) -> None:
        """It has returned; ``started`` is what ``begin_backward`` gave."""

    def span(self, kind: int, name: int, start_ns: int, end_ns: int, index: int) -> None:
        """Record a span; kind is an index into SPAN_KINDS."""

    def waiting(self, on: bool) -> None:
        """While on, ranges of a DataLoader are part of a wait that is being timed already."""

    def label(self, tensors: list[torch.Tensor], category: int, names: list[int], gradient_category: int) -> None:
        """Tell the category and names of the blocks behind tensors; those of their gradients too unless it is -1."""

    def times_devices(self) -> bool:
        """Whether operators can be timed on a GPU."""

    def attach_cuda(self) -> bool:
        """Hear of every event of CUDA's allocator from now on; False where that cannot be."""

    def cuda_settings(self, rounds_to_512: bool, max_split_size: int) -> None:
        """Tell what decides how long CUDA's blocks are; ``max_split_size`` in bytes, -1: none."""

    def cuda_events(self, rows: list[CudaRow]) -> None:
        """Tell of events of CUDA's allocator that the observer does not hear of itself."""

    def baseline(self, tensors: list[torch.Tensor]) -> None:
        """Tell of tensors that are older than the recording."""
