"""Blocks, the free lists they wait in, and the device they come from.

Source: `Block`, `BlockPool`, the block comparators and `get_free_block` in
`c10/cuda/CUDACachingAllocator.cpp`, torch 2.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Final, Protocol

from memtrace.allocator.rules import Rules
from memtrace.allocator.settings import Settings

if TYPE_CHECKING:
    from memtrace.allocator.model import Allocator

NO_LIMIT: Final = 1 << 62


class Device(Protocol):
    """Where memory comes from: the driver as the allocator sees it. Bytes throughout."""

    total_bytes: int | None
    """Memory of the device, for memory fractions; None: unknown."""

    def allocate(self, size: int, allocator: Allocator) -> int | None:
        """Address of a new segment; None: out of memory."""

    def reserve(self, home: FreeList, allocator: Allocator) -> tuple[int, int]:
        """Address and length of a new virtual range for an expandable segment; takes no memory."""

    def map(self, address: int, size: int, allocator: Allocator) -> bool:
        """Back a stretch of a virtual range with memory; False: out of memory."""


class Block:
    """A stretch of a segment: live (in use or waiting for a stream), free, or an unmapped stretch of a
    virtual range."""

    __slots__ = (
        "address",
        "base",
        "home",
        "live",
        "mapped",
        "next",
        "prev",
        "rank",
        "requested",
        "since",
        "size",
    )

    def __init__(self, address: int, size: int, home: FreeList, base: int | None = None, rank: int = 0) -> None:
        self.address = address
        self.size = size
        self.requested = 0
        self.home = home
        self.base = base  # start of its virtual range, which pages are counted from; None: an ordinary segment
        self.rank = rank  # added to the address where blocks of one size are ordered (`Rules.tie`)
        self.live = False
        self.mapped = True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.since = 0  # lookups of its pool when it became free

    def __lt__(self, other: Block) -> bool:
        """Blocks at one place cannot be: only a history that contradicts itself asks for their order."""
        return False


class Pool:
    """Small or large blocks of the default pool (`private` 0) or of a private one."""

    __slots__ = ("lists", "lookups", "private", "small")

    def __init__(self, small: bool, private: int) -> None:
        self.small = small
        self.private = private
        self.lookups = 0  # counted only while garbage is collected
        self.lists: dict[int, FreeList] = {}

    def in_order(self) -> list[FreeList]:
        """Its lists by stream handle, as the allocator walks them."""
        return [self.lists[stream] for stream in sorted(self.lists)]


class FreeList:
    """The free blocks of one pool and stream, by size then address, and its unmapped stretches by address."""

    __slots__ = (
        "entries",
        "max_rounding",
        "max_split",
        "min_remainder",
        "page",
        "pool",
        "sign",
        "split_below",
        "stream",
        "unmapped",
        "use_expandable",
    )

    def __init__(self, pool: Pool, stream: int, settings: Settings, rules: Rules) -> None:
        self.pool = pool
        self.stream = stream
        self.entries: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []
        self.sign = -1 if rules.tie == "highest" else 1
        self.use_expandable = settings.expandable_segments
        self.page = rules.small_segment_bytes if pool.small else settings.large_segment_bytes
        self.max_split = NO_LIMIT if settings.max_split_bytes is None else settings.max_split_bytes
        rounding = settings.max_non_split_rounding_bytes
        self.max_rounding = settings.large_segment_bytes if rounding is None else rounding
        if pool.small or (settings.expandable_segments and rules.expandable_splits_as_small):
            self.min_remainder, self.split_below = rules.min_small_remainder_bytes, NO_LIMIT
        elif rules.split_large:
            self.min_remainder, self.split_below = rules.min_large_remainder_bytes, self.max_split
        else:
            self.min_remainder, self.split_below = NO_LIMIT, 0

    def insert(self, block: Block) -> None:
        """Add a free block (`BlockPool::insert_into_blocks`)."""
        block.since = self.pool.lookups
        insort(self.entries, (block.size, self.sign * (block.address + block.rank), block))

    def remove(self, block: Block) -> None:
        """Take out a block that is free."""
        i = bisect_left(self.entries, (block.size, self.sign * (block.address + block.rank)))
        while self.entries[i][2] is not block:
            i += 1
        del self.entries[i]

    def take(self, size: int) -> Block | None:
        """The free block a request of this rounded size gets, taken out; None: there is none
        (`get_free_block`)."""
        entries = self.entries
        i = bisect_left(entries, (size,))
        if i == len(entries):
            return None
        block = entries[i][2]
        if block.base is not None:
            i = self._past_expandable(i)
            if i == len(entries):
                return None
            block = entries[i][2]
        if size < self.max_split <= block.size:
            return None
        if size >= self.max_split and block.size >= size + self.max_rounding:
            return None
        del entries[i]
        return block

    def _past_expandable(self, i: int) -> int:
        """A block at the end of its mapped range counts as long as it could grow; without the setting it is
        passed."""
        entries = self.entries
        if not self.use_expandable:
            while i < len(entries) and entries[i][2].base is not None:
                i += 1
            return i
        while i + 1 < len(entries) and entries[i][2].base is not None:
            if _reach(entries[i + 1][2]) >= _reach(entries[i][2]):
                break
            i += 1
        return i


def _reach(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


class FirstFitList(FreeList):
    """A list that takes the first block by address: not what torch does, kept to show that it matters."""

    __slots__ = ()

    def take(self, size: int) -> Block | None:
        """The block at the lowest address among those large enough."""
        fitting = [entry[2] for entry in self.entries if entry[0] >= size]
        if not fitting:
            return None
        block = min(fitting, key=lambda fit: fit.address)
        self.remove(block)
        return block


def split(block: Block, size: int) -> Block:
    """Cut the first `size` bytes off a free block; the rest goes back to its list (`alloc_found_block`)."""
    front = Block(block.address, size, block.home, block.base, block.rank)
    before = block.prev
    front.prev = before
    if before is not None:
        before.next = front
    front.next = block
    block.prev = front
    block.address += size
    block.size -= size
    block.home.insert(block)
    return front


def absorb_before(block: Block, before: Block) -> None:
    """`block` takes over the stretch in front of it (`try_merge_blocks`)."""
    block.address = before.address
    block.size += before.size
    block.prev = before.prev
    if before.prev is not None:
        before.prev.next = block


def absorb_after(block: Block, after: Block) -> None:
    """`block` takes over the stretch behind it (`try_merge_blocks`)."""
    block.size += after.size
    block.next = after.next
    if after.next is not None:
        after.next.prev = block
