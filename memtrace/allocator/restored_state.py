"""Restores a known state of the caching allocator in an empty model."""

from __future__ import annotations

from dataclasses import dataclass

from memtrace.allocator.blocks import Block, FreeList
from memtrace.allocator.expandable import insert_unmapped
from memtrace.allocator.model import CachingAllocator
from memtrace.allocator.start_state import StartState

_LiveBlock = tuple[int, int, int]  # address, size, requested


@dataclass(slots=True)
class _RestoredRange:
    """A virtual range while its mapped parts are restored, by address."""

    start: int
    age_key: int
    last: Block | None = None
    """The last block so far."""

    def append(self, first: Block, last: Block) -> None:
        """Link a mapped part to the one before it, or to the unmapped beginning of the range."""
        end = self.start if self.last is None else self.last.address + self.last.size
        if first.address > end:
            insert_unmapped(self.last, first.part(end, first.address - end), first)
        self.last = last

    def close(self, length: int) -> None:
        """Append the unmapped rest of the range."""
        assert self.last is not None
        end = self.last.address + self.last.size
        if end < self.start + length:
            insert_unmapped(self.last, self.last.part(end, self.start + length - end), None)


def restore_state(allocator: CachingAllocator, state: StartState) -> list[Block]:
    """Create the segments and blocks of a state and return its live blocks in the order of the state.

    Args:
        allocator: an allocator that has not served a request yet.
        state: the state to restore; `num_misplaced` must be 0.
    """
    segments = state.segments
    inside: dict[int, list[_LiveBlock]] = {}
    rows = segments.containing(state.address).tolist()
    for row, *live in zip(rows, state.address.tolist(), state.size.tolist(), state.requested.tolist(), strict=True):
        inside.setdefault(row, []).append((live[0], live[1], live[2]))
    blocks: dict[int, Block] = {}
    ranges: dict[tuple[FreeList, int], _RestoredRange] = {}
    columns = (segments.address, segments.size, segments.stream, segments.pool, segments.small, segments.expandable)
    table = list(zip(*(column.tolist() for column in columns), strict=True))
    age_keys = {row: allocator.memory.next_age_key() for row in state.segment_order.tolist()}
    for row in sorted(range(len(table)), key=lambda row: int(table[row][0])):
        address, size, stream, pool, small, expandable = table[row]
        free_list, owner = allocator.free_list(small, stream, pool), None
        if expandable:
            start = max(low for low in state.range_starts[stream, pool, small] if low <= address)
            owner = ranges.setdefault((free_list, start), _RestoredRange(start, age_keys[row]))
        age_key, range_start = (age_keys[row], None) if owner is None else (owner.age_key, owner.start)
        first, last = _create_blocks(free_list, address, size, inside.get(row, []), range_start, age_key)
        if owner is not None:
            owner.append(first, last)
        _add_to_allocator(allocator, first, blocks)
    _close_ranges(allocator, ranges)
    allocator.memory.num_segments = len(ranges) + int((~segments.expandable).sum())
    allocator.record_peak()
    return [blocks[address] for address in state.address.tolist()]


def _close_ranges(allocator: CachingAllocator, ranges: dict[tuple[FreeList, int], _RestoredRange]) -> None:
    device = allocator.memory.device
    for (free_list, start), owner in ranges.items():
        length = device.range_size(free_list.page)
        device.restore_range(start, length)
        owner.close(length)


def _create_blocks(
    free_list: FreeList, address: int, size: int, live: list[_LiveBlock], range_start: int | None, age_key: int
) -> tuple[Block, Block]:
    """Create the linked blocks of one segment and return the first and the last; the rest of it is free."""
    parts = []
    position = address
    for start, length, requested in live:
        if start > position:
            parts.append((position, start - position, -1))
        parts.append((start, length, requested))
        position = start + length
    if position < address + size:
        parts.append((position, address + size - position, -1))
    blocks: list[Block] = []
    for start, length, requested in parts:
        block = Block(start, length, free_list, range_start, age_key)
        if requested >= 0:
            block.live, block.requested = True, requested
        if blocks:
            blocks[-1].next, block.prev = block, blocks[-1]
        blocks.append(block)
    return blocks[0], blocks[-1]


def _add_to_allocator(allocator: CachingAllocator, first: Block, blocks: dict[int, Block]) -> None:
    block: Block | None = first
    while block is not None:
        allocator.memory.reserved += block.size
        if block.live:
            allocator.live.add(block)
            allocator.allocated += block.size
            allocator.requested += block.requested
            blocks[block.address] = block
        else:
            block.free_list.insert(block)
        block = block.next
    allocator.peak_allocated = allocator.allocated
