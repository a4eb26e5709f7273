"""Devices for the model: one that answers from a history, and invented ones for what-ifs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

from memtrace.planning.allocator.history import SEGMENT_ALLOC, SEGMENT_MAP
from memtrace.planning.allocator.layout import MAX_RANGE_BYTES

if TYPE_CHECKING:
    from memtrace.planning.allocator.blocks import FreeList
    from memtrace.planning.allocator.model import Allocator

Order = Literal["ascending", "descending", "random"]
ORDERS: Final[tuple[Order, ...]] = ("ascending", "descending", "random")

_STRIDE: Final = 1 << 40  # between invented addresses: more than any segment is long
_SHUFFLED: Final = 1 << 14  # so many segments are shuffled together
_FIRST: Final = 1 << 62  # invented addresses lie where no recorded one can


class InventedDevice:
    """A device of a given size that hands out new segments in ascending, descending or random address order."""

    def __init__(self, capacity: int | None = None, order: Order = "ascending") -> None:
        self.total_bytes = capacity
        self._order = order
        self._shuffled = random.Random(0).sample(range(_SHUFFLED), _SHUFFLED) if order == "random" else []
        self._count = 0
        self._limit = _FIRST if capacity is None else capacity

    def allocate(self, size: int, allocator: Allocator) -> int | None:
        """Address of a new segment; None where the capacity is spent."""
        return self._next() if allocator.reserved + size <= self._limit else None

    def reserve(self, home: FreeList, allocator: Allocator) -> tuple[int, int]:
        """A virtual range of 9/8 of the device, in whole pages."""
        length = MAX_RANGE_BYTES if self.total_bytes is None else self.total_bytes * 9 // 8
        return self._next(), -(-length // home.page) * home.page

    def map(self, address: int, size: int, allocator: Allocator) -> bool:
        """Whether the capacity holds these pages too."""
        return allocator.reserved + size <= self._limit

    def _next(self) -> int:
        self._count += 1
        if self._order == "ascending":
            return self._count * _STRIDE
        if self._order == "descending":
            return _FIRST - self._count * _STRIDE
        turn, place = divmod(self._count, _SHUFFLED)
        return (1 + turn * _SHUFFLED + self._shuffled[place]) * _STRIDE


class RecordedDevice:
    """A device that answers as the recorded one did: same addresses, and out of memory at a capacity or on cue.

    `taken` are the recorded (malloc, kind, address, size) of segments and pages; a request that the history does not
    know gets an invented address, so that a model that is wrong goes on being wrong.
    """

    def __init__(self, taken: Sequence[tuple[int, int, int, int]], capacity: int | None = None,
                 refuses: frozenset[int] = frozenset(), total_bytes: int | None = None) -> None:  # fmt: skip
        self.total_bytes = total_bytes
        self._segments = {n: (address, size) for n, kind, address, size in taken if kind == SEGMENT_ALLOC}
        self._pages: dict[int, int] = {}
        for n, kind, address, _ in taken:
            if kind == SEGMENT_MAP:
                self._pages.setdefault(n, address)
        self._capacity = _FIRST if capacity is None else capacity
        self._refuses = set(refuses)
        self._invented = InventedDevice()

    def allocate(self, size: int, allocator: Allocator) -> int | None:
        """The recorded address; None where the capacity is spent or the history says the device refused."""
        if self._refused(size, allocator):
            return None
        address, recorded = self._segments.get(allocator.num_mallocs, (0, 0))
        return address if recorded == size else _FIRST + (self._invented.allocate(size, allocator) or 0)

    def reserve(self, home: FreeList, allocator: Allocator) -> tuple[int, int]:
        """A range that begins at the recorded address of its first pages."""
        address = self._pages.get(allocator.num_mallocs)
        if address is None:
            address = _FIRST + self._invented.reserve(home, allocator)[0]
        return address, MAX_RANGE_BYTES // home.page * home.page

    def map(self, address: int, size: int, allocator: Allocator) -> bool:
        """False where the capacity is spent or the history says the device refused."""
        return not self._refused(size, allocator)

    def _refused(self, size: int, allocator: Allocator) -> bool:
        if allocator.num_mallocs in self._refuses:
            self._refuses.discard(allocator.num_mallocs)
            return True
        return allocator.reserved + size > self._capacity
