"""Access time intervals against brute force, and the arithmetic of the paper."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis.access import (
    PUBLISHED,
    access,
    covers_peak,
    from_dict,
    intervals,
    intervals_table,
    largest_free_swap,
    swappable,
)
from memtrace.analysis.access import given as bandwidths
from memtrace.analysis.bandwidth import SIZES, fitted
from memtrace.analysis.blocks import blocks
from memtrace.errors import MemtraceError
from tests.builders import event, op, trace_of


@st.composite
def accesses(draw):
    """Rows of events: blocks and their reads and writes by operators, of which some touch a block twice."""
    count = draw(st.integers(1, 5))
    rows = [event("alloc", number, number, draw(st.integers(1, 10**6))) for number in range(count)]
    now, call = count, 0
    for _ in range(draw(st.integers(0, 40))):
        now += draw(st.integers(0, 10**6))
        call += draw(st.integers(0, 1))
        kind = draw(st.sampled_from(["read", "write"]))
        rows.append(event(kind, draw(st.integers(0, count - 1)), now, op_id=draw(st.sampled_from([None, call]))))
    return rows


@settings(max_examples=200, deadline=None)
@given(accesses())
def test_intervals_are_those_of_brute_force(rows):
    trace = trace_of(events=rows, ops=[op(number, "forward") for number in range(50)])
    expected = []
    for block in range(max(row["block_id"] for row in rows) + 1):
        mine = [row for row in rows if row["block_id"] == block and row["kind"] in ("read", "write")]
        for first, second in pairwise(mine):
            if first["op_id"] is None or first["op_id"] != second["op_id"]:
                expected.append((block, second["time_ns"] - first["time_ns"]))
    found = intervals(trace)
    assert list(zip(found.block.tolist(), found.ns.tolist(), strict=True)) == expected
    size = blocks(trace).size
    fits = {place for place, (block, ns) in enumerate(expected) if size[block] * (0.1563 + 0.1574) + 8242 + 12352 <= ns}
    assert set(swappable(trace, PUBLISHED).tolist()) == fits
    assert (access(trace)["num_intervals"] or 0) == len(expected) == len(intervals_table(trace))


def test_the_arithmetic_of_the_paper():
    costs = bandwidths(6.4, 6.3)
    assert largest_free_swap(25_000, costs) == pytest.approx(79_370, rel=1e-4)
    assert largest_free_swap(0.8e9, costs) == pytest.approx(2.54e9, rel=1e-3)
    assert largest_free_swap(25_000, PUBLISHED) == pytest.approx(14_045, rel=1e-3)
    assert largest_free_swap(20_000, PUBLISHED) == 0
    assert largest_free_swap(25_000, PUBLISHED, linear=False) == pytest.approx(79_700, rel=1e-3)
    # Capuchin's free time: with one bandwidth, back - evicted - 2 S / B >= 0.
    assert largest_free_swap(1000, bandwidths(12, 12)) == pytest.approx(1000 * 12 / 2)


def test_the_inequality_just_holds_and_just_does_not():
    rows = [event("alloc", 0, 0, 1000), event("write", 0, 1), event("read", 0, 2001), event("read", 0, 4000)]
    assert swappable(trace_of(events=rows), bandwidths(1, 1)).tolist() == [0]


def test_an_interval_covers_the_peak_or_does_not():
    rows = [event("alloc", 0, 0, 10), event("write", 0, 1), event("alloc", 1, 2, 99), event("free", 1, 3, 99),
            event("read", 0, 4), event("read", 0, 5)]  # fmt: skip
    assert covers_peak(trace_of(events=rows), np.array([0, 1])).tolist() == [True, False]


def test_without_accesses_there_is_nothing_to_tell():
    found = access(trace_of(events=[event("alloc", 0, 0, 10)]))
    assert found["num_intervals"] is None
    assert found["swappable"] == {"num_intervals": None, "bytes": None, "bytes_at_peak": None}
    assert found["percentiles"]["50"] is None
    assert found["outliers"] == []


def test_a_line_through_times_of_copies_is_found():
    sizes = np.array(SIZES, np.float64)
    cost = fitted(5000 + 0.25 * sizes)
    assert cost.start_ns == pytest.approx(5000)
    assert cost.gb_per_s == pytest.approx(4)
    assert fitted(np.maximum(0.25 * sizes - 500, 1)).start_ns >= 0


@pytest.mark.parametrize(
    "told",
    [None, {}, {"out": {}}, [], {"out": {"start_ns": 0, "ns_per_byte": 0}, "in": {"start_ns": 0, "ns_per_byte": 1}}],
)
def test_bandwidths_that_are_none(told):
    with pytest.raises(MemtraceError):
        from_dict(told)
    assert from_dict({"bandwidth": PUBLISHED.as_dict()}).out == PUBLISHED.out
    with pytest.raises(MemtraceError):
        bandwidths(0, 1)
