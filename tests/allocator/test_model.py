"""Rules one by one, those above all that no public file shows."""

from __future__ import annotations

import pytest

from memtrace.allocator.blocks import Block
from memtrace.allocator.devices import InventedDevice
from memtrace.allocator.history import SEGMENT_FREE
from memtrace.allocator.model import Allocator
from memtrace.allocator.rules import TORCH, TORCH_2_13, Rules
from memtrace.allocator.settings import MIB, SettingError, Settings


def make(
    text: str = "", *, capacity: int | None = None, rules: Rules = TORCH, no_split: int | None = None
) -> Allocator:
    pools = frozenset() if no_split is None else frozenset({no_split})
    return Allocator(Settings.parse(text), InventedDevice(capacity), rules, no_split_pools=pools)


def got(allocator: Allocator, size: int, **where: int) -> Block:
    block = allocator.malloc(size, **where)
    assert block is not None
    return block


@pytest.mark.parametrize(
    ("request_bytes", "segment"),
    [(1, 2), (1 * MIB, 2), (1 * MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (10 * MIB + 1, 12), (25 * MIB, 26)],
)
def test_segment_sizes(request_bytes: int, segment: int) -> None:
    allocator = make()
    got(allocator, request_bytes)
    assert allocator.reserved == segment * MIB


@pytest.mark.parametrize(("remainder", "length"), [(MIB, 14 * MIB), (MIB + 512, 13 * MIB - 512)])
def test_a_large_block_is_split_only_where_more_than_a_mebibyte_is_left(remainder: int, length: int) -> None:
    allocator = make()
    allocator.free(got(allocator, 14 * MIB))
    assert got(allocator, 14 * MIB - remainder).size == length


def test_slack_is_not_seen_in_the_small_pool() -> None:
    allocator = make()
    assert [got(allocator, size).size for size in (1, 512, 513, 1000)] == [512, 512, 1024, 1024]


def test_equal_blocks_lowest_address_or_oldest_segment() -> None:
    for rules, expected in ((TORCH, "lowest"), (TORCH_2_13, "oldest")):
        allocator = Allocator(Settings(), InventedDevice(order="descending"), rules)
        blocks = [got(allocator, 20 * MIB) for _ in range(3)]
        for block in blocks:
            allocator.free(block)
        taken = got(allocator, 20 * MIB).address
        addresses = sorted(block.address for block in blocks)
        assert taken == (addresses[0] if expected == "lowest" else addresses[-1])


def test_streams_keep_their_blocks() -> None:
    allocator = make()
    allocator.free(got(allocator, 5 * MIB, stream=0))
    got(allocator, 5 * MIB, stream=7)
    assert allocator.num_segments == 2


def test_a_block_used_by_another_stream_is_free_only_when_that_is_done() -> None:
    allocator = make(capacity=40 * MIB)
    block = got(allocator, 20 * MIB)
    allocator.defer(block)
    second = got(allocator, 20 * MIB)  # the first cannot be had yet
    assert second.address != block.address
    third = got(allocator, 20 * MIB)  # now the allocator waits for the stream, and gives its segment back for this one
    assert (allocator.num_retries, allocator.num_segments) == (1, 2)
    assert third.live and not allocator.pending


def test_private_pools_keep_their_memory() -> None:
    allocator = make()
    mine = got(allocator, 5 * MIB, pool=2)
    allocator.free(mine)
    got(allocator, 5 * MIB)
    assert allocator.num_segments == 2
    allocator.empty_cache()
    assert allocator.num_segments == 2, "a pool with an owner keeps its segments"
    allocator.freeable_pools.add(2)
    allocator.empty_cache()
    assert allocator.num_segments == 1


def test_a_pool_can_forbid_splitting() -> None:
    allocator = make(no_split=2)
    assert got(allocator, 3 * MIB, pool=2).size == 20 * MIB
    assert got(allocator, 3 * MIB).size == 3 * MIB


def test_no_release_while_a_graph_is_captured() -> None:
    allocator = make(capacity=30 * MIB)
    allocator.free(got(allocator, 20 * MIB))
    assert allocator.malloc(20 * MIB, pool=3) is None  # 3 is a graph's pool
    assert allocator.malloc(20 * MIB, pool=2) is not None


def test_retry_and_out_of_memory() -> None:
    allocator = make(capacity=64 * MIB)
    kept, dropped = got(allocator, 20 * MIB), got(allocator, 22 * MIB)
    allocator.free(dropped)
    got(allocator, 40 * MIB)
    assert (allocator.num_retries, allocator.num_ooms, allocator.reserved) == (1, 0, 60 * MIB)
    assert allocator.malloc(10 * MIB) is None
    assert (allocator.num_retries, allocator.num_ooms) == (2, 1)
    assert kept.live


def test_the_cache_is_given_back_large_pool_first_and_in_key_order() -> None:
    allocator = make()
    blocks = [got(allocator, size) for size in (1 * MIB, 60 * MIB, 20 * MIB, 20 * MIB)]
    for block in blocks:
        allocator.free(block)
    allocator.empty_cache()
    freed = [size for _, kind, _, size in allocator.log if kind == SEGMENT_FREE]
    assert freed == [20 * MIB, 20 * MIB, 60 * MIB, 2 * MIB]
    assert allocator.reserved == 0


def test_expandable_segments_grow_and_shrink_by_pages() -> None:
    allocator = make("expandable_segments:True")
    first = got(allocator, 30 * MIB)
    second = got(allocator, 5 * MIB)
    begin = first.address
    assert (allocator.reserved, second.address - begin) == (40 * MIB, 30 * MIB)
    allocator.free(first)
    allocator.empty_cache()
    assert allocator.reserved == 20 * MIB, "only whole pages go: the second one holds the other block"
    assert got(allocator, 12 * MIB).address == begin, "new pages go to the lowest gap"
    assert allocator.reserved == 40 * MIB


def test_expandable_segments_split_the_large_pool_as_the_small_one() -> None:
    allocator = make("expandable_segments:True")
    assert got(allocator, 20 * MIB - 512).size == 20 * MIB - 512
    assert make().malloc(20 * MIB - 512).size == 20 * MIB  # type: ignore[union-attr]


def test_max_split_size() -> None:
    allocator = make("max_split_size_mb:32")
    big = got(allocator, 40 * MIB)
    allocator.free(big)
    assert got(allocator, 30 * MIB).address != big.address, "a large block is not for a smaller request"
    assert got(allocator, 39 * MIB).size == 40 * MIB, "and never split"
    allocator.free(big)
    huge = make("max_split_size_mb:32")
    huge.free(got(huge, 60 * MIB))
    got(huge, 40 * MIB)
    assert huge.num_segments == 2, "a block 20 MiB longer than the request is not taken"


def test_max_split_size_frees_just_enough_first() -> None:
    allocator = make("max_split_size_mb:32", capacity=140 * MIB)
    blocks = [got(allocator, size * MIB) for size in (40, 44, 48)]
    for block in blocks:
        allocator.free(block)
    got(allocator, 90 * MIB)
    freed = [size // MIB for _, kind, _, size in allocator.log if kind == SEGMENT_FREE]
    assert freed == [48, 44], "from the largest, and no full flush"
    assert allocator.num_retries == 0


def test_roundup_changes_the_pool_and_the_segment() -> None:
    allocator = make("roundup_power2_divisions:2")
    assert got(allocator, 1100 * 1024).size == 1536 * 1024
    assert got(allocator, 513).size == 1024


def test_garbage_collection_needs_a_memory_fraction() -> None:
    def freed_early(text: str) -> bool:
        allocator = make(text, capacity=1000 * MIB)
        for _ in range(3):
            allocator.free(got(allocator, 100 * MIB))
            got(allocator, 30 * MIB)
        got(allocator, 200 * MIB)
        return any(kind == SEGMENT_FREE for _, kind, *_ in allocator.log)

    def many(text: str) -> bool:
        allocator = make(text, capacity=1000 * MIB)
        blocks = [got(allocator, 100 * MIB) for _ in range(3)]
        for block in blocks:
            allocator.free(block)
        got(allocator, 200 * MIB)
        return any(kind == SEGMENT_FREE for _, kind, *_ in allocator.log)

    assert not many("garbage_collection_threshold:0.2")
    assert many("garbage_collection_threshold:0.2,per_process_memory_fraction:0.9")
    assert not freed_early("garbage_collection_threshold:0.9,per_process_memory_fraction:0.9")
    with pytest.raises(SettingError, match="capacity"):
        make("per_process_memory_fraction:0.5")


def test_a_memory_fraction_is_a_limit() -> None:
    allocator = make("per_process_memory_fraction:0.5", capacity=100 * MIB)
    assert allocator.malloc(60 * MIB) is None
    assert allocator.malloc(50 * MIB) is not None


def test_large_segment_size() -> None:
    allocator = make("large_segment_size_mb:40")
    got(allocator, 5 * MIB)
    assert allocator.reserved == 40 * MIB
    assert got(allocator, 9 * MIB).size == 9 * MIB
    assert allocator.reserved == 40 * MIB
