"""Allocated and reserved bytes over time: from block sizes and segment events, from totals only where these suffice."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis.peak import find_peak, reserved_bytes
from memtrace.analysis.timeline import compute_timeline
from memtrace.format.manifest import TraceSource
from memtrace.trace import Trace
from tests.builders import event, trace_of, with_manifest

CUDA = "cuda:0"
Rows = list[dict[str, Any]]


def block_event(kind: str, block: int, time: int, allocated: int | None = 512) -> dict[str, Any]:
    return event(kind, block, time, 100, device=CUDA, allocated_size=allocated)


def segment_event(kind: str, time: int, size: int) -> dict[str, Any]:
    return event(kind, None, time, size, device=CUDA, allocated_size=None, address=1 << 30)


def total(name: str, time: int, value: int) -> dict[str, Any]:
    return {"time_ns": time, "device": CUDA, "name": name, "value": value}


def imported(trace: Trace) -> Trace:
    return with_manifest(trace, source=TraceSource("chrome_trace"))


@st.composite
def deferred_frees(draw: st.DrawFn) -> Rows:
    """Return allocations, frees, and frees that wait for a stream; some blocks are older than the recording."""
    rows: Rows = []
    live: list[int] = []
    waiting: list[int] = []
    sizes: list[int] = []
    for time in range(draw(st.integers(1, 30))):
        action = draw(st.sampled_from(["alloc", "alloc", "baseline", "free_requested", "free", "complete"]))
        if action in ("alloc", "baseline"):
            sizes.append(512 * draw(st.integers(1, 9)))
            rows.append(block_event(action, len(sizes) - 1, time, sizes[-1]))
            live.append(len(sizes) - 1)
        elif action == "complete" and waiting:
            number = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
            rows.append(block_event("free", number, time, sizes[number]))
        elif action in ("free", "free_requested") and live:
            number = live.pop(draw(st.integers(0, len(live) - 1)))
            rows.append(block_event("free_requested", number, time, sizes[number]))
            if action == "free_requested":
                waiting.append(number)
            else:
                rows.append(block_event("free", number, time, sizes[number]))
    return rows


@settings(max_examples=200, deadline=None)
@given(deferred_frees())
def test_a_block_counts_as_allocated_until_the_program_frees_it(rows: Rows) -> None:
    if not any(row["kind"] in ("alloc", "baseline") for row in rows):
        return
    now = sum(row["allocated_size"] for row in rows if row["kind"] == "baseline")
    expected, counted = [now], {row["block_id"] for row in rows if row["kind"] == "baseline"}
    for row in rows:
        if row["kind"] == "alloc":
            now += row["allocated_size"]
            counted.add(row["block_id"])
        elif row["kind"] in ("free_requested", "free") and row["block_id"] in counted:
            now -= row["allocated_size"]
            counted.remove(row["block_id"])
        expected.append(now)
    trace = trace_of(events=rows)
    allocated = find_peak(trace, CUDA).allocated
    assert allocated is not None and allocated.bytes == max(expected)
    for instant in compute_timeline(trace, CUDA).itertuples():
        assert instant.allocated == expected[instant.event + 1]


def test_the_peak_is_not_the_highest_total_at_the_end_of_a_step() -> None:
    rows = [block_event("alloc", 0, 1), block_event("free", 0, 2)]
    trace = trace_of(events=rows, counters=[total("allocated", time, 0) for time in (0, 3)])
    allocated = find_peak(trace, CUDA).allocated
    assert allocated is not None and allocated.bytes == 512


def test_a_recording_with_blocks_of_unknown_size_has_no_allocated_peak() -> None:
    rows = [block_event("alloc", 0, 1), block_event("alloc", 1, 2, None)]
    trace = trace_of(events=rows, counters=[total("allocated", 3, 1024), total("reserved", 3, 2048)])
    peak = find_peak(trace, CUDA)
    assert peak.allocated is None and peak.reserved is None
    timeline = compute_timeline(trace, CUDA)
    assert timeline["allocated"].isna().all() and timeline["reserved"].isna().all()


def test_a_file_with_a_total_for_every_change_needs_no_sizes() -> None:
    rows = [block_event("alloc", 0, 1, None), block_event("free", 0, 2, None)]
    counters = [total("allocated", 1, 700), total("allocated", 2, 0), total("reserved", 1, 2048)]
    peak = find_peak(imported(trace_of(events=rows, counters=counters)), CUDA)
    assert peak.allocated is not None and peak.allocated.bytes == 700
    assert peak.reserved is not None and peak.reserved.bytes == 2048


@pytest.mark.parametrize("reading", [0, 3, 9])
def test_segments_older_than_a_recording_that_was_cut_off_are_counted_by_its_totals(reading: int) -> None:
    """Without the segments at the end, a reading of the total tells what was reserved at the start."""
    rows = [
        block_event("alloc", 0, 1),
        segment_event("segment_alloc", 2, 2 << 20),
        segment_event("segment_free", 5, 20 << 20),
        segment_event("segment_alloc", 6, 40 << 20),
    ]
    level = {0: 30 << 20, 3: 32 << 20, 9: 52 << 20}[reading]
    trace = trace_of(events=rows, counters=[total("reserved", reading, level)])
    peak = find_peak(trace, CUDA)
    assert peak.reserved is not None and peak.reserved.bytes == 52 << 20
    assert peak.reserved_end_bytes == 52 << 20
    reserved = reserved_bytes(trace, CUDA)
    assert reserved is not None and reserved.start == 30 << 20


def test_without_readings_a_recording_starts_with_nothing_reserved() -> None:
    trace = trace_of(events=[segment_event("segment_alloc", 1, 2 << 20), block_event("alloc", 0, 1)])
    assert pd.Series(compute_timeline(trace, CUDA)["reserved"]).tolist() == [2 << 20]
