"""Windows of a trace: at every row they agree with the whole trace."""

from __future__ import annotations

from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak, level_at, live_after, requested_bytes, reserved_bytes
from memtrace.analysis.steps import step_columns
from memtrace.format.schema import EVENT_KINDS, SPAN_KINDS
from memtrace.trace import Trace
from tests.format.random_traces import RandomTrace, in_memory, on_disk

JUDGED = ("category", "phase", "module", "stack", "op_name", "name", "size", "allocated_size", "address", "alloc_ns")
LIVE = EVENT_KINDS.index("live")


def num_head_rows(window: Trace, num_rows: int) -> int:
    """Rows of a window's events before its first own event."""
    return window.num_rows("events") - num_rows


def ids_of(trace: Trace) -> np.ndarray[Any, Any]:
    return trace.block_ids if trace.block_ids is not None else np.arange(len(blocks(trace)))


def described(trace: Trace, row: int) -> dict[int, tuple[Any, ...]]:
    """What is known of every block that is live after a row, by the block's id."""
    columns, ids = blocks(trace), ids_of(trace)
    live = [block for code in range(len(trace.devices)) for block in live_after(columns, code, row).tolist()]
    return {int(ids[block]): tuple(int(getattr(columns, name)[block]) for name in JUDGED) for block in live}


def assert_agrees(window: Trace, whole: Trace, first: int, end: int) -> None:
    """Assert that a window of the rows from ``first`` up to ``end`` of the whole agrees with it at every row."""
    head = num_head_rows(window, end - first)
    assert head >= 0
    for row in range(first - 1, end):
        assert described(window, row - first + head) == described(whole, row)
    rows = np.arange(first, end)
    for device in window.devices:
        expected = level_at(requested_bytes(whole, device), rows)
        assert level_at(requested_bytes(window, device), rows - first + head).tolist() == expected.tolist()
        before = level_at(requested_bytes(whole, device), np.array([first - 1]))
        assert find_peak(window, device).requested.bytes == max([*before, *expected])
        reserved = reserved_bytes(whole, device)
        if reserved is not None and (window_reserved := reserved_bytes(window, device)) is not None:
            assert level_at(window_reserved, rows - first + head).tolist() == level_at(reserved, rows).tolist()


def random_starts(random: Random, num_events: int) -> list[int]:
    return [0, *sorted(random.sample(range(1, num_events), min(num_events - 1, random.randint(0, 6))))]


def end_of_part(starts: list[int], num_events: int, row: int) -> int:
    """The end of the part in which the first row outside a window lies."""
    return next((start for start in starts if start > row), num_events)


def has_phases(trace: Trace) -> bool:
    return bool((trace.columns("spans", "kind")["kind"] == SPAN_KINDS.index("phase")).any())


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), accesses=st.booleans(), data=st.data())
def test_a_window_agrees_with_the_whole_at_every_row(seed: int, accesses: bool, data: st.DataObject) -> None:
    rows = RandomTrace(seed, accesses=accesses).rows
    assume(len(rows["events"]) > 1)
    starts = random_starts(Random(seed), len(rows["events"]))
    times = np.array([row["time_ns"] for row in rows["events"]])
    start_ns = data.draw(st.integers(0, int(times.max())), "start_ns")
    end_ns = data.draw(st.integers(start_ns, int(times.max()) + 2), "end_ns")
    first, end = (int(np.argmax(times >= t)) if (times >= t).any() else len(times) for t in (start_ns, end_ns))
    known = in_memory(rows, end_of_part(starts, len(times), end))
    with TemporaryDirectory() as folder:
        window = on_disk(rows, Path(folder) / "x.memtrace", starts).window(start_ns=start_ns, end_ns=end_ns)
        assert window.surroundings is not None
        # Which phase is between spans is only known where there are spans.
        assume(has_phases(window.surroundings))
        assert_agrees(window, known, first, end)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.tuples(st.integers(0, 3), st.integers(0, 3)))
def test_a_window_of_steps_has_their_rows_and_numbers(seed: int, steps: tuple[int, int]) -> None:
    rows = RandomTrace(seed).rows
    assume(len(rows["events"]) > 1)
    starts = random_starts(Random(seed), len(rows["events"]))
    whole, (first_step, last_step) = in_memory(rows), (min(steps), max(steps))
    expected = step_rows(whole)
    first, end = int(expected.first_row[first_step]), int(expected.end_row[last_step])
    with TemporaryDirectory() as folder:
        trace = on_disk(rows, Path(folder) / "x.memtrace", starts)
        window = trace.window(first_step, last_step)
        assert step_rows(window).number.tolist() == list(range(first_step, last_step + 1))
        assert_agrees(window, in_memory(rows, end_of_part(starts, len(rows["events"]), end)), first, end)
        whole_columns, columns = step_columns(whole), step_columns(window)
        for name, values in columns.items():
            if name not in ("peak_bytes", "live_end_bytes"):  # blocks older than the recording can be seen later
                assert values.tolist() == whole_columns[name][first_step : last_step + 1].tolist(), name


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_a_window_of_a_trace_in_memory_agrees_with_all_of_it(seed: int, data: st.DataObject) -> None:
    rows = RandomTrace(seed).rows
    num_events = len(rows["events"])
    assume(num_events > 1)
    first = data.draw(st.integers(0, num_events - 1))
    end = data.draw(st.integers(first, num_events))
    whole = in_memory(rows)
    assert_agrees(whole.window_of_rows(first, end), whole, first, end)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_trace_in_parts_is_the_trace_in_memory(seed: int) -> None:
    rows = RandomTrace(seed).rows
    assume(len(rows["events"]) > 1)
    whole = in_memory(rows)
    with TemporaryDirectory() as folder:
        trace = on_disk(rows, Path(folder) / "x.memtrace", random_starts(Random(seed), len(rows["events"])))
        assert trace.num_rows("events") == len(rows["events"])
        assert_agrees(trace, whole, 0, len(rows["events"]))
        for table in ("ops", "spans", "labels"):
            key = {"ops": "op_id", "spans": "start_ns", "labels": "block_id"}[table]
            assert sorted(trace.columns(table, key)[key]) == sorted(whole.columns(table, key)[key])
