"""Peaks without idle intervals: compared with a brute-force replay of random traces."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis.counterfactual import END_OF_TRACE, IdleIntervals, merge_intervals, peak_without_intervals
from memtrace.analysis.findings import predict_peak_with_fixes
from memtrace.analysis.peak import find_peak
from tests.analysis.short_traces import Act, find_waste, trace_of_acts
from tests.builders import event, trace_of

LIFETIMES = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12), st.integers(1, 50)), min_size=1, max_size=8)
"""Blocks as (time of allocation, duration, bytes)."""
INTERVALS = st.lists(st.tuples(st.integers(0, 7), st.integers(-1, 40), st.integers(0, 30)), max_size=8)
"""Intervals as (block, first row, length)."""


def idle_intervals(rows: list[tuple[int, int, int]]) -> IdleIntervals:
    """Return intervals given as (block, begin, end)."""
    return IdleIntervals(*(np.array([row[column] for row in rows], np.int64) for column in range(3)))


@settings(deadline=None)
@given(LIFETIMES, INTERVALS)
def test_peak_without_intervals_equals_a_replay(
    lifetimes: list[tuple[int, int, int]], cuts: list[tuple[int, int, int]]
) -> None:
    moments = sorted(
        (time, kind, block)
        for block, (start, duration, _) in enumerate(lifetimes)
        for kind, time in (("alloc", start), ("free", start + duration))
    )
    events: list[dict[str, Any]] = [event(kind, block, time, lifetimes[block][2]) for time, kind, block in moments]
    row_of = {(kind, block): row for row, (_, kind, block) in enumerate(moments)}
    rows = [
        (block, max(begin, row_of["alloc", block]), min(begin + length, row_of["free", block]))
        for block, begin, length in cuts
        if block < len(lifetimes)
    ]
    # Outside the lifetime of its block, an interval removes nothing.
    rows = [(block, begin, end) for block, begin, end in rows if begin <= end]

    def live_bytes(num_events: int) -> int:
        """Return the bytes of the blocks that are live, and not removed, after the first events."""
        total = 0
        for block, (_, _, size) in enumerate(lifetimes):
            is_live = row_of["alloc", block] < num_events <= row_of["free", block]
            is_removed = any(b == block and begin <= num_events - 1 and num_events <= end for b, begin, end in rows)
            total += size * (is_live and not is_removed)
        return total

    expected = max(live_bytes(num_events) for num_events in range(len(moments) + 1))
    assert peak_without_intervals(trace_of(events=events), "cpu", idle_intervals(rows)) == expected


@settings(deadline=None)
@given(INTERVALS)
def test_merged_intervals_cover_the_same_rows_without_overlaps(cuts: list[tuple[int, int, int]]) -> None:
    rows = [(block, begin, begin + length) for block, begin, length in cuts]
    merged = merge_intervals(idle_intervals(rows))
    merged_rows = list(zip(merged.block.tolist(), merged.begin.tolist(), merged.end.tolist(), strict=True))

    def covered(intervals: list[tuple[int, int, int]]) -> set[tuple[int, int]]:
        return {(block, row) for block, begin, end in intervals for row in range(begin, end + 1)}

    assert covered(merged_rows) == covered(rows)
    assert sum(end - begin + 1 for _, begin, end in merged_rows) == len(covered(merged_rows))


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["alloc", "read", "write", "free"]), st.integers(0, 6), st.integers(0, 9)), max_size=40
)
"""Events as (kind, block, operator call)."""


@settings(deadline=None)
@given(ACTIONS)
def test_lower_bound_is_below_the_peak_and_below_the_peak_after_any_fix(actions: list[tuple[str, int, int]]) -> None:
    state: dict[int, str] = {}
    acts: list[Act] = []
    for kind, block, call in actions:
        # A block is allocated once, and is not touched before that or after its free.
        if state.get(block) == (None if kind == "alloc" else "live"):
            acts.append((kind, block, call if kind != "free" else -1))
            state[block] = "freed" if kind == "free" else "live"
    waste = find_waste(trace := trace_of_acts([("baseline", 8, -1), *acts, ("read", 8, 9)]))
    assert waste.lower_bound_bytes is not None and waste.peak_if_all_fixed_bytes is not None
    assert waste.lower_bound_bytes <= waste.peak_if_all_fixed_bytes <= waste.peak_bytes
    assert all(waste.lower_bound_bytes <= finding.peak_if_fixed_bytes for finding in waste.findings)
    assert waste.lower_bound_bytes <= predict_peak_with_fixes(trace, waste, waste.findings)


def test_lower_bound_does_not_count_scratch_memory_that_is_freed_within_the_operator() -> None:
    acts: list[Act] = [("baseline", 0, -1), ("read", 0, 1), ("alloc", 1, 1), ("free", 1, 1), ("alloc", 3, 1)]
    waste = find_waste(trace_of_acts([*acts, ("write", 3, 1)]))
    assert waste.lower_bound_bytes == waste.peak_bytes == 2003


def test_interval_without_an_end_lasts_to_the_end_of_the_trace() -> None:
    trace = trace_of_acts([("alloc", 0, 0), ("alloc", 1, 1), ("alloc", 3, 2)])
    assert find_peak(trace, "cpu").requested.bytes == 3004
    assert peak_without_intervals(trace, "cpu", idle_intervals([(0, 1, END_OF_TRACE)])) == 2004
