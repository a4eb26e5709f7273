"""Rules of the model one by one, especially those that no public file exercises."""

from __future__ import annotations

import pytest

from memtrace.allocator.blocks import Block
from memtrace.allocator.history import SEGMENT_FREE
from memtrace.allocator.model import CachingAllocator
from memtrace.allocator.rules import TORCH, TORCH_2_13, Rules
from memtrace.allocator.settings import MIB, AllocatorSettings, SettingError
from memtrace.allocator.simulated_devices import SyntheticDevice


def make_allocator(
    text: str = "", *, capacity: int | None = None, rules: Rules = TORCH, no_split: int | None = None
) -> CachingAllocator:
    pools = frozenset() if no_split is None else frozenset({no_split})
    return CachingAllocator(AllocatorSettings.parse(text), SyntheticDevice(capacity), rules, no_split_pools=pools)


def allocate(allocator: CachingAllocator, size: int, **where: int) -> Block:
    block = allocator.malloc(size, **where)
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("request_bytes", "segment"),
    [(1, 2), (1 * MIB, 2), (1 * MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (25 * MIB, 26)],
)
def test_segment_size_depends_on_the_request(request_bytes: int, segment: int) -> None:
    allocator = make_allocator()
    allocate(allocator, request_bytes)
    assert allocator.reserved == segment * MIB


@pytest.mark.parametrize(("remainder", "length"), [(MIB, 14 * MIB), (MIB + 512, 13 * MIB - 512)])
def test_a_large_block_is_split_only_for_a_remainder_above_1_mib(remainder: int, length: int) -> None:
    allocator = make_allocator()
    allocator.free(allocate(allocator, 14 * MIB))
    assert allocate(allocator, 14 * MIB - remainder).size == length


def test_blocks_of_the_small_pool_have_no_slack() -> None:
    allocator = make_allocator()
    assert [allocate(allocator, size).size for size in (1, 512, 513, 1000)] == [512, 512, 1024, 1024]


def test_equal_blocks_are_ordered_by_address_or_segment_age() -> None:
    for rules, expected in ((TORCH, "lowest"), (TORCH_2_13, "oldest")):
        allocator = CachingAllocator(AllocatorSettings(), SyntheticDevice(order="descending"), rules)
        blocks = [allocate(allocator, 20 * MIB) for _ in range(3)]
        for block in blocks:
            allocator.free(block)
        taken = allocate(allocator, 20 * MIB).address
        addresses = sorted(block.address for block in blocks)
        assert taken == (addresses[0] if expected == "lowest" else addresses[-1])


def test_blocks_are_not_shared_between_streams() -> None:
    allocator = make_allocator()
    allocator.free(allocate(allocator, 5 * MIB, stream=0))
    allocate(allocator, 5 * MIB, stream=7)
    assert allocator.num_segments == 2


def test_a_block_used_by_another_stream_becomes_free_at_completion() -> None:
    allocator = make_allocator(capacity=40 * MIB)
    block = allocate(allocator, 20 * MIB)
    allocator.defer_free(block)
    second = allocate(allocator, 20 * MIB)  # the first is not free yet
    assert second.address != block.address
    third = allocate(allocator, 20 * MIB)  # the allocator waits for the stream and releases its segment
    assert (allocator.num_retries, allocator.num_segments) == (1, 2)
    assert third.live and not allocator.deferred


def test_private_pools_keep_their_segments_while_they_have_an_owner() -> None:
    allocator = make_allocator()
    block = allocate(allocator, 5 * MIB, pool=2)
    allocator.free(block)
    allocate(allocator, 5 * MIB)
    assert allocator.num_segments == 2
    allocator.empty_cache()
    assert allocator.num_segments == 2, "a pool with an owner keeps its segments"
    allocator.releasable_pools.add(2)
    allocator.empty_cache()
    assert allocator.num_segments == 1


def test_private_pools_are_released_in_the_order_of_pytorchs_hash_table() -> None:
    allocator = make_allocator()
    pool_of: dict[int, int] = {}
    for pool in (3, 5, 7, 9):  # of the CUDA graphs 1 to 4
        block = allocate(allocator, 5 * MIB, pool=pool)
        pool_of[block.address] = pool
        allocator.free(block)
    allocator.releasable_pools |= {3, 5, 7, 9}
    allocator.empty_cache()
    assert [pool_of[event.address] for event in allocator.log[-4:]] == [5, 9, 3, 7]


def test_a_private_pool_is_released_alone() -> None:
    allocator = make_allocator()
    blocks = [allocate(allocator, 5 * MIB, pool=pool) for pool in (0, 2, 4)]
    for block in blocks:
        allocator.free(block)
    allocator.release_private_pool(2)
    assert allocator.num_segments == 2
    assert allocator.log[-1].address == blocks[1].address


def test_a_no_split_pool_never_splits() -> None:
    allocator = make_allocator(no_split=2)
    assert allocate(allocator, 3 * MIB, pool=2).size == 20 * MIB
    assert allocate(allocator, 3 * MIB).size == 3 * MIB


def test_cache_is_not_released_during_graph_capture() -> None:
    allocator = make_allocator(capacity=30 * MIB)
    allocator.free(allocate(allocator, 20 * MIB))
    assert allocator.malloc(20 * MIB, pool=3) is None  # odd numbers are pools of CUDA graphs
    assert allocator.malloc(20 * MIB, pool=2) is not None


