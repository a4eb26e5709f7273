"""Recordings inside recordings: each has a trace of its own, which agrees with that of the outer one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memtrace.cli.record import command

import memtrace
from memtrace.analysis import find_peak
from memtrace.analysis.blocks import blocks
from memtrace.format.part_writer import PartWriter
from memtrace.recording.options import ObserverKind
from memtrace.recording.session import Recording
from memtrace.trace import Trace
from tests.programs.tasks import cnn, make_step, mlp
from tests.recording.helpers import MIB, NUM_FAULT_POINTS, part_written, wait_until
from tests.recording.test_forks import exit_code, in_child, leave, record_elsewhere
from tests.recording.test_interrupts import Interrupt, InterruptAtLine, descriptors_in, hooks, num_threads

OBSERVERS = pytest.mark.parametrize("observer", ["native", "dispatch"])


def body_of(inner: Trace) -> pd.DataFrame:
    """The events of a trace without the live set at its start."""
    return inner.events.iloc[inner.num_rows("live") :].reset_index(drop=True)


def first_row_in(outer: Trace, inner: Trace) -> int:
    """The row of the outer trace with the first event of the inner one."""
    body = body_of(inner)
    keys = ["time_ns", "kind", "block_id"]
    same = (outer.events[keys].astype(str) == body.iloc[0][keys].astype(str)).all(axis=1)
    assert same.any()
    return int(np.flatnonzero(same)[0])


def assert_is_window(inner: Trace, outer: Trace) -> int:
    """Check an inner trace against the outer one, row by row; return the bytes that are live at its start."""
    body = body_of(inner)
    first = first_row_in(outer, inner)
    same = outer.events.iloc[first : first + len(body)].reset_index(drop=True)
    pd.testing.assert_frame_equal(body.astype(str), same.astype(str))
    before = outer.events.iloc[:first]
    live: dict[int, int] = {}
    for kind, block, size in zip(before.kind, before.block_id, before["size"], strict=True):
        if kind in ("alloc", "baseline"):
            live[block] = size
        elif kind == "free":
            del live[block]
    start = inner.events.iloc[: inner.num_rows("live")]
    assert dict(zip(start.block_id, start["size"], strict=True)) == live
    assert_same_blocks(inner, outer)
    return sum(live.values())


def assert_same_blocks(inner: Trace, outer: Trace) -> None:
    """Check that both traces name the same category, stack and operator for every block of the inner one."""

    def places(trace: Trace, ids: np.ndarray[Any, Any]) -> list[int]:
        return (ids if trace.block_ids is None else np.searchsorted(trace.block_ids, ids)).tolist()

    ours, theirs = blocks(inner), blocks(outer)
    ids = inner.events.block_id.dropna().unique().to_numpy(np.int64)
    for block, same in zip(places(inner, ids), places(outer, ids), strict=True):
        assert ours.size[block] == theirs.size[same]
        assert inner.frames(int(ours.stack[block])) == outer.frames(int(theirs.stack[same]))
        assert inner.name(int(ours.name[block])) == outer.name(int(theirs.name[same]))


def operators_of(trace: Trace) -> list[tuple[Any, ...]]:
    """What the operator calls of the events of a trace are, without their times."""
    body, ops = body_of(trace), trace.ops.set_index("op_id")

    def text(name: Any) -> str | None:
        return None if pd.isna(name) else trace.name(int(name))

    calls = ops.loc[body.op_id.dropna().drop_duplicates()]
    stacks = [trace.frames(-1 if pd.isna(stack) else int(stack))[:1] for stack in calls["stack"]]
    return list(zip(calls.name.map(text), calls.module.map(text), calls.phase, stacks, strict=True))


def phases_of(trace: Trace) -> list[tuple[str | None, int]]:
    """The phases of a trace by name and thread, in their order."""
    phases = trace.spans[trace.spans.kind == "phase"]
    return [(trace.name(int(name)), int(thread)) for name, thread in zip(phases.name, phases.thread, strict=True)]


def num_steps(trace: Trace) -> int:
    steps = trace.spans[trace.spans.kind == "step"]
    assert steps["index"].tolist() == list(range(len(steps)))
    return len(steps)


@OBSERVERS
@pytest.mark.parametrize("task", [mlp, cnn])
def test_the_inner_trace_is_that_of_a_recording_of_its_own(
    task: Callable[[], Any], observer: ObserverKind, tmp_path: Path
) -> None:
    def program(path: Path) -> Trace:
        torch.manual_seed(0)
        step, inference = make_step(task()), torch.nn.Linear(4, 4)
        for _ in range(2):
            step()
        inference(torch.randn(8, 4))
        with memtrace.record(path, observer=observer) as recording:
            assert recording.is_recording
            for _ in range(2):
                step()
            for _ in range(2):
                inference(torch.randn(8, 4))
        assert not recording.is_recording
        step()
        return memtrace.load(recording.path)

    alone = program(tmp_path / "alone.memtrace")
    with memtrace.record(tmp_path / "outer.memtrace", observer=observer):
        inner = program(tmp_path / "inner.memtrace")
    outer = memtrace.load(tmp_path / "outer.memtrace")

    ours, theirs = body_of(inner), body_of(alone)
    theirs = theirs[theirs.kind != "baseline"].reset_index(drop=True)
    columns = ["kind", "device", "size", "allocated_size", "thread"]
    pd.testing.assert_frame_equal(ours[columns].astype(str), theirs[columns].astype(str))
    assert operators_of(inner) == operators_of(alone)
    assert phases_of(inner) == phases_of(alone)
    live_bytes = assert_is_window(inner, outer)
    assert live_bytes == alone.events[alone.events.kind == "baseline"]["size"].sum()
    assert find_peak(inner, "cpu").requested.bytes == find_peak(alone, "cpu").requested.bytes
    assert (num_steps(inner), num_steps(outer)) == (2, 5)
    assert inner.manifest.finished
    ranges = outer.spans[outer.spans.kind == "range"].name.dropna().map(lambda name: outer.name(int(name)))
    assert (ranges == str(tmp_path / "inner.memtrace")).sum() == 1


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    actions=st.lists(
        st.sampled_from(["allocate", "free", "use", "flush", "enter", "leave", "leave first"]), max_size=40
    )
)
def test_any_inner_recording_is_a_window_of_the_outer_one(
    actions: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("nested")
    tensors, entered, left = [torch.ones(64)], [], []
    with memtrace.record(folder / "outer.memtrace", stack_min_bytes=0, flush_seconds=0.001) as outer:
        for number, action in enumerate(actions):
            if action == "allocate":
                tensors.append(torch.ones(8 * (1 + number)))
            elif action == "free" and len(tensors) > 1:
                del tensors[number % len(tensors)]
            elif action == "use":
                tensors[number % len(tensors)].add_(1)
            elif action == "flush":
                outer._recorder.writer._observer.wake()  # type: ignore[union-attr]
            elif action == "enter":
                entered.append(memtrace.record(folder / f"{number}.memtrace").__enter__())
            elif action.startswith("leave") and entered:
                left.append(entered.pop(0 if action == "leave first" else -1))
                left[-1].__exit__(None, None, None)
        while entered:
            left.append(entered.pop())
            left[-1].__exit__(None, None, None)
    whole = memtrace.load(outer.path)
    for recording in left:
        inner = memtrace.load(recording.path)
        assert inner.manifest.finished
        if len(body_of(inner)):
            assert_is_window(inner, whole)
        else:
            assert inner.num_rows("live") > 0


def test_steps_belong_to_the_recording_that_marks_them(tmp_path: Path) -> None:
    step = make_step(mlp())
    with memtrace.record(tmp_path / "outer.memtrace") as outer:
        step()
        with memtrace.record(tmp_path / "marked.memtrace") as marked:
            step()
            marked.step()
            step()
            step()
            marked.step()
        with memtrace.record(tmp_path / "loaded.memtrace") as loaded:
            for _ in loaded.steps(range(4)):
                step()
        with memtrace.record(tmp_path / "detected.memtrace") as detected:
            step()
    traces = [memtrace.load(recording.path) for recording in (outer, marked, loaded, detected)]
    assert [num_steps(trace) for trace in traces] == [9, 2, 4, 1]
    assert (traces[2].spans.kind == "data_wait").sum() == 4


def test_the_number_of_steps_of_an_inner_recording_is_its_own(tmp_path: Path) -> None:
    step = make_step(mlp())
    with memtrace.record(tmp_path / "outer.memtrace") as outer:
        with memtrace.record(tmp_path / "few.memtrace", max_steps=2) as few:
            for _ in range(4):
                step()
            assert (outer.is_recording, few.is_recording) == (True, False)
        with memtrace.record(tmp_path / "last.memtrace", last_steps=2, flush_seconds=0.001) as last:
            for _ in range(12):
                newest = sorted(last.path.glob("rank=0/events-*.parquet"))
                step()
                wait_until(lambda: sorted(last.path.glob("rank=0/events-*.parquet")) != newest)  # noqa: B023
    assert memtrace.load(few.path).manifest.stop_reason == "max_steps reached"
    assert num_steps(memtrace.load(few.path)) == 2
    assert num_steps(memtrace.load(outer.path)) == 16
    ring = memtrace.load(last.path)
    assert ring.manifest.coverage.dropped_events
    assert len(ring.events) < len(memtrace.load(outer.path).events) / 2


def num_recorded(trace: Trace) -> int:
    """The number of events except for blocks that are older, among them those of other tests."""
    return int((trace.events["kind"] != "baseline").sum())


def test_many_inner_recordings_cost_what_they_record(tmp_path: Path) -> None:
    step = make_step(mlp())
    with memtrace.record(tmp_path / "outer.memtrace") as outer:
        for number in range(20):
            with memtrace.record(tmp_path / f"{number}.memtrace") as inner:
                step()
            assert inner.path.name == f"{number}.memtrace"
    whole = memtrace.load(outer.path)
    rows = [num_recorded(memtrace.load(tmp_path / f"{number}.memtrace")) for number in range(1, 20)]
    assert max(rows) <= min(rows) + 8
    assert sum(rows) < 1.5 * num_recorded(whole)
    assert num_steps(whole) == 20


def test_what_the_outer_recording_does_not_observe_is_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with memtrace.record(tmp_path / "outer.memtrace", stacks=False, accesses=False, stack_min_bytes=4096):
        with memtrace.record(tmp_path / "inner.memtrace", device_time=True) as inner:
            make_step(mlp())()
        with memtrace.record(tmp_path / "less.memtrace", stacks=False, accesses=False) as less:
            make_step(mlp())()
    trace = memtrace.load(inner.path)
    notes = [note for note in trace.manifest.coverage.notes if "not recorded, because" in note]
    assert [note.partition(":")[0] for note in notes] == ["reads and writes, call stacks, device times"]
    assert caplog.text.count("not recorded, because") == 1
    assert trace.manifest.options is not None
    assert not trace.manifest.options.stacks
    assert trace.manifest.coverage.has_accesses is False
    assert not [note for note in memtrace.load(less.path).manifest.coverage.notes if "not recorded" in note]


def test_an_inner_recording_that_cannot_be_written_leaves_the_outer_one_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = make_step(mlp())
    (tmp_path / "file").write_text("mine")
    with memtrace.record(tmp_path / "outer.memtrace") as outer:
        with memtrace.record(tmp_path / "file" / "inner.memtrace") as inner:
            assert (outer.is_recording, inner.is_recording) == (True, False)
            step()
            inner.step()
        step()
    assert caplog.text.count("training continues") == 1
    assert num_steps(memtrace.load(outer.path)) == 2
    assert memtrace.load(outer.path).manifest.finished


def test_a_disk_that_is_full_for_the_inner_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, append = make_step(mlp()), PartWriter.append

    def append_to_full_disk(self: PartWriter, *args: Any) -> None:
        if self._folder.parent.name.startswith("inner"):
            raise OSError(28, "No space left on device")
        append(self, *args)

    with memtrace.record(tmp_path / "outer.memtrace", flush_seconds=0.01) as outer:
        with memtrace.record(tmp_path / "inner.memtrace", flush_seconds=0.01) as inner:
            step()
            monkeypatch.setattr(PartWriter, "append", append_to_full_disk)
            wait_until(lambda: not inner.is_recording)
            step()
        assert outer.is_recording
        step()
    assert caplog.text.count("No space left on device") == 1
    assert not memtrace.load(inner.path).manifest.finished
    assert num_steps(memtrace.load(outer.path)) == 3
    assert memtrace.load(outer.path).manifest.finished


def test_the_outer_recording_fails_and_both_traces_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, append = make_step(mlp()), PartWriter.append

    def append_to_full_disk(self: PartWriter, *args: Any) -> None:
        if self._folder.parent.name.startswith("outer"):
            raise OSError(28, "No space left on device")
        append(self, *args)

    with memtrace.record(tmp_path / "outer.memtrace", flush_seconds=0.01):
        with memtrace.record(tmp_path / "inner.memtrace", flush_seconds=0.01) as inner:
            with part_written(inner):
                step()
            monkeypatch.setattr(PartWriter, "append", append_to_full_disk)
            wait_until(lambda: not inner.is_recording)
            step()
        with memtrace.record(tmp_path / "next.memtrace") as following:  # takes the place of the one that failed
            assert following.is_recording
            step()
    assert caplog.text.count("No space left on device") == 1
    trace = memtrace.load(inner.path)
    assert "No space left on device" in str(trace.manifest.stop_reason)
    assert not trace.manifest.finished
    assert trace.num_rows("live") > 0
    assert num_steps(memtrace.load(following.path)) == 1


@OBSERVERS
def test_the_outer_recording_may_end_first(
    observer: ObserverKind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step = make_step(mlp())
    outer, inner = (memtrace.record(tmp_path / f"{name}.memtrace", observer=observer) for name in ("outer", "inner"))
    outer.__enter__()
    step()
    inner.__enter__()
    step()
    outer.__exit__(None, None, None)
    assert not inner.is_recording
    with memtrace.record(tmp_path / "next.memtrace", observer=observer) as following:
        step()
        inner.__exit__(None, None, None)
        assert following.is_recording
        step()
    assert caplog.text.count("has ended, and so ends this one") == 1
    trace = memtrace.load(inner.path)
    assert trace.manifest.stop_reason == "the recording that contains it ended first"
    assert trace.manifest.finished
    assert_is_window(trace, memtrace.load(outer.path))
    assert [num_steps(memtrace.load(recording.path)) for recording in (outer, inner, following)] == [2, 1, 2]


def test_two_threads_record_at_once(tmp_path: Path) -> None:
    barrier, recordings = threading.Barrier(2), dict[str, Recording]()

    def work(name: str) -> None:
        step = make_step(mlp())
        barrier.wait()
        with memtrace.record(tmp_path / f"{name}.memtrace", flush_seconds=0.01) as recordings[name]:
            assert recordings[name].is_recording
            for _ in range(3):
                step()
            barrier.wait()
        barrier.wait()

    threads = [threading.Thread(target=work, args=(name,)) for name in ("one", "other")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    one, other = (memtrace.load(recording.path) for recording in recordings.values())
    assert one.manifest.finished and other.manifest.finished
    outer, inner = (other, one) if one.num_rows("live") else (one, other)
    assert_is_window(inner, outer)
    assert "recorded inside" in inner.manifest.coverage.notes[0]


def test_the_same_path_twice_keeps_both_traces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    step = make_step(mlp())
    with memtrace.record(tmp_path / "run.memtrace") as outer:
        with memtrace.record(tmp_path / "run.memtrace") as inner:
            step()
        with memtrace.record(tmp_path / "inner.memtrace"):
            step()
        with memtrace.record(tmp_path / "inner.memtrace"):
            step()
    assert (outer.path.name, inner.path.name) == ("run.memtrace", "run-2.memtrace")
    assert "another recording is writing to" in capsys.readouterr().err
    names = ["run", "run-2", "inner", "inner-old1"]
    assert [num_steps(memtrace.load(tmp_path / f"{name}.memtrace")) for name in names] == [3, 1, 1, 1]


@OBSERVERS
def test_an_exception_at_any_line_of_an_inner_recording_leaves_the_outer_one_whole(
    observer: ObserverKind, tmp_path: Path
) -> None:
    step = make_step(mlp())

    def record_inner(name: str, line: int) -> int:
        tracer, previous = InterruptAtLine(line), sys.gettrace()
        recording = memtrace.record(tmp_path / f"{name}.memtrace", observer=observer)
        try:
            sys.settrace(tracer.trace)
            with recording:
                step()
        except Interrupt:
            pass
        finally:
            sys.settrace(previous)
        return tracer.num_lines

    before, previous = hooks(), sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with memtrace.record(tmp_path / "outer.memtrace", observer=observer) as outer:
            num_lines = max(record_inner("first", 0), record_inner("second", 0))
            inside, threads = hooks(), num_threads()
            for point in range(NUM_FAULT_POINTS):
                record_inner("interrupted", 1 + point * num_lines // NUM_FAULT_POINTS)
                assert hooks() == inside
                assert outer.is_recording
                assert not any("inner" in path for path in descriptors_in(tmp_path))
                wait_until(lambda: num_threads() <= threads)
            with memtrace.record(tmp_path / "next.memtrace", observer=observer) as following:
                assert following.path.name == "next.memtrace"
                step()
            assert outer._recorder.nested == []  # type: ignore[union-attr]
    finally:
        sys.unraisablehook = previous
    assert hooks() == before
    assert descriptors_in(tmp_path) == []
    assert_is_window(memtrace.load(following.path), memtrace.load(outer.path))


@pytest.mark.parametrize("action", [leave, record_elsewhere])
def test_a_forked_child_leaves_both_traces_to_the_parent(action: Callable[[Recording], None], tmp_path: Path) -> None:
    step = make_step(mlp())
    with memtrace.record(tmp_path / "outer.memtrace") as outer:
        with memtrace.record(tmp_path / "inner.memtrace") as inner:
            step()
            assert exit_code(in_child(inner, action)) == 0
            assert inner.is_recording
            step()
        step()
    traces = [memtrace.load(recording.path) for recording in (outer, inner)]
    assert [num_steps(trace) for trace in traces] == [3, 2]
    for trace in traces:
        assert trace.manifest.finished
        assert any("1 child process was started" in note for note in trace.manifest.coverage.notes)


def test_an_out_of_memory_error_is_explained_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    inner = memtrace.record(tmp_path / "inner.memtrace")
    with (
        pytest.raises(RuntimeError, match="can't allocate memory"),
        memtrace.record(tmp_path / "outer.memtrace"),
        inner,
    ):
        torch.empty(1 << 60, dtype=torch.int8)
    assert capfd.readouterr().err.count("Out of memory on cpu") == 1
    assert memtrace.load(inner.path).manifest.stop_reason == "RuntimeError left the recorded block"


def test_a_killed_process_leaves_both_traces(tmp_path: Path) -> None:
    code = f"""
