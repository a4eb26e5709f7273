"""Access intervals against brute force, and swap candidates against the arithmetic of the papers."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memtrace.cli.output import json_value

from memtrace.analysis import access_intervals, access_intervals_table, analyze_access
from memtrace.analysis.bandwidth import (
    COPY_SIZES,
    TITAN_XP,
    bandwidths_from_json,
    bandwidths_from_rates,
    fit_copy_cost,
)
from memtrace.analysis.blocks import blocks
from memtrace.analysis.intervals import spans_peak
from memtrace.analysis.swap import (
    SwapTotals,
    max_swappable_bytes,
    sample_intervals,
    swap_totals,
    swappable_intervals,
    swappable_peak_bytes,
)
from memtrace.analysis.thresholds import MIN_SWAP_BYTES
from memtrace.errors import MemtraceError
from tests.builders import event, op, trace_of

Rows = list[dict[str, Any]]


@st.composite
def accessed_blocks(draw: st.DrawFn) -> Rows:
    """Rows of events: blocks, and reads and writes by operators, some of which access a block twice."""
    num_blocks = draw(st.integers(1, 5))
    rows = [event("alloc", number, number, draw(st.integers(1, 10**6))) for number in range(num_blocks)]
    now, call = num_blocks, 0
    for _ in range(draw(st.integers(0, 40))):
        now += draw(st.integers(0, 10**6))
        call += draw(st.integers(0, 1))
        kind = draw(st.sampled_from(["read", "write"]))
        rows.append(event(kind, draw(st.integers(0, num_blocks - 1)), now, op_id=draw(st.sampled_from([None, call]))))
    return rows


@settings(max_examples=200, deadline=None)
@given(accessed_blocks())
def test_intervals_and_swappable_ones_equal_brute_force(rows: Rows) -> None:
    trace = trace_of(events=rows, ops=[op(number, "forward") for number in range(50)])
    expected = []
    for block in range(max(row["block_id"] for row in rows) + 1):
        accesses = [row for row in rows if row["block_id"] == block and row["kind"] in ("read", "write")]
        for first, second in pairwise(accesses):
            if first["op_id"] is None or first["op_id"] != second["op_id"]:
                expected.append((block, second["time_ns"] - first["time_ns"]))
    intervals = access_intervals(trace)
    assert list(zip(intervals.block.tolist(), intervals.duration_ns.tolist(), strict=True)) == expected
    size = blocks(trace).size
    swappable = {
        row for row, (block, ns) in enumerate(expected) if size[block] * (0.1563 + 0.1574) + 8242 + 12352 <= ns
    }
    assert set(swappable_intervals(trace, TITAN_XP, min_bytes=0).tolist()) == swappable
    assert (analyze_access(trace).num_intervals or 0) == len(expected) == len(access_intervals_table(trace))


def test_the_largest_swappable_block_is_that_of_the_papers() -> None:
    costs = bandwidths_from_rates(6.4, 6.3)
    assert max_swappable_bytes(25_000, costs) == pytest.approx(79_370, rel=1e-4)
    assert max_swappable_bytes(0.8e9, costs) == pytest.approx(2.54e9, rel=1e-3)
    assert max_swappable_bytes(25_000, TITAN_XP) == pytest.approx(14_045, rel=1e-3)
    assert max_swappable_bytes(20_000, TITAN_XP) == 0
    assert max_swappable_bytes(25_000, TITAN_XP, with_latency=False) == pytest.approx(79_700, rel=1e-3)
    # Capuchin's free time: with one bandwidth, back - evicted - 2 S / B >= 0.
    assert max_swappable_bytes(1000, bandwidths_from_rates(12, 12)) == pytest.approx(1000 * 12 / 2)


def test_an_interval_of_exactly_the_copy_time_is_swappable() -> None:
    rows = [event("alloc", 0, 0, 1000), event("write", 0, 1), event("read", 0, 2001), event("read", 0, 4000)]
    assert swappable_intervals(trace_of(events=rows), bandwidths_from_rates(1, 1), min_bytes=0).tolist() == [0]


def test_the_command_the_summary_and_the_page_agree_on_the_smallest_block_to_swap() -> None:
    sizes = (MIN_SWAP_BYTES - 1, MIN_SWAP_BYTES)
    rows = [event("alloc", block, block, size) for block, size in enumerate(sizes)]
    rows += [event("read", block, 10**12 + block) for block in (0, 1)]
    rows.append(event("alloc", 2, 3 * 10**12 // 2, 1))  # the peak is between the accesses
    rows += [event("read", block, 2 * 10**12 + block) for block in (0, 1)]
    trace = trace_of(events=rows)
    sample = sample_intervals(trace, "cpu", TITAN_XP, 20)
    assert sample is not None and sample.swappable == swap_totals(trace, TITAN_XP)
    result = analyze_access(trace)
    assert result.swappable.bytes == swap_totals(trace, TITAN_XP).bytes == MIN_SWAP_BYTES
    assert [candidate.bytes for candidate in result.candidates] == [MIN_SWAP_BYTES]
    assert swappable_peak_bytes(trace) == result.swappable.bytes_at_peak == MIN_SWAP_BYTES


def test_an_interval_spans_the_peak_if_the_peak_is_between_its_accesses() -> None:
    rows = [event("alloc", 0, 0, 10), event("write", 0, 1), event("alloc", 1, 2, 99), event("free", 1, 3, 99),
            event("read", 0, 4), event("read", 0, 5)]  # fmt: skip
    assert spans_peak(trace_of(events=rows), np.array([0, 1])).tolist() == [True, False]


def test_without_recorded_accesses_all_results_are_unknown() -> None:
    result = analyze_access(trace_of(events=[event("alloc", 0, 0, 10)]))
    assert result.num_intervals is None
    assert result.swappable == SwapTotals(None, None, None)
    assert result.percentiles_ns["50"] is None
    assert result.candidates == ()


def test_a_sample_of_intervals_holds_the_longest_of_the_largest_blocks() -> None:
    rows = [event("alloc", 0, 0, 10**6), event("alloc", 1, 0, 10)]
    rows += [event("read", block, 10**6 * (number + 1) + block) for number in range(50) for block in (0, 1)]
    trace = trace_of(events=rows)
    sample = sample_intervals(trace, "cpu", bandwidths_from_rates(10, 10), 20, min_bytes=0)
    assert sample is not None
    block = access_intervals(trace).block[sample.rows]
    assert sample.num_intervals == 98 and 15 <= len(block) <= 21
    assert (block[:10] == 0).all()
    assert sample.is_swappable.all() and sample.swappable.bytes == 10**6 + 10


def test_latency_and_bandwidth_are_fitted_to_times_of_copies() -> None:
    sizes = np.array(COPY_SIZES, np.float64)
    cost = fit_copy_cost(5000 + 0.25 * sizes)
    assert cost.latency_ns == pytest.approx(5000)
    assert cost.gb_per_s == pytest.approx(4)
    assert fit_copy_cost(np.maximum(0.25 * sizes - 500, 1)).latency_ns >= 0


@pytest.mark.parametrize(
    "document",
    [
        None,
        {},
        {"d2h": {}},
        [],
        {"d2h": {"latency_ns": 0, "ns_per_byte": 0}, "h2d": {"latency_ns": 0, "ns_per_byte": 1}},
        {"d2h": {"latency_ns": 0, "ns_per_byte": float("nan")}, "h2d": {"latency_ns": 0, "ns_per_byte": 1}},
    ],
)
def test_documents_without_usable_bandwidths_are_errors(document: Any) -> None:
    with pytest.raises(MemtraceError):
        bandwidths_from_json(document)


def test_bandwidths_are_read_back_from_json() -> None:
    assert bandwidths_from_json({"bandwidth": json_value(TITAN_XP)}) == TITAN_XP
    assert bandwidths_from_json(json_value(TITAN_XP)) == TITAN_XP


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_bandwidths_must_be_positive(rate: float) -> None:
    with pytest.raises(MemtraceError, match="pass a positive number"):
        bandwidths_from_rates(rate, 1)
