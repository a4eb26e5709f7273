"""Measures of a running recording: growth, time to exhaustion, this step against the last ones."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memtrace.analysis.live import MIN_STEPS, GrowingSite, growing_sites, growth_per_step, known_capacity, measure_live
from memtrace.analysis.thresholds import WARM_UP_STEPS
from memtrace.format.live_status import LiveStatus, LiveStep
from memtrace.format.manifest import DeviceInfo, Manifest
from tests.builders import event, op, step, trace_of

MIB = 1 << 20


def status_of(end_bytes: list[int], *, duration_ns: int = 1000) -> LiveStatus:
    """A status whose steps have these bytes at their ends, and peaks of 10 MiB more."""
    steps = tuple(
        LiveStep(number, number * duration_ns, duration_ns, {"cuda:0": size + 10 * MIB}, {"cuda:0": size})
        for number, size in enumerate(end_bytes)
    )
    last = end_bytes[-1] if end_bytes else 0
    return LiveStatus(
        time_ns=len(steps) * duration_ns,
        written_epoch_ns=0,
        num_events=1,
        live_bytes={"cuda:0": last},
        peak_bytes={"cuda:0": last + 10 * MIB},
        category_bytes={"cuda:0": {"unknown": last}},
        reserved_bytes={},
        steps=steps,
        open_step=LiveStep(len(steps), len(steps) * duration_ns, 7, {"cuda:0": 3}, {"cuda:0": 2}) if steps else None,
        samples=(),
    )


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 1 << 40)), max_size=20, unique_by=lambda pair: pair[0]))
def test_growth_is_the_median_slope_between_two_steps(steps: list[tuple[int, int]]) -> None:
    steps.sort()
    numbers, levels = [number for number, _ in steps], [level for _, level in steps]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(steps, 2)]
    expected = None if len(steps) < MIN_STEPS else pytest.approx(median(slopes))
    assert growth_per_step(numbers, levels) == expected


def test_a_step_that_evaluates_the_model_does_not_change_the_growth() -> None:
    levels = [MIB * number for number in range(20)]
    levels[11] += 500 * MIB
    assert measure_live(status_of(levels), "cuda:0").growth_bytes_per_step == MIB


def test_the_capacity_is_reached_after_the_steps_that_a_loop_counts() -> None:
    levels = [MIB * number for number in range(20)]
    measures = measure_live(status_of(levels), "cuda:0", 100 * MIB)
    peak, num_steps = levels[-1] + 10 * MIB, 0
    while peak + MIB <= 100 * MIB:
        peak, num_steps = peak + MIB, num_steps + 1
    assert (measures.steps_to_capacity, measures.ns_to_capacity) == (num_steps, 1000 * num_steps)


@pytest.mark.parametrize(
    ("levels", "capacity", "growth"),
    [([], MIB, None), ([MIB] * (WARM_UP_STEPS + MIN_STEPS - 1), MIB, None), ([MIB] * 20, MIB, 0),
     ([MIB * number for number in range(20)], None, MIB)],
)  # fmt: skip
def test_the_time_to_exhaustion_is_unknown_without_steps_capacity_or_growth(
    levels: list[int], capacity: int | None, growth: int | None
) -> None:
    measures = measure_live(status_of(levels), "cuda:0", capacity)
    assert measures.growth_bytes_per_step == growth
    assert measures.steps_to_capacity is None
    assert measures.ns_to_capacity is None


def test_this_step_is_compared_with_the_median_of_the_steps_after_warm_up() -> None:
    status = status_of([100 * MIB, 100 * MIB, 4 * MIB, 5 * MIB, 9 * MIB])
    comparison = measure_live(status, "cuda:0").step
    assert comparison is not None
    assert (comparison.number, comparison.peak_bytes, comparison.usual_peak_bytes) == (5, 3, 15 * MIB)
    assert comparison.num_compared_steps == 3
    assert measure_live(replace(status, open_step=None, steps=()), "cuda:0").step is None


def test_the_capacity_is_what_the_allocator_may_use() -> None:
    devices = {
        "cpu": DeviceInfo(total_bytes=5),
        "cuda:0": DeviceInfo(total_bytes=9),
        "cuda:1": DeviceInfo(None, None, 9, allowed_bytes=4),
    }
    manifest = Manifest(devices=devices)
    assert [known_capacity(manifest, name) for name in ("cpu", "cuda:0", "cuda:1", "cuda:2")] == [None, 9, 4, None]


def test_growing_sites_are_those_that_leave_a_block_in_most_steps() -> None:
    num_steps, events, ops = 12, [], []
    names = [{"id": 5, "kind": "frame", "text": "/x/train.py\t3\tleak"}, {"id": 6, "kind": "stack", "frames": [5]},
             {"id": 7, "kind": "frame", "text": "/x/train.py\t9\tcache"}, {"id": 8, "kind": "stack", "frames": [7]}]  # fmt: skip

    def allocate(block: int, time: int, size: int, stack: int, *, freed: int | None = None) -> None:
        events.append(event("alloc", block, time, size, op_id=block))
        ops.append(op(block, "forward", stack=stack))
        if freed is not None:
            events.append(event("free", block, freed, size))

    for number in range(num_steps):
        allocate(3 * number, 100 * number + 10, 64, 6)
        allocate(3 * number + 1, 100 * number + 20, 999, 8, freed=100 * number + 30)
        if number == 4:
            allocate(3 * number + 2, 100 * number + 40, 1 << 20, 8)  # a cache, once
    events.sort(key=lambda row: row["time_ns"])
    trace = trace_of(events=events, ops=ops, names=names, spans=[step(n, 100 * n, 100) for n in range(num_steps)])
    num_counted = num_steps - 1 - WARM_UP_STEPS
    sites = growing_sites(trace, "cpu", 5)
    assert sites == [GrowingSite("x/train.py:3 leak", "unknown", 64, num_counted)]
    assert growing_sites(trace, "cuda:0", 5) == []
