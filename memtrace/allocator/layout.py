"""Putting a known state into a fresh allocator."""

from __future__ import annotations

from typing import Final

from memtrace.allocator import expandable
from memtrace.allocator.blocks import Block, FreeList
from memtrace.allocator.model import Allocator
from memtrace.allocator.start_state import StartState

LARGEST_DEVICE_BYTES: Final = 512 << 30  # more than any has; only tells one virtual range from the next
Live = tuple[int, int, int]  # address, size, requested


def range_bytes(total: int | None, page: int) -> int:
    """Length of a virtual range: 9/8 of the device's memory, in whole pages (`ExpandableSegment`)."""
    length = (LARGEST_DEVICE_BYTES if total is None else total) * 9 // 8
    return -(-length // page) * page


def lay_out(allocator: Allocator, state: StartState) -> list[Block]:
    """Build the segments and blocks of `state`, which must misplace none; its live blocks in the state's
    order."""
    segments = state.segments
    inside: dict[int, list[Live]] = {}
    rows = segments.containing(state.address).tolist()
    for row, *live in zip(rows, state.address.tolist(), state.size.tolist(), state.requested.tolist(), strict=True):
        inside.setdefault(row, []).append((live[0], live[1], live[2]))
    blocks: dict[int, Block] = {}
    ends: dict[FreeList, Block] = {}
    columns = (
        segments.address,
        segments.size,
        segments.stream,
        segments.pool,
        segments.small,
        segments.expandable,
    )
    table = list(zip(*(column.tolist() for column in columns), strict=True))
    ranks = {row: allocator.next_rank() for row in state.created.tolist()}
    for row in sorted(range(len(table)), key=lambda row: int(table[row][0])):
        address, size, stream, pool, small, grows = table[row]
        home = allocator.free_list(small, stream, pool)
        rank, base = ranks[row], None
        if grows:
            length = range_bytes(allocator.device.total_bytes, home.page)
            rank, base = _open_range(home, address, rank, ends, state.bases.get((stream, pool, small)), length)
        head, tail = _chain(home, address, size, inside.get(row, []), base, rank)
        if base is not None:
            _append(ends, home, base, head, tail)
        _adopt(allocator, head, blocks)
    for home, last in ends.items():
        _close_range(home, last, range_bytes(allocator.device.total_bytes, home.page))
    allocator.num_segments = len(table)
    allocator.note_peak()
    return [blocks[address] for address in state.address.tolist()]


def _chain(
    home: FreeList, address: int, size: int, live: list[Live], base: int | None, rank: int
) -> tuple[Block, Block]:
    """The linked blocks of one segment; what no live block covers is free."""
    stretches = []
    at = address
    for start, length, requested in live:
        if start > at:
            stretches.append((at, start - at, -1))
        stretches.append((start, length, requested))
        at = start + length
    if at < address + size:
        stretches.append((at, address + size - at, -1))
    chain: list[Block] = []
    for start, length, requested in stretches:
        block = Block(start, length, home, base, rank)
        if requested >= 0:
            block.live, block.requested = True, requested
        if chain:
            chain[-1].next, block.prev = block, chain[-1]
        chain.append(block)
    return chain[0], chain[-1]


def _adopt(allocator: Allocator, head: Block, blocks: dict[int, Block]) -> None:
    block: Block | None = head
    while block is not None:
        allocator.reserved += block.size
        if block.live:
            allocator.live.add(block)
            allocator.allocated += block.size
            allocator.requested += block.requested
            blocks[block.address] = block
        else:
            block.home.insert(block)
        block = block.next
    allocator.peak_allocated = allocator.allocated


def _open_range(
    home: FreeList, address: int, rank: int, ends: dict[FreeList, Block], lowest: int | None, length: int
) -> tuple[int, int]:
    """Rank and base of the virtual range a stretch belongs to: that of the stretch before, or a new one."""
    last = ends.get(home)
    if last is not None and last.base is not None and address - last.base < length:
        return last.rank, last.base
    if last is not None:
        _close_range(home, ends.pop(home), length)
    if lowest is not None and 0 <= address - lowest < length:
        return rank, lowest
    return rank, address


def _append(ends: dict[FreeList, Block], home: FreeList, base: int, head: Block, tail: Block) -> None:
    """Join a stretch to the one before it in its range, or to the unmapped front of the range."""
    last = ends.get(home)
    end = base if last is None else last.address + last.size
    if head.address > end:
        expandable.add_unmapped(last, Block(end, head.address - end, home, base, head.rank), head)
    ends[home] = tail


def _close_range(home: FreeList, last: Block, length: int) -> None:
    assert last.base is not None
    end = last.address + last.size
    rest = Block(end, last.base + length - end, home, last.base, last.rank)
    expandable.add_unmapped(last, rest, None)
