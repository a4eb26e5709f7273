"""Restores a known state of the caching allocator in an empty model."""

from __future__ import annotations

from memtrace.allocator.blocks import Block, FreeList
from memtrace.allocator.expandable import insert_unmapped
from memtrace.allocator.model import CachingAllocator
from memtrace.allocator.rules import virtual_range_size
from memtrace.allocator.start_state import StartState

_LiveBlock = tuple[int, int, int]  # address, size, requested


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
    last_in_range: dict[FreeList, Block] = {}
    columns = (segments.address, segments.size, segments.stream, segments.pool, segments.small, segments.expandable)
    table = list(zip(*(column.tolist() for column in columns), strict=True))
    age_keys = {row: allocator.memory.next_age_key() for row in state.segment_order.tolist()}
    device_bytes = allocator.memory.device.total_bytes
    for row in sorted(range(len(table)), key=lambda row: int(table[row][0])):
        address, size, stream, pool, small, expandable = table[row]
        free_list = allocator.free_list(small, stream, pool)
        age_key, range_start = age_keys[row], None
        if expandable:
            length = virtual_range_size(device_bytes, free_list.page)
            lowest = state.range_starts.get((stream, pool, small))
            age_key, range_start = _find_range(free_list, address, age_key, last_in_range, lowest, length)
        first, last = _create_blocks(free_list, address, size, inside.get(row, []), range_start, age_key)
        if range_start is not None:
            _append_to_range(last_in_range, free_list, range_start, first, last)
        _add_to_allocator(allocator, first, blocks)
    for free_list, last in last_in_range.items():
        _close_range(last, virtual_range_size(device_bytes, free_list.page))
    allocator.memory.num_segments = len(table)
    allocator.record_peak()
    return [blocks[address] for address in state.address.tolist()]


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


def _find_range(
    free_list: FreeList,
    address: int,
    age_key: int,
    last_in_range: dict[FreeList, Block],
    lowest: int | None,
    length: int,
) -> tuple[int, int]:
    """Return age key and start of the virtual range of a mapped part: the range of the part before it, or a new one."""
    last = last_in_range.get(free_list)
    if last is not None and last.range_start is not None and address - last.range_start < length:
        return last.age_key, last.range_start
    if last is not None:
        _close_range(last_in_range.pop(free_list), length)
    if lowest is not None and 0 <= address - lowest < length:
        return age_key, lowest
    return age_key, address


def _append_to_range(
    last_in_range: dict[FreeList, Block], free_list: FreeList, range_start: int, first: Block, last: Block
) -> None:
    """Link a mapped part to the one before it in its range, or to the unmapped beginning of the range."""
    before = last_in_range.get(free_list)
    end = range_start if before is None else before.address + before.size
    if first.address > end:
        insert_unmapped(before, first.part(end, first.address - end), first)
    last_in_range[free_list] = last


def _close_range(last: Block, length: int) -> None:
    assert last.range_start is not None
    end = last.address + last.size
    insert_unmapped(last, last.part(end, last.range_start + length - end), None)
