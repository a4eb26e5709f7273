"""Devices for the model: one that answers from a history, and invented ones for what-ifs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from memtrace.allocator.layout import range_bytes

if TYPE_CHECKING:
    from memtrace.allocator.blocks import FreeList
    from memtrace.allocator.model import Allocator

Order = Literal["ascending", "descending", "random"]
ORDERS: Final[tuple[Order, ...]] = ("ascending", "descending", "random")

_STRIDE: Final = 1 << 40  # between invented addresses: more than any segment is long
_SHUFFLED: Final = 1 << 14  # so many segments are shuffled together
INVENTED_FROM: Final = 1 << 62
"""A replay's invented addresses lie where no recorded one can."""


class Taken(NamedTuple):
    """Memory the recorded device gave: a segment, or pages of an expandable one. Bytes."""

    request: int
    """The request it was for, counted from 1."""
    mapped: bool
    address: int
    size: int
    stream: int
    pool: int


class InventedDevice:
    """A device of a given size whose new segments get ascending, descending or shuffled addresses."""

    def __init__(self, capacity: int | None = None, order: Order = "ascending", total: int | None = None) -> None:
        self.total_bytes = capacity if total is None else total
        self._order = order
        self._shuffled = random.Random(0).sample(range(_SHUFFLED), _SHUFFLED) if order == "random" else []
        self._count = 0
        self._limit = INVENTED_FROM if capacity is None else capacity

    def allocate(self, size: int, allocator: Allocator) -> int | None:
        """Address of a new segment; None where the capacity is spent."""
        return self._next() if allocator.reserved + size <= self._limit else None

    def reserve(self, home: FreeList, allocator: Allocator) -> tuple[int, int]:
        """A virtual range of 9/8 of the device, in whole pages."""
        return self._next(), range_bytes(self.total_bytes, home.page)

    def map(self, address: int, size: int, allocator: Allocator) -> bool:
        """Whether the capacity holds these pages too."""
        return allocator.reserved + size <= self._limit

    def _next(self) -> int:
        self._count += 1
        if self._order == "ascending":
            return self._count * _STRIDE
        if self._order == "descending":
            return INVENTED_FROM - self._count * _STRIDE
        turn, place = divmod(self._count, _SHUFFLED)
        return (1 + turn * _SHUFFLED + self._shuffled[place]) * _STRIDE


class RecordedDevice:
    """A device that answers as the recorded one did: same addresses, and out of memory at a capacity or on
    cue.

    A request that the history does not know gets an invented address, so that a model that is wrong goes on
    being so.
    """

    def __init__(
        self,
        taken: Sequence[Taken],
        capacity: int | None = None,
        refuses: frozenset[int] = frozenset(),
        total_bytes: int | None = None,
    ) -> None:
        self.total_bytes = total_bytes
        self._segments = {one.request: one for one in taken if not one.mapped}
        self._pages = [one for one in taken if one.mapped]
        self._capacity = INVENTED_FROM if capacity is None else capacity
        self._refuses = set(refuses)
        self._ranges: set[int] = set()
        self._invented = InventedDevice(total=total_bytes)

    def allocate(self, size: int, allocator: Allocator) -> int | None:
        """The recorded address; None where the capacity is spent or the history says the device refused."""
        if self._refused(size, allocator):
            return None
        recorded = self._segments.get(allocator.num_mallocs)
        if recorded is not None and recorded.size == size:
            return recorded.address
        return INVENTED_FROM + (self._invented.allocate(size, allocator) or 0)

    def reserve(self, home: FreeList, allocator: Allocator) -> tuple[int, int]:
        """A range that begins where the next recorded pages of this stream and pool were mapped."""
        address, length = self._invented.reserve(home, allocator)
        self._ranges |= {block.base for _, block in home.unmapped if block.base is not None}
        for one in self._pages:
            fits = one.size == home.page if home.pool.small else one.size % home.page == 0
            same = one.stream == home.stream and one.pool == home.pool.private
            known = any(base <= one.address < base + length for base in self._ranges)
            if one.request >= allocator.num_mallocs and same and fits and not known:
                address = one.address
                break
        else:
            address += INVENTED_FROM
        self._ranges.add(address)
        return address, length

    def map(self, address: int, size: int, allocator: Allocator) -> bool:
        """False where the capacity is spent or the history says the device refused."""
        return not self._refused(size, allocator)

    def _refused(self, size: int, allocator: Allocator) -> bool:
        if allocator.num_mallocs in self._refuses:
            self._refuses.discard(allocator.num_mallocs)
            return True
        return allocator.reserved + size > self._capacity
