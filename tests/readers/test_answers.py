"""Commands show what a file does not contain as unknown, never as 0."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from click.testing import CliRunner
from memtrace.cli import cli
from memtrace.dashboards.page import render
from memtrace.dashboards.steps import steps_figure

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.analysis.rank_summary import step_compute_ns
from tests.readers.snapshot_maker import SnapshotMaker, frame


def run_memtrace(*arguments: object) -> str:
    """Return what a command prints."""
    result = CliRunner().invoke(cli, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.output


def write_snapshot(folder: Path, value: object) -> Path:
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value))
    return path


def write_optimizer_steps(folder: Path, count: int) -> Path:
    """Write a snapshot whose annotations name steps of an optimizer and no wait for data."""
    maker, ranges = SnapshotMaker(), []
    for _ in range(count):
        maker.free(maker.alloc(1000))
        for stage in ("START", "END"):
            maker.clock_us += 1
            ranges.append({"name": "Optimizer.step#SGD.step", "stage": stage, "device": 0, "time_us": maker.clock_us})
    return write_snapshot(folder, maker.snapshot() | {"external_annotations": ranges})


def test_waits_for_data_are_unknown_if_the_file_names_none(tmp_path: Path) -> None:
    three_steps = write_optimizer_steps(tmp_path, 3)
    assert "waiting for data unknown" in " ".join(run_memtrace("summary", three_steps).split())
    assert "0.0 %" not in (text := run_memtrace("stalls", three_steps)) and "3 steps" in text
    result = json.loads(run_memtrace("stalls", three_steps, "--json"))
    assert result["wait_share"] is None and result["median_wait_ns"] is None and result["median_duration_ns"] > 0
    assert [row["data_wait_ns"] for row in result["steps"]] == [None] * 3
    assert run_memtrace("stalls", three_steps, "--csv").splitlines()[1].endswith(",")
    figure = steps_figure(memtrace.load(three_steps), "cuda:0")
    assert figure is not None and [trace.name for trace in figure.data if trace.type == "bar"] == ["duration"]


def test_marks_of_text_direction_in_names_are_replaced(tmp_path: Path) -> None:
    """Such marks make a terminal show characters in another order."""
    maker = SnapshotMaker()
    maker.alloc(1000, [frame("me/\u202eyp.niart\u2066.py", 1, "f")])
    path = write_snapshot(tmp_path, maker.snapshot())
    text = run_memtrace("summary", path)
    assert "me/\ufffdyp.niart\ufffd.py:1" in text and "\u202e" not in text + run_memtrace("summary", path, "--json")


def test_results_about_blocks_are_unknown_for_totals(tmp_path: Path) -> None:
    """A JSON file of ``export_memory_timeline`` contains totals by category and no blocks."""
    levels = [[0, 2**20, 0, 0, size, 0, 0, 0, 0] for size in (0, 4096, 2**22, 2**21, 2**10) * 8]
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps([list(range(1000, 1000 + len(levels))), levels]))
    result = json.loads(run_memtrace("summary", path, "--json"))
    assert result["steps"]["num_steps"] is None and result["devices"][0]["peak"]["requested_bytes"] == 5 << 20
    assert result["steps"]["median_allocated_bytes"] is None and result["steps"]["median_num_allocations"] is None
    assert result["patterns"]["stability_share"] is None
    assert "Steps unavailable: the file holds totals" in " ".join(run_memtrace("summary", path).split())
    steps = json.loads(run_memtrace("steps", path, "--json"))
    assert (steps["is_iterative"], steps["confidence"], steps["num_steps"]) == (None, None, 0)
    assert json.loads(run_memtrace("leaks", path, "--json"))["bytes_per_step"] is None
    access = json.loads(run_memtrace("access", path, "--json"))
    assert access["num_intervals"] is None and set(access["swappable"].values()) == {None}
    (device,) = json.loads(run_memtrace("findings", path, "--json"))["devices"]
    assert device["findings"] == [] and device["peak_if_all_fixed_bytes"] is None
    for command in ("steps", "leaks", "access", "findings"):
        assert "the file holds totals by category and no blocks" in " ".join(run_memtrace(command, path).split())
    levels[12][4] *= 2
    other = tmp_path / "other.json"
    other.write_text(json.dumps([list(range(1000, 1000 + len(levels))), levels]))
    changes = json.loads(run_memtrace("diff", path, other, "--json"))["changes"]
    assert [(row["grouping"], row["change_bytes"], row["after_blocks"]) for row in changes] == [
        ("category", 4 << 20, None)
    ]
    assert "allocation sites are unknown (the file holds totals" in " ".join(run_memtrace("diff", path, other).split())


def test_the_note_on_missing_stacks_omits_the_backward_pass_without_one(tmp_path: Path) -> None:
    maker = SnapshotMaker()
    maker.alloc(1000)
    maker.alloc(1000, [frame("train.py", 1, "step")])
    path = write_snapshot(tmp_path, maker.snapshot())
    notes = compute_coverage(memtrace.load(path)).notes
    assert "1 of 2 allocations have no call stack" in notes


def test_impossible_segments_are_reported_as_contradictions(tmp_path: Path) -> None:
    maker = SnapshotMaker()
    maker.alloc(1000)
    valid, short, repeated = (maker.snapshot() for _ in range(3))
    short["segments"][0]["total_size"] = 10
    repeated["segments"] *= 2

    def notes(value: object) -> str:
        return " ".join(compute_coverage(memtrace.load(write_snapshot(tmp_path, value))).notes)

    assert "contradicts itself" not in notes(valid)
    assert "1 segment differs in size from the sum of its blocks" in notes(short)
    assert "1 segment overlaps another segment" in notes(repeated)
    assert all("contradicts itself" in notes(value) for value in (short, repeated))


def test_the_stability_of_a_single_step_is_unknown(tmp_path: Path) -> None:
    path = write_optimizer_steps(tmp_path, 1)
    result = json.loads(run_memtrace("summary", path, "--json"))
    assert result["steps"]["num_steps"] == 1 and result["steps"]["source"] == "marks"
    assert result["patterns"]["stability_share"] is None
    assert "Stability" not in run_memtrace("summary", path) and "matches the others" not in run_memtrace("steps", path)


def test_the_source_of_steps_is_shown(tmp_path: Path) -> None:
    maker = SnapshotMaker()
    for _ in range(12):
        for size in (1000, 2000, 3000, 500, 700, 900, 1100, 40, 60):
            maker.free(maker.alloc(size))
    path = write_snapshot(tmp_path, maker.snapshot())
    assert json.loads(run_memtrace("summary", path, "--json"))["steps"]["source"] == "events"
    assert "detected from the events" in run_memtrace("summary", path)
    assert "detected from the events" not in run_memtrace("summary", write_optimizer_steps(tmp_path, 3))


def test_working_time_counts_overlapping_operators_once(tmp_path: Path) -> None:
    """A range that contains an event counts as a call; the operators within it add no working time."""

    def row(name: str, ts: int, dur: int, tid: int, cat: str = "cpu_op") -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": {}}

    def memory(ts: int, tid: int) -> dict[str, object]:
        arguments = {"Device Type": 0, "Device Id": -1, "Bytes": 64, "Addr": ts}
        return {"ph": "i", "name": "[memory]", "pid": 1, "tid": tid, "ts": ts, "args": arguments}

    events = [row("ProfilerStep#1", 0, 1000, 1, "user_annotation"), memory(0, 1), memory(15, 1), memory(35, 1)]
    events += [row("forward", 10, 500, 1), row("aten::mm", 30, 300, 1), row("aten::add", 400, 200, 2), memory(450, 2)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    working = step_compute_ns(memtrace.load(path))
    assert working is not None and working.tolist() == [590_000]


@pytest.mark.parametrize("missing", ["times", "history"])
def test_times_are_unknown_if_the_file_has_none(tmp_path: Path, missing: str) -> None:
    """Snapshots of torch before 2.2 have no times; the number of an entry must not be shown as a time."""
    maker = SnapshotMaker()
    maker.alloc(1000)
    maker.alloc(9000)
    maker.out_of_memory(1 << 40, 0)
    value = maker.snapshot()
    for entry in value["device_traces"][0]:
        del entry["time_us"]
    if missing == "history":
        value["device_traces"] = []
    path = write_snapshot(tmp_path, value)
    result = json.loads(run_memtrace("summary", path, "--json"))
    (device,) = result["devices"]
    assert device["peak"]["requested_bytes"] == 10_000
    assert device["peak"]["event"] == (2 if missing == "times" else -1)
    times = [result["coverage"]["first_event_ns"], result["coverage"]["last_event_ns"], device["peak"]["time_ns"]]
    times += [device["fragmentation"]["time_ns"], *(failure["time_ns"] for failure in result["out_of_memory"])]
    assert times == [None] * (5 if missing == "times" else 4)
    text = run_memtrace("summary", path)
    assert "0 us" not in text and " ns" not in text and ("at event 2" in text) == (missing == "times")
    assert ("Out of memory on cuda:0 at event 3" in text) == (missing == "times")
    assert "Peak of reserved memory: 2" in render(memtrace.load(path))
