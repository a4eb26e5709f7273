"""Invariants of the model for arbitrary requests."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from memtrace.allocator.blocks import Block
from memtrace.allocator.model import CachingAllocator
from memtrace.allocator.rules import TORCH, TORCH_2_13, Rules
from memtrace.allocator.settings import MIB, AllocatorSettings
from memtrace.allocator.simulated_devices import AddressOrder, SyntheticDevice
from tests.allocator.programs import EDGES, SETTINGS

SIZES = st.one_of(st.sampled_from(EDGES), st.integers(1, 200 * MIB))
Step = tuple[Any, ...]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), SIZES, st.sampled_from([0, 16]), st.sampled_from([0, 0, 2])),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.just("defer"), st.integers(0, 99)),
        st.tuples(st.just("empty_cache")),
    ),
    max_size=80,
)


def check_invariants(allocator: CachingAllocator, held: list[Block]) -> None:
    """Assert that blocks tile their segments, free neighbours are merged, blocks do not overlap, and counters are sums."""
    segments = list(allocator.segments())
    for segment in segments:
        at = segment[0].address
        for before, block in zip([None, *segment], segment, strict=False):
            assert block.address == at, "blocks have a gap or an overlap"
            assert block.size > 0 and block.size % 512 == 0
            at += block.size
            if before is not None:
                assert before.live or block.live, "free neighbours are merged"
            if block.live:
                assert block.size >= block.requested
            elif not block.free_list.pool.small and block.range_start is None:
                assert block.size > MIB, "the large pool has no small remainders"
    blocks = [block for segment in segments for block in segment]
    spans = sorted((block.address, block.address + block.size) for block in blocks)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    live = [block for block in blocks if block.live]
    assert set(live) == allocator.live == set(held)
    assert allocator.reserved == sum(block.size for block in blocks)
    assert allocator.allocated == sum(block.size for block in live)
    assert allocator.requested == sum(block.requested for block in live)
    assert allocator.peak_reserved >= allocator.reserved
    assert allocator.peak_allocated >= allocator.allocated


@given(
    STEPS,
    st.sampled_from(SETTINGS),
    st.sampled_from(["ascending", "descending", "random"]),
    st.sampled_from([None, 300 * MIB]),
    st.sampled_from([TORCH, TORCH_2_13]),
)
@budget(max_examples=150, deadline=None)
def test_invariants_hold_after_every_operation(
    steps: list[Step], text: str, order: AddressOrder, capacity: int | None, rules: Rules
) -> None:
    device = SyntheticDevice(capacity, order, total_bytes=capacity or 1000 * MIB)
    allocator = CachingAllocator(AllocatorSettings.parse(text), device, rules)
    held: list[Block] = []
    for name, *rest in steps:
        if name == "alloc":
            block = allocator.malloc(rest[0], stream=rest[1], pool=rest[2])
            if block is not None:
                assert block not in held
                held.append(block)
        elif name == "empty_cache":
            allocator.empty_cache()
        elif held:
            block = held[rest[0] % len(held)]
            if name == "defer":
                if block not in allocator.deferred:
                    allocator.defer_free(block)
            elif block in allocator.deferred:
                allocator.complete_free(block)
            else:
                allocator.free(block)
        held = [block for block in held if block.live]
        check_invariants(allocator, held)
        assert capacity is None or allocator.reserved <= capacity
    for block in held:
        allocator.free(block)
    allocator.deferred.clear()
    allocator.releasable_pools |= {2}
    allocator.empty_cache()
    assert (allocator.reserved, allocator.allocated, allocator.requested) == (0, 0, 0)
    assert not list(allocator.segments())


@given(STEPS)
@budget(max_examples=40, deadline=None)
def test_address_order_does_not_affect_the_peak_in_torch_2_13(steps: list[Step]) -> None:
    """torch 2.13 orders blocks by the age of their segment, so where segments lie must not matter."""
    peaks = set()
    for order in ("ascending", "descending", "random"):
        allocator = CachingAllocator(AllocatorSettings(), SyntheticDevice(order=order), TORCH_2_13)
        held: list[Block] = []
        for name, *rest in steps:
            if name == "alloc":
                block = allocator.malloc(rest[0], stream=rest[1])
                assert block is not None
                held.append(block)
            elif held and name == "free":
                allocator.free(held.pop(rest[0] % len(held)))
        peaks.add((allocator.peak_reserved, allocator.allocated_at_peak))
    assert len(peaks) == 1