import os, signal, time, torch, memtrace
with memtrace.record({str(tmp_path / "outer.memtrace")!r}, flush_seconds=0.01) as outer:
    with memtrace.record({str(tmp_path / "inner.memtrace")!r}, flush_seconds=0.01) as inner:
        kept = torch.ones({MIB})
        while any(len(list(run.path.glob("rank=0/events-*.parquet"))) < 3 for run in (outer, inner)):
            kept.add_(1)
        os.kill(os.getpid(), signal.SIGKILL)
"""
    assert os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code]) == -9
    for name in ("outer", "inner"):
        trace = memtrace.load(tmp_path / f"{name}.memtrace")
        assert not trace.manifest.finished
        assert 4 * MIB in trace.events["size"].tolist()


def test_an_inner_recording_in_a_script_under_memtrace_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import memtrace, torch\n"
        "kept = torch.ones(1000)\n"
        "with memtrace.record('inner.memtrace'):\n"
        "    kept = kept + 1\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", list(sys.path))
    result = CliRunner().invoke(command, ["-o", "outer.memtrace", str(script)])
    assert result.exit_code == 0
    inner = memtrace.load(tmp_path / "inner.memtrace")
    assert (body_of(inner)["size"] == 4000).sum() == 2  # the allocation of the sum, and the free of the older tensor
    assert_is_window(inner, memtrace.load(tmp_path / "outer.memtrace"))
