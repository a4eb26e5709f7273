"""Blocks and the free lists of the caching allocator.

Source: `Block`, `BlockPool`, the block comparators and `get_free_block` in `c10/cuda/CUDACachingAllocator.cpp`, torch
2.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from memtrace.allocator.rules import NO_LIMIT, Rules, block_size_limit, page_size, split_rule
from memtrace.allocator.settings import AllocatorSettings


class Block:
    """A contiguous part of a segment: live (in use or waiting for a stream), free, or not mapped."""

    __slots__ = (
        "address",
        "age_key",
        "free_list",
        "freed_at_lookup",
        "live",
        "mapped",
        "next",
        "prev",
        "range_start",
        "requested",
        "size",
    )

    def __init__(
        self, address: int, size: int, free_list: FreeList, range_start: int | None = None, age_key: int = 0
    ) -> None:
        self.address = address
        self.size = size
        self.requested = 0
        self.free_list = free_list
        self.range_start = range_start  # start of the expandable segment; None: an ordinary segment
        self.age_key = age_key  # added to the address to order blocks of equal size (`Rules.tie_break`)
        self.live = False
        self.mapped = True
        self.prev: Block | None = None
        self.next: Block | None = None
        self.freed_at_lookup = 0  # `Pool.num_lookups` when the block became free

    def __lt__(self, other: Block) -> bool:
        """Compare as equal: only a contradictory history puts two free blocks at one address."""
        return False

    def part(self, address: int, size: int) -> Block:
        """Return a new block of the same segment."""
        return Block(address, size, self.free_list, self.range_start, self.age_key)


class Pool:
    """The small or the large blocks of one memory pool; `private` is 0 for the default pool."""

    __slots__ = ("lists", "num_lookups", "private", "small")

    def __init__(self, small: bool, private: int) -> None:
        self.small = small
        self.private = private
        self.num_lookups = 0  # counted only while garbage collection is on
        self.lists: dict[int, FreeList] = {}

    def sorted_lists(self) -> list[FreeList]:
        """Return the free lists by stream handle, the order in which the allocator visits them."""
        return [self.lists[stream] for stream in sorted(self.lists)]


class FreeList:
    """The free blocks of one pool and stream by size and address, and its unmapped blocks by address."""

    __slots__ = (
        "address_sign",
        "entries",
        "max_rounding",
        "max_split",
        "page",
        "pool",
        "split_rule",
        "stream",
        "unmapped",
        "uses_expandable",
    )

    def __init__(self, pool: Pool, stream: int, settings: AllocatorSettings, rules: Rules) -> None:
        self.pool = pool
        self.stream = stream
        self.entries: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []
        self.address_sign = -1 if rules.tie_break == "highest_address" else 1
        self.uses_expandable = settings.expandable_segments
        self.page = page_size(pool.small, large_segment_bytes=settings.large_segment_bytes, rules=rules)
        self.max_split = NO_LIMIT if settings.max_split_bytes is None else settings.max_split_bytes
        self.max_rounding = settings.effective_max_rounding_bytes
        self.split_rule = split_rule(
            pool.small,
            expandable_segments=settings.expandable_segments,
            max_split_bytes=self.max_split,
            rules=rules,
        )

    def insert(self, block: Block) -> None:
        """Add a free block (`BlockPool::insert_into_blocks`)."""
        block.freed_at_lookup = self.pool.num_lookups
        insort(self.entries, (block.size, self.address_sign * (block.address + block.age_key), block))

    def remove(self, block: Block) -> None:
        """Remove a free block."""
        i = bisect_left(self.entries, (block.size, self.address_sign * (block.address + block.age_key)))
        while self.entries[i][2] is not block:
            i += 1
        del self.entries[i]

    def take(self, size: int) -> Block | None:
        """Remove and return the free block for a rounded request; None where no block serves it (`get_free_block`)."""
        entries = self.entries
        i = bisect_left(entries, (size,))
        if i == len(entries):
            return None
        block = entries[i][2]
        if block.range_start is not None:
            i = self._skip_expandable(i)
            if i == len(entries):
                return None
            block = entries[i][2]
        if block.size >= block_size_limit(size, self.max_split, self.max_rounding):
            return None
        del entries[i]
        return block

    def _skip_expandable(self, i: int) -> int:
        """Return the entry to use instead of the expandable block at entry `i`.

        A block at the end of its mapped range counts with the unmapped memory behind it. Where the setting is off,
        blocks of expandable segments are skipped.
        """
        entries = self.entries
        if not self.uses_expandable:
            while i < len(entries) and entries[i][2].range_start is not None:
                i += 1
            return i
        while i + 1 < len(entries) and entries[i][2].range_start is not None:
            if _expandable_size(entries[i + 1][2]) >= _expandable_size(entries[i][2]):
                break
            i += 1
        return i


def _expandable_size(block: Block) -> int:
    after = block.next
    return block.size + (after.size if after is not None and not after.mapped else 0)


class FirstFitList(FreeList):
    """A free list that serves requests first-fit by address, unlike PyTorch: shows in tests that best fit matters."""

    __slots__ = ()

    def take(self, size: int) -> Block | None:
        """Remove and return the block at the lowest address among those that are large enough."""
        candidates = [entry[2] for entry in self.entries if entry[0] >= size]
        if not candidates:
            return None
        block = min(candidates, key=lambda candidate: candidate.address)
        self.remove(block)
        return block


def split_block(block: Block, size: int) -> Block:
    """Split the first `size` bytes off a block and return them; the rest becomes free (`alloc_found_block`)."""
    front = block.part(block.address, size)
    before = block.prev
    front.prev = before
    if before is not None:
        before.next = front
    front.next = block
    block.prev = front
    block.address += size
    block.size -= size
    block.free_list.insert(block)
    return front


def merge_before(block: Block, before: Block) -> None:
    """Merge the neighbour in front of `block` into it (`try_merge_blocks`)."""
    block.address = before.address
    block.size += before.size
    block.prev = before.prev
    if before.prev is not None:
        before.prev.next = block


def merge_after(block: Block, after: Block) -> None:
    """Merge the neighbour behind `block` into it (`try_merge_blocks`)."""
    block.size += after.size
    block.next = after.next
    if after.next is not None:
        after.next.prev = block


def link_block(before: Block | None, block: Block, after: Block | None) -> Block:
    """Link a block between two neighbours and return it."""
    block.prev, block.next = before, after
    if before is not None:
        before.next = block
    if after is not None:
        after.prev = block
    return block
