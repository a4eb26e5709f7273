"""What must hold of any allocator whatever is asked of it."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from memtrace.allocator.blocks import Block
from memtrace.allocator.devices import InventedDevice, Order
from memtrace.allocator.model import Allocator
from memtrace.allocator.rules import TORCH, TORCH_2_13
from memtrace.allocator.settings import MIB, Settings
from tests.allocator.programs import EDGES, SETTINGS

SIZES = st.one_of(st.sampled_from(EDGES), st.integers(1, 200 * MIB))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), SIZES, st.sampled_from([0, 16]), st.sampled_from([0, 0, 2])),
        st.tuples(st.just("free"), st.integers(0, 99)),
        st.tuples(st.just("defer"), st.integers(0, 99)),
        st.tuples(st.just("empty_cache")),
    ),
    max_size=80,
)


def check(allocator: Allocator, held: list[Block]) -> None:
    """Blocks tile their segments, no two free ones touch, live ones are apart, and the counters are the sums."""
    everything = list(allocator.segments())
    for segment in everything:
        at = segment[0].address
        for before, block in zip([None, *segment], segment, strict=False):
            assert block.address == at, "a gap or an overlap"
            assert block.size > 0 and block.size % 512 == 0
            at += block.size
            if before is not None:
                assert before.live or block.live, "free neighbours are merged"
            if block.live:
                assert block.size >= block.requested
            elif not block.home.pool.small and block.base is None:
                assert block.size > MIB, "the large pool keeps no small leftovers"
    blocks = [block for segment in everything for block in segment]
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
def test_the_state_is_always_sound(steps: list[tuple], text: str, order: Order, capacity: int | None, rules) -> None:  # type: ignore[type-arg,no-untyped-def]
    device = InventedDevice(capacity, order, total=capacity or 1000 * MIB)
    allocator = Allocator(Settings.parse(text), device, rules)
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
                if block not in allocator.pending:
                    allocator.defer(block)
            elif block in allocator.pending:
                allocator.pending.remove(block)
                allocator.free(block)
            else:
                allocator.free(block)
        held = [block for block in held if block.live]
        check(allocator, held)
        assert capacity is None or allocator.reserved <= capacity
    for block in held:
        allocator.free(block)
    allocator.pending.clear()
    allocator.freeable_pools |= {2}
    allocator.empty_cache()
    assert (allocator.reserved, allocator.allocated, allocator.requested) == (0, 0, 0)
    assert not list(allocator.segments())


@given(STEPS)
@budget(max_examples=40, deadline=None)
def test_without_ties_the_order_of_addresses_changes_nothing(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    """torch 2.13 orders by age of the segment, so no peak may depend on where segments lie."""
    peaks = set()
    for order in ("ascending", "descending", "random"):
        allocator = Allocator(Settings(), InventedDevice(order=order), TORCH_2_13)
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
