"""A model of CUDA's caching allocator (the native backend), block for block.

Source: `DeviceCachingAllocator` in `c10/cuda/CUDACachingAllocator.cpp`, torch 2.0 to 2.13; each method names
the function it follows. The model is told requests and frees; where a segment lies is asked of a `Device`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final

from memtrace.allocator import expandable
from memtrace.allocator.blocks import (
    NO_LIMIT,
    Block,
    Device,
    FirstFitList,
    FreeList,
    Pool,
    absorb_after,
    absorb_before,
    split,
)
from memtrace.allocator.rules import TORCH, Rules, round_size
from memtrace.allocator.settings import SettingError, Settings
from memtrace.format.schema import EVENT_KINDS

SEGMENT_ALLOC: Final = EVENT_KINDS.index("segment_alloc")
SEGMENT_FREE: Final = EVENT_KINDS.index("segment_free")
OOM: Final = EVENT_KINDS.index("oom")
ListMaker = Callable[[Pool, int, Settings, Rules], FreeList]


class Allocator:
    """The state of the allocator of one device, in bytes. A request that fails returns None."""

    def __init__(
        self,
        settings: Settings,
        device: Device,
        rules: Rules = TORCH,
        no_split_pools: frozenset[int] = frozenset(),
        make_list: ListMaker | None = None,
    ) -> None:
        self.settings = settings
        self.rules = rules
        self.device = device
        self.no_split_pools = no_split_pools
        self.reserved = self.allocated = self.requested = 0
        self.peak_reserved = self.peak_allocated = 0
        self.allocated_at_peak = self.segments_at_peak = self.peak_position = 0
        self.num_mallocs = self.num_segments = self.num_device_allocs = self.num_retries = self.num_ooms = 0
        self.log: list[tuple[int, int, int, int]] = []  # (mallocs so far, kind, address, size) of device operations
        self.live: set[Block] = set()
        self.pending: list[Block] = []  # given back by the program, still used by a stream
        self.freeable_pools: set[int] = set()  # private pools whose owner is gone
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._lists: dict[tuple[bool, int, int], FreeList] = {}
        self._streams = int(rules.separate_streams)
        self._small_limit = rules.small_limit_bytes
        self._divisions = settings.roundup_power2_divisions
        self._make_list = make_list or (FreeList if rules.fit == "best" else FirstFitList)
        self._counts_segments = rules.tie == "creation"
        self._num_ranks = 0
        self._allowed = _allowed_bytes(settings, device)

    def free_list(self, small: bool, stream: int = 0, pool: int = 0) -> FreeList:
        """The list of one pool and stream, made on first use."""
        stream *= self._streams
        key = (small, stream, pool)
        found = self._lists.get(key)
        if found is None:
            owner = self._pools.setdefault((pool, small), Pool(small, pool))
            found = self._lists[key] = self._make_list(owner, stream, self.settings, self.rules)
            owner.lists[stream] = found
            if pool in self.no_split_pools:
                found.min_remainder = NO_LIMIT
        return found

    def malloc(self, requested: int, stream: int = 0, pool: int = 0) -> Block | None:
        """Serve a request, from the cache or with a new segment; None: out of memory (`malloc`,
        `alloc_found_block`)."""
        self.num_mallocs += 1
        stream *= self._streams
        size = round_size(requested, self._divisions, self.rules)
        home = self._lists.get((size <= self._small_limit, stream, pool))
        if home is None:
            home = self.free_list(size <= self._small_limit, stream, pool)
        block = home.take(size)
        grown = block is None
        if self._allowed is not None and self.settings.collects_garbage:
            home.pool.lookups += 1
        if block is None:
            block = self._grow(home, size)
            if block is None:
                self.num_ooms += 1
                self.log.append((self.num_mallocs, OOM, 0, size))
                return None
        if block.size - size >= home.min_remainder and size < home.split_below:
            block = split(block, size)
        block.live = True
        block.requested = requested
        self.live.add(block)
        self.allocated += block.size
        self.requested += requested
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if grown and self.reserved > self.peak_reserved:
            self.note_peak()
        return block

    def free(self, block: Block) -> None:
        """Take a block back and merge it with its free neighbours (`free_block`)."""
        block.live = False
        self.live.discard(block)
        self.allocated -= block.size
        self.requested -= block.requested
        if self.rules.merge:
            home = block.home
            before = block.prev
            if before is not None and not before.live and before.mapped:
                home.remove(before)
                absorb_before(block, before)
            after = block.next
            if after is not None and not after.live and after.mapped:
                home.remove(after)
                absorb_after(block, after)
        block.home.insert(block)

    def defer(self, block: Block) -> None:
        """The program gave the block back while another stream still uses it (`insert_events`)."""
        self.pending.append(block)

    def empty_cache(self) -> None:
        """Give every whole free segment back (`release_cached_blocks`)."""
        waiting, self.pending = self.pending, []
        for block in waiting:
            if block.live:
                self.free(block)
        for small in (False, True) if self.rules.release_large_first else (True, False):
            self._release_pool(0, small)
        for private in sorted(self.freeable_pools):
            self._release_pool(private, True)
            self._release_pool(private, False)

    def note_peak(self) -> None:
        """Remember this moment as the one with most reserved."""
        self.peak_reserved = self.reserved
        self.allocated_at_peak = self.allocated
        self.segments_at_peak = self.num_segments
        self.peak_position = self.num_mallocs

    def next_rank(self) -> int:
        """What sorts the blocks of the next segment behind those of the segments before it (`Rules.tie`)."""
        self._num_ranks += self._counts_segments
        return self._num_ranks << 64

    def segments(self) -> Iterator[list[Block]]:
        """The mapped blocks of each segment (of each mapped stretch of a virtual range), in address order."""
        for head in self._heads():
            stretch = [head]
            while stretch[-1].next is not None and stretch[-1].next.mapped:
                stretch.append(stretch[-1].next)
            yield stretch

    def _heads(self) -> list[Block]:
        free = (entry[2] for home in self._lists.values() for entry in home.entries)
        blocks = [*self.live, *free]
        return sorted((b for b in blocks if b.prev is None or not b.prev.mapped), key=lambda b: b.address)

    def _grow(self, home: FreeList, size: int) -> Block | None:
        """Ask the device; where it refuses, give back more and more of the cache first (`malloc`)."""
        if self._allowed is not None and self.settings.collects_garbage:
            self._collect_garbage()
        block = self._from_device(home, size)
        if block is None and self._release_oversize(home, size):
            block = self._from_device(home, size)
        # While a graph is captured the cache may not be released.
        if block is None and not home.pool.private % 2:
            self.empty_cache()
            self.num_retries += 1
            block = self._from_device(home, size)
        return block

    def _from_device(self, home: FreeList, size: int) -> Block | None:
        """A new segment, or a grown expandable one; None: the device or the memory fraction refuses
        (`alloc_block`)."""
        segment = segment_size(size, self.settings, self.rules)
        if self._allowed is not None and self.reserved + segment > self._allowed:
            return None
        if self.settings.expandable_segments:
            return expandable.grow(self, home, size)
        address = self.device.allocate(segment, self)
        if address is None:
            return None
        self.reserved += segment
        self.num_segments += 1
        self.num_device_allocs += 1
        self.log.append((self.num_mallocs, SEGMENT_ALLOC, address, segment))
        return Block(address, segment, home, rank=self.next_rank())

    def _release_pool(self, private: int, small: bool) -> None:
        """Free whole segments in key order, then unmap whole pages of expandable ones (`release_blocks`)."""
        pool = self._pools.get((private, small))
        if pool is None:
            return
        free = [entry[2] for home in pool.in_order() for entry in home.entries]
        for block in free:
            if block.base is None and block.prev is None and block.next is None:
                self._release(block)
        for block in free:
            if block.base is not None:
                expandable.unmap(self, block)

    def _release(self, block: Block) -> None:
        """Give a segment back to the device (`release_block`)."""
        block.home.remove(block)
        self.reserved -= block.size
        self.num_segments -= 1
        self.log.append((self.num_mallocs, SEGMENT_FREE, block.address, block.size))

    def _release_oversize(self, home: FreeList, size: int) -> bool:
        """Free one block as large as the request, else several from the largest
        (`release_available_cached_blocks`)."""
        limit = home.max_split
        if limit == NO_LIMIT:
            return False
        wanted = max(size, limit)
        i = bisect_left(home.entries, (wanted,))
        if i < len(home.entries) and home.entries[i][2].base is None:
            self._release(home.entries[i][2])
            return True
        released = 0
        for entry in reversed(home.entries[:i]):
            if released >= wanted or entry[0] < limit:
                break
            if entry[2].base is None:
                released += entry[0]
                self._release(entry[2])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Free the large segments unused for longest until under the threshold
        (`garbage_collect_cached_blocks`)."""
        assert self._allowed is not None
        threshold = int(self.settings.garbage_collection_threshold * self._allowed)
        pool = self._pools.get((0, False))
        if self.reserved <= threshold or pool is None:
            return
        target = self.reserved - threshold
        blocks = [entry[2] for home in pool.in_order() for entry in home.entries]
        blocks = [b for b in blocks if b.prev is None and b.next is None and b.base is None]
        age = sum(pool.lookups - b.since for b in blocks)
        reclaimed, freed = 0, True
        while reclaimed < target and freed and blocks:
            mean = age / len(blocks)
            old = [b for b in blocks if pool.lookups - b.since >= mean]
            blocks = [b for b in blocks if pool.lookups - b.since < mean]
            freed = bool(old)
            for block in old:
                reclaimed += block.size
                age -= pool.lookups - block.since
                self._release(block)


def segment_size(size: int, settings: Settings, rules: Rules) -> int:
    """Bytes asked of the device for a rounded request (`get_allocation_size`)."""
    if size <= rules.small_limit_bytes:
        return rules.small_segment_bytes
    if size < rules.own_segment_bytes:
        return settings.large_segment_bytes
    return -(-size // rules.segment_round_bytes) * rules.segment_round_bytes


def _allowed_bytes(settings: Settings, device: Device) -> int | None:
    if settings.memory_fraction is None:
        return None
    if device.total_bytes is None:
        raise SettingError("a memory fraction needs the size of the device: give a capacity")
    return int(settings.memory_fraction * device.total_bytes)
