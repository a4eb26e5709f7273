"""Windows of a trace: at every row they agree with the whole trace."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import memtrace
from memtrace.analysis.attribution import step_rows
from memtrace.analysis.coverage import compute_coverage
from memtrace.analysis.steps import step_columns
from memtrace.analysis.windows import step_window
from memtrace.errors import TraceError
from memtrace.format.schema import SPAN_KINDS
from memtrace.trace import Trace
from tests.builders import event, trace_of
from tests.format.agreement import assert_agrees, end_of_part, random_starts
from tests.format.random_traces import RandomTrace, in_memory, on_disk


def has_phases(trace: Trace) -> bool:
    return bool((trace.columns("spans", "kind")["kind"] == SPAN_KINDS.index("phase")).any())


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=60, deadline=None)
@example(seed=1_073_741_825, steps=(2, 2))
@example(seed=23_843, steps=(2, 2))
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
        for field in fields(columns):
            if field.name not in ("peak_bytes", "live_end_bytes"):  # blocks older than the recording can be seen later
                expected_values = getattr(whole_columns, field.name)[first_step : last_step + 1]
                assert getattr(columns, field.name).tolist() == expected_values.tolist(), field.name


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), data=st.data())
def test_a_window_of_a_trace_in_memory_agrees_with_all_of_it(seed: int, data: st.DataObject) -> None:
    rows = RandomTrace(seed).rows
    num_events = len(rows["events"])
    assume(num_events > 1)
    first = data.draw(st.integers(0, num_events - 1))
    end = data.draw(st.integers(first, num_events))
    whole = in_memory(rows)
    assert_agrees(whole.window_of_rows(first, end), whole, first, end)


@settings(max_examples=30, deadline=None)
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


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    return on_disk(RandomTrace(5).rows, tmp_path / "x.memtrace", [0, 10, 20])


def test_steps_that_do_not_exist_are_an_error_that_says_which_do(trace: Trace) -> None:
    for steps in ((0, 4), (9, 9), (4, None)):
        with pytest.raises(TraceError, match=r"has no step \d\. It has steps 0 to 3"):
            trace.window(*steps)
        with pytest.raises(TraceError, match="has steps 0 to 3"):
            step_window(trace, *steps)
    with pytest.raises(ValueError, match="steps or times"):
        trace.window(1, 2, start_ns=5)


def test_coverage_says_which_window_it_is(trace: Trace) -> None:
    assert "This is a window of the trace: steps 1 to 2." in compute_coverage(trace.window(1, 2)).notes
    assert "This is a window of the trace: step 1." in compute_coverage(trace.window(1, 1)).notes
    assert "This is a window of the trace: 5 ns to the end." in compute_coverage(trace.window(start_ns=5)).notes


def test_an_open_end_is_the_end_of_the_trace(trace: Trace) -> None:
    events = trace.window(2, None).columns("events", "time_ns")["time_ns"]
    assert events[-1] == trace.columns("events", "time_ns")["time_ns"][-1]
    assert trace.window(None, 1).columns("events", "time_ns")["time_ns"][0] == trace.events["time_ns"][0]


def test_the_first_rows_of_a_window_are_live(trace: Trace) -> None:
    events = trace.window(2, 3).events
    head = events[: int(events.index[events.kind == "live"].max()) + 1]
    assert set(head.kind) <= {"segment_map", "baseline", "live"}
    ops = trace.window(2, 3).ops
    assert set(ops.op_id) <= set(events.op_id.dropna())


def test_several_ranks_are_cut_by_their_own_steps(tmp_path: Path) -> None:
    traces = [on_disk(RandomTrace(seed).rows, tmp_path / str(seed), [0, 10]) for seed in (6, 7)]
    job = Trace(None, {rank: trace._source for rank, trace in enumerate(traces)})
    window = job.window(1, 2)
    for rank, trace in enumerate(traces):
        assert step_rows(window.rank(rank)).start_ns.tolist() == step_rows(trace).start_ns[1:3].tolist()
    with pytest.raises(TraceError, match="rank 0: The trace has no step 7"):
        job.window(7, 7)


def test_detected_steps_keep_their_numbers_in_a_window() -> None:
    events = []
    for number in range(8):
        for kind, delay in (("alloc", 0), ("free", 10)):
            events += [
                event(kind, 6 * number + block, 20 * number + delay + block, 100 + 10 * block) for block in range(6)
            ]
    whole = trace_of(events=events)
    steps = step_rows(whole)
    assert len(steps.number) >= 4
    window = step_window(whole, 1, 2)
    assert step_rows(window).number.tolist() == [1, 2]
    first, end = int(steps.first_row[1]), int(steps.end_row[2])
    assert_agrees(window, whole, first, end)


def test_a_window_of_an_imported_file_agrees_with_the_file(tmp_path: Path) -> None:
    rows = RandomTrace(8).rows
    whole = in_memory(rows)
    window = memtrace.load(on_disk(rows, tmp_path / "x", [0, 7, 14]).path or "").window(0, 3)
    assert step_columns(window).num_allocs.tolist() == step_columns(whole).num_allocs.tolist()
