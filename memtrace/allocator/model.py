"""A model of the CUDA caching allocator (the native backend) that reproduces it block by block.

Source: `DeviceCachingAllocator` in `c10/cuda/CUDACachingAllocator.cpp`, torch 2.0 to 2.13. Each method names the
function it follows. The model receives requests and frees; a `Device` decides where segments lie and when memory runs
out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from memtrace.allocator.blocks import Block, FirstFitList, FreeList, Pool, merge_after, merge_before, split_block
from memtrace.allocator.device_memory import Device, DeviceMemory, SegmentEvent
from memtrace.allocator.expandable import grow_segment, unmap_whole_pages
from memtrace.allocator.rules import NEVER_SPLIT, NO_LIMIT, TORCH, Rules, round_size, segment_size
from memtrace.allocator.settings import AllocatorSettings, SettingError

FreeListFactory = Callable[[Pool, int, AllocatorSettings, Rules], FreeList]


class CachingAllocator:
    """The allocator of one device. All sizes are in bytes; a request that fails returns None."""

    def __init__(
        self,
        settings: AllocatorSettings,
        device: Device,
        rules: Rules = TORCH,
        no_split_pools: frozenset[int] = frozenset(),
        make_list: FreeListFactory | None = None,
    ) -> None:
        self.settings = settings
        self.rules = rules
        self.memory = DeviceMemory(device, orders_by_age=rules.tie_break == "segment_age")
        self.no_split_pools = no_split_pools
        self.allocated = self.requested = 0
        self.peak_reserved = self.peak_allocated = 0
        self.allocated_at_peak = self.segments_at_peak = self.request_at_peak = 0
        self.num_retries = self.num_ooms = 0
        self.live: set[Block] = set()
        self.deferred: list[Block] = []  # freed by the program, still in use by a stream
        self.releasable_pools: set[int] = set()  # private pools whose owner is gone
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._lists: dict[tuple[bool, int, int], FreeList] = {}
        self._stream_factor = int(rules.separates_streams)
        self._small_request = rules.small_request_bytes
        self._divisions = settings.roundup_power2_divisions
        self._make_list = make_list or (FreeList if rules.fit == "best" else FirstFitList)
        self._allowed = _allowed_bytes(settings, device)

    @property
    def reserved(self) -> int:
        """Bytes taken from the device."""
        return self.memory.reserved

    @property
    def num_segments(self) -> int:
        """Segments held; an expandable segment counts once."""
        return self.memory.num_segments

    @property
    def num_device_allocs(self) -> int:
        """Times the device gave a segment or pages."""
        return self.memory.num_device_allocs

    @property
    def log(self) -> list[SegmentEvent]:
        """Every segment event so far."""
        return self.memory.log

    def free_list(self, small: bool, stream: int = 0, pool: int = 0) -> FreeList:
        """Return the free list of a pool and stream, creating it on first use."""
        stream *= self._stream_factor
        key = (small, stream, pool)
        free_list = self._lists.get(key)
        if free_list is None:
            owner = self._pools.setdefault((pool, small), Pool(small, pool))
            free_list = self._lists[key] = self._make_list(owner, stream, self.settings, self.rules)
            owner.lists[stream] = free_list
            if pool in self.no_split_pools:
                free_list.split_rule = NEVER_SPLIT
        return free_list

    def malloc(self, requested: int, stream: int = 0, pool: int = 0) -> Block | None:
        """Serve a request from the cache or with a new segment; None: out of memory (`malloc`, `alloc_found_block`)."""
        self.memory.num_requests += 1
        size = round_size(requested, self._divisions, self.rules)
        small = size <= self._small_request
        free_list = self._lists.get((small, stream * self._stream_factor, pool)) or self.free_list(small, stream, pool)
        block = free_list.take(size)
        grown = block is None
        if self._allowed is not None and self.settings.collects_garbage:
            free_list.pool.num_lookups += 1
        if block is None:
            block = self._grow(free_list, size)
            if block is None:
                self.num_ooms += 1
                self.memory.log_failure(size)
                return None
        if free_list.split_rule.should_split(block.size, size):
            block = split_block(block, size)
        block.live = True
        block.requested = requested
        self.live.add(block)
        self.allocated += block.size
        self.requested += requested
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        if grown and self.memory.reserved > self.peak_reserved:
            self.record_peak()
        return block

    def free(self, block: Block) -> None:
        """Free a block and merge it with its free neighbours (`free_block`)."""
        block.live = False
        self.live.discard(block)
        self.allocated -= block.size
        self.requested -= block.requested
        if self.rules.merges_neighbours:
            free_list = block.free_list
            before = block.prev
            if before is not None and not before.live and before.mapped:
                free_list.remove(before)
                merge_before(block, before)
            after = block.next
            if after is not None and not after.live and after.mapped:
                free_list.remove(after)
                merge_after(block, after)
        block.free_list.insert(block)

    def defer_free(self, block: Block) -> None:
        """Note that the program freed a block that another stream still uses (`insert_events`)."""
        self.deferred.append(block)

    def complete_free(self, block: Block) -> None:
        """Free a deferred block, unless a release of the cache has freed it already (`process_events`)."""
        if block in self.deferred:
            self.deferred.remove(block)
            self.free(block)

    def empty_cache(self) -> None:
        """Release every segment that is wholly free (`release_cached_blocks`)."""
        deferred, self.deferred = self.deferred, []
        for block in deferred:
            if block.live:
                self.free(block)
        for small in (False, True) if self.rules.releases_large_first else (True, False):
            self._release_pool(0, small)
        for private in sorted(self.releasable_pools, key=_hash_of_pool):
            self.release_private_pool(private)

    def release_private_pool(self, private: int) -> None:
        """Release the free segments of a private pool whose owner is gone (`release_cached_blocks` with a pool)."""
        self.releasable_pools.add(private)
        self._release_pool(private, True)
        self._release_pool(private, False)

    def record_peak(self) -> None:
        """Record the present moment as the peak of reserved memory."""
        self.peak_reserved = self.memory.reserved
        self.allocated_at_peak = self.allocated
        self.segments_at_peak = self.memory.num_segments
        self.request_at_peak = self.memory.num_requests

    def segments(self) -> Iterator[list[Block]]:
        """Yield the mapped blocks of each segment, or of each mapped part of a virtual range, by address."""
        for head in self._heads():
            segment = [head]
            while segment[-1].next is not None and segment[-1].next.mapped:
                segment.append(segment[-1].next)
            yield segment

    def _heads(self) -> list[Block]:
        free = (entry[2] for free_list in self._lists.values() for entry in free_list.entries)
        blocks = [*self.live, *free]
        return sorted((b for b in blocks if b.prev is None or not b.prev.mapped), key=lambda b: b.address)

    def _grow(self, free_list: FreeList, size: int) -> Block | None:
        """Take memory from the device; where it refuses, release more and more of the cache first (`malloc`)."""
        if self._allowed is not None and self.settings.collects_garbage:
            self._collect_garbage()
        block = self._take_from_device(free_list, size)
        if block is None and self._release_oversize(free_list, size):
            block = self._take_from_device(free_list, size)
        # The cache is not released while a CUDA graph is captured; the pools of graphs have odd numbers.
        if block is None and not free_list.pool.private % 2:
            self.empty_cache()
            self.num_retries += 1
            block = self._take_from_device(free_list, size)
        return block

    def _take_from_device(self, free_list: FreeList, size: int) -> Block | None:
        """Return a new or grown segment; None where the device or the memory fraction refuses (`alloc_block`)."""
        segment = segment_size(size, large_segment_bytes=self.settings.large_segment_bytes, rules=self.rules)
        if self._allowed is not None and self.memory.reserved + segment > self._allowed:
            return None
        if self.settings.expandable_segments:
            block = grow_segment(self.memory, free_list, size)
            if block is None and self.memory.reserved > self.peak_reserved:
                self.record_peak()  # by the pages that were mapped before the device refused the rest
            return block
        address = self.memory.take_segment(segment)
        if address is None:
            return None
        return Block(address, segment, free_list, age_key=self.memory.next_age_key())

    def _release_pool(self, private: int, small: bool) -> None:
        """Release free segments in the order of the free lists, then unmap whole pages (`release_blocks`)."""
        pool = self._pools.get((private, small))
        if pool is None:
            return
        free = [entry[2] for free_list in pool.sorted_lists() for entry in free_list.entries]
        for block in free:
            if block.range_start is None and block.prev is None and block.next is None:
                self._release(block)
        for block in free:
            if block.range_start is not None:
                unmap_whole_pages(self.memory, block)

    def _release(self, block: Block) -> None:
        """Release a segment (`release_block`)."""
        block.free_list.remove(block)
        self.memory.release_segment(block.address, block.size)

    def _release_oversize(self, free_list: FreeList, size: int) -> bool:
        """Release a block as large as the request, or several large ones (`release_available_cached_blocks`)."""
        limit = free_list.max_split
        if limit == NO_LIMIT:
            return False
        wanted = max(size, limit)
        i = bisect_left(free_list.entries, (wanted,))
        if i < len(free_list.entries) and free_list.entries[i][2].range_start is None:
            self._release(free_list.entries[i][2])
            return True
        released = 0
        for entry in reversed(free_list.entries[:i]):
            if released >= wanted or entry[0] < limit:
                break
            if entry[2].range_start is None:
                released += entry[0]
                self._release(entry[2])
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Release the large segments that were unused longest (`garbage_collect_cached_blocks`)."""
        assert self._allowed is not None
        threshold = int(self.settings.garbage_collection_threshold * self._allowed)
        pool = self._pools.get((0, False))
        if self.memory.reserved <= threshold or pool is None:
            return
        target = self.memory.reserved - threshold
        blocks = [entry[2] for free_list in pool.sorted_lists() for entry in free_list.entries]
        blocks = [b for b in blocks if b.prev is None and b.next is None and b.range_start is None]
        total_age = sum(pool.num_lookups - b.freed_at_lookup for b in blocks)
        reclaimed, released = 0, True
        while reclaimed < target and released and blocks:
            mean_age = total_age / len(blocks)
            old = [b for b in blocks if pool.num_lookups - b.freed_at_lookup >= mean_age]
            blocks = [b for b in blocks if pool.num_lookups - b.freed_at_lookup < mean_age]
            released = bool(old)
            for block in old:
                reclaimed += block.size
                total_age -= pool.num_lookups - block.freed_at_lookup
                self._release(block)


def _hash_of_pool(private: int) -> int:
    """Return the key that orders private pools in `graph_pools_freeable` (`ska::fibonacci_hash_policy`)."""
    return private // 2 * 0x9E3779B97F4A7C15 % (1 << 64)  # half the number is the id of the capture or of the MemPool


def _allowed_bytes(settings: AllocatorSettings, device: Device) -> int | None:
    if settings.memory_fraction is None:
        return None
    if device.total_bytes is None:
        raise SettingError(
            "per_process_memory_fraction: the size of the device is unknown. Give the capacity (--capacity 24GiB)."
        )
    return int(settings.memory_fraction * device.total_bytes)
