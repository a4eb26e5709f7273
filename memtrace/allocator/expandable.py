"""Expandable segments: one virtual range for each pool and stream, backed page by page.

Source: `ExpandableSegment`, `find_expandable_block`, `try_allocate_expandable_block`, `map_block` and
`unmap_block` in `c10/cuda/CUDACachingAllocator.cpp`, torch 2.1 to 2.13.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, Final

from memtrace.allocator.blocks import Block, FreeList, absorb_after, absorb_before
from memtrace.format.schema import EVENT_KINDS

if TYPE_CHECKING:
    from memtrace.allocator.model import Allocator

SEGMENT_MAP: Final = EVENT_KINDS.index("segment_map")
SEGMENT_UNMAP: Final = EVENT_KINDS.index("segment_unmap")


def grow(allocator: Allocator, home: FreeList, size: int) -> Block | None:
    """A free block of at least `size` bytes, taken out of its list, made by mapping pages; None: out of
    memory."""
    block = _find(allocator, home, size)
    if not block.mapped and not _map(allocator, block, min(block.size, size)):
        return None
    while block.size < size:
        behind = block.next
        if behind is None or behind.mapped:
            return None  # more than the whole range is long, so more than the device has
        if not _map(allocator, behind, min(size - block.size, behind.size)):
            return None
        block = behind  # mapping it has merged `block` into it
    home.remove(block)
    return block


def unmap(allocator: Allocator, block: Block) -> None:
    """Give back the pages that a free block covers whole; what sticks out on either side stays free."""
    assert block.base is not None
    home, page = block.home, block.home.page
    start = block.base + -(-(block.address - block.base) // page) * page
    end = block.base + (block.address + block.size - block.base) // page * page
    if start >= end:
        return
    home.remove(block)
    if start > block.address:
        home.insert(_link(block.prev, Block(block.address, start - block.address, home, block.base, block.rank), block))
    if block.address + block.size > end:
        rest = Block(end, block.address + block.size - end, home, block.base, block.rank)
        home.insert(_link(block, rest, block.next))
    block.address, block.size, block.mapped = start, end - start, False
    _merge_unmapped(block)
    allocator.reserved -= end - start
    allocator.log.append((allocator.num_mallocs, SEGMENT_UNMAP, start, end - start))
    if block.prev is not None or block.next is not None:  # else the whole range is empty and given up
        insort(home.unmapped, (block.address, block))
    else:
        allocator.num_segments -= 1


def add_unmapped(before: Block | None, block: Block, after: Block | None) -> None:
    """Put an unmapped stretch between two neighbours."""
    block.mapped = False
    _link(before, block, after)
    insort(block.home.unmapped, (block.address, block))


def _find(allocator: Allocator, home: FreeList, size: int) -> Block:
    """The first stretch, free or unmapped, from which `size` bytes can be made; a new range where there is
    none."""
    for _, unmapped in home.unmapped:
        before = unmapped.prev
        first = before if before is not None and not before.live else unmapped
        room, block = 0, first
        while room < size:
            room += block.size
            if block.next is None or block.next.live:
                break
            block = block.next
        if room >= size:
            return first
    address, length = allocator.device.reserve(home, allocator)
    fresh = Block(address, length, home, address, allocator.next_rank())
    add_unmapped(None, fresh, None)
    allocator.num_segments += 1
    return fresh


def _map(allocator: Allocator, block: Block, size: int) -> bool:
    home, page = block.home, block.home.page
    size = -(-size // page) * page
    if not allocator.device.map(block.address, size, allocator):
        return False
    del home.unmapped[bisect_left(home.unmapped, (block.address,))]
    block.mapped = True
    address = block.address
    if size < block.size:
        rest = Block(address + size, block.size - size, home, block.base, block.rank)
        add_unmapped(block, rest, block.next)
        block.size = size
    for neighbour, absorb in ((block.prev, absorb_before), (block.next, absorb_after)):
        if neighbour is not None and not neighbour.live and neighbour.mapped:
            home.remove(neighbour)
            absorb(block, neighbour)
    home.insert(block)
    allocator.reserved += size
    allocator.num_device_allocs += 1
    allocator.log.append((allocator.num_mallocs, SEGMENT_MAP, address, size))
    return True


def _merge_unmapped(block: Block) -> None:
    unmapped = block.home.unmapped
    for neighbour, absorb in ((block.prev, absorb_before), (block.next, absorb_after)):
        if neighbour is not None and not neighbour.mapped:
            del unmapped[bisect_left(unmapped, (neighbour.address,))]
            absorb(block, neighbour)


def _link(before: Block | None, block: Block, after: Block | None) -> Block:
    block.prev, block.next = before, after
    if before is not None:
        before.next = block
    if after is not None:
        after.prev = block
    return block