def test_a_refused_request_is_retried_before_it_fails() -> None:
    allocator = make_allocator(capacity=64 * MIB)
    kept, dropped = allocate(allocator, 20 * MIB), allocate(allocator, 22 * MIB)
    allocator.free(dropped)
    allocate(allocator, 40 * MIB)
    assert (allocator.num_retries, allocator.num_ooms, allocator.reserved) == (1, 0, 60 * MIB)
    assert allocator.malloc(10 * MIB) is None
    assert (allocator.num_retries, allocator.num_ooms) == (2, 1)
    assert kept.live


def test_empty_cache_releases_the_large_pool_first_by_size() -> None:
    allocator = make_allocator()
    blocks = [allocate(allocator, size) for size in (1 * MIB, 60 * MIB, 20 * MIB, 20 * MIB)]
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    freed = [size for _, kind, _, size in allocator.log if kind == SEGMENT_FREE]
    assert freed == [20 * MIB, 20 * MIB, 60 * MIB, 2 * MIB]
    assert allocator.reserved == 0


def test_expandable_segments_grow_and_shrink_by_whole_pages() -> None:
    allocator = make_allocator("expandable_segments:True")
    first = allocate(allocator, 30 * MIB)
    second = allocate(allocator, 5 * MIB)
    begin = first.address
    assert (allocator.reserved, second.address - begin) == (40 * MIB, 30 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB, "only whole pages are released: the second one contains the other block"
    assert allocate(allocator, 12 * MIB).address == begin, "new pages are mapped at the lowest gap"
    assert allocator.reserved == 40 * MIB


def test_expandable_segments_split_the_large_pool_like_the_small_pool() -> None:
    allocator = make_allocator("expandable_segments:True")
    assert allocate(allocator, 20 * MIB - 512).size == 20 * MIB - 512
    assert make_allocator().malloc(20 * MIB - 512).size == 20 * MIB  # type: ignore[union-attr]


def test_max_split_size_limits_which_blocks_are_used_and_split() -> None:
    allocator = make_allocator("max_split_size_mb:32")
    big = allocate(allocator, 40 * MIB)
    allocator.free(big)
    assert allocate(allocator, 30 * MIB).address != big.address, "a large block does not serve a smaller request"
    assert allocate(allocator, 39 * MIB).size == 40 * MIB, "a large block is not split"
    allocator.free(big)
    huge = make_allocator("max_split_size_mb:32")
    huge.free(allocate(huge, 60 * MIB))
    allocate(huge, 40 * MIB)
    assert huge.num_segments == 2, "a block that exceeds the request by 20 MiB is not used"


def test_max_split_size_releases_only_the_largest_blocks_first() -> None:
    allocator = make_allocator("max_split_size_mb:32", capacity=140 * MIB)
    blocks = [allocate(allocator, size * MIB) for size in (40, 44, 48)]
    for block in blocks:
        allocator.free(block)
    allocate(allocator, 90 * MIB)
    freed = [size // MIB for _, kind, _, size in allocator.log if kind == SEGMENT_FREE]
    assert freed == [48, 44], "the largest first, and not the whole cache"
    assert allocator.num_retries == 0


def test_roundup_divisions_change_the_block_size() -> None:
    allocator = make_allocator("roundup_power2_divisions:2")
    assert allocate(allocator, 1100 * 1024).size == 1536 * 1024
    assert allocate(allocator, 513).size == 1024


def test_garbage_collection_needs_a_memory_fraction() -> None:
    def releases_early(text: str) -> bool:
        allocator = make_allocator(text, capacity=1000 * MIB)
        for _ in range(3):
            allocator.free(allocate(allocator, 100 * MIB))
            allocate(allocator, 30 * MIB)
        allocate(allocator, 200 * MIB)
        return any(kind == SEGMENT_FREE for _, kind, *_ in allocator.log)

    def releases_many(text: str) -> bool:
        allocator = make_allocator(text, capacity=1000 * MIB)
        blocks = [allocate(allocator, 100 * MIB) for _ in range(3)]
        for block in blocks:
            allocator.free(block)
        allocate(allocator, 200 * MIB)
        return any(kind == SEGMENT_FREE for _, kind, *_ in allocator.log)

    assert not releases_many("garbage_collection_threshold:0.2")
    assert releases_many("garbage_collection_threshold:0.2,per_process_memory_fraction:0.9")
    assert not releases_early("garbage_collection_threshold:0.9,per_process_memory_fraction:0.9")
    with pytest.raises(SettingError, match="capacity"):
        make_allocator("per_process_memory_fraction:0.5")


def test_a_memory_fraction_limits_reserved_memory() -> None:
    allocator = make_allocator("per_process_memory_fraction:0.5", capacity=100 * MIB)
    assert allocator.malloc(60 * MIB) is None
    assert allocator.malloc(50 * MIB) is not None


def test_large_segment_size_replaces_20_mib() -> None:
    allocator = make_allocator("large_segment_size_mb:40")
    allocate(allocator, 5 * MIB)
    assert allocator.reserved == 40 * MIB
    assert allocate(allocator, 9 * MIB).size == 9 * MIB
    assert allocator.reserved == 40 * MIB
