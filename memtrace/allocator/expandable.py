"""Expandable segments: one virtual range for each pool and stream, into which pages are mapped.

Source: `ExpandableSegment`, `find_expandable_block`, `try_allocate_expandable_block`, `map_block` and `unmap_block` in
`c10/cuda/CUDACachingAllocator.cpp`, torch 2.1 to 2.13.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from memtrace.allocator.blocks import Block, FreeList, link_block, merge_after, merge_before
from memtrace.allocator.device_memory import DeviceMemory
from memtrace.allocator.rules import round_up


def grow_segment(memory: DeviceMemory, free_list: FreeList, size: int) -> Block | None:
    """Map pages and return a free block of at least `size` bytes, removed from its list; None: out of memory."""
    block = _find_room(memory, free_list, size)
    if not block.mapped and not _map_block(memory, block, min(block.size, size)):
        return None
    while block.size < size:
        behind = block.next
        if behind is None or behind.mapped:
            return None  # larger than the whole virtual range, so larger than the device
        if not _map_block(memory, behind, min(size - block.size, behind.size)):
            return None
        block = behind  # mapping it has merged `block` into it
    free_list.remove(block)
    return block


def unmap_whole_pages(memory: DeviceMemory, block: Block) -> None:
    """Unmap the pages that lie wholly inside a free block; the parts on either side of them stay free."""
    assert block.range_start is not None
    free_list, page = block.free_list, block.free_list.page
    start = block.range_start + round_up(block.address - block.range_start, page)
    end = block.range_start + (block.address + block.size - block.range_start) // page * page
    if start >= end:
        return
    free_list.remove(block)
    if start > block.address:
        free_list.insert(link_block(block.prev, block.part(block.address, start - block.address), block))
    if block.address + block.size > end:
        free_list.insert(link_block(block, block.part(end, block.address + block.size - end), block.next))
    block.address, block.size, block.mapped = start, end - start, False
    _merge_unmapped(block)
    memory.unmap_pages(start, end - start)
    if block.prev is not None or block.next is not None:
        insort(free_list.unmapped, (block.address, block))
    else:
        memory.release_range(block.range_start)


def insert_unmapped(before: Block | None, block: Block, after: Block | None) -> None:
    """Insert an unmapped block between two neighbours."""
    block.mapped = False
    link_block(before, block, after)
    insort(block.free_list.unmapped, (block.address, block))


def _find_room(memory: DeviceMemory, free_list: FreeList, size: int) -> Block:
    """Return the first block, free or unmapped, that can grow to `size` bytes, if need be in a new virtual range."""
    for _, unmapped in free_list.unmapped:
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
    address, length = memory.reserve_range(free_list)
    block = Block(address, length, free_list, address, memory.next_age_key())
    insert_unmapped(None, block, None)
    return block


def _map_block(memory: DeviceMemory, block: Block, size: int) -> bool:
    free_list = block.free_list
    size = round_up(size, free_list.page)
    if not memory.map_pages(block.address, size):
        return False
    del free_list.unmapped[bisect_left(free_list.unmapped, (block.address,))]
    block.mapped = True
    if size < block.size:
        insert_unmapped(block, block.part(block.address + size, block.size - size), block.next)
        block.size = size
    for neighbour, merge in ((block.prev, merge_before), (block.next, merge_after)):
        if neighbour is not None and not neighbour.live and neighbour.mapped:
            free_list.remove(neighbour)
            merge(block, neighbour)
    free_list.insert(block)
    return True


def _merge_unmapped(block: Block) -> None:
    unmapped = block.free_list.unmapped
    for neighbour, merge in ((block.prev, merge_before), (block.next, merge_after)):
        if neighbour is not None and not neighbour.mapped:
            del unmapped[bisect_left(unmapped, (neighbour.address,))]
            merge(block, neighbour)
