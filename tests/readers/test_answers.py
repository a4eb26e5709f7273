"""What the commands say of files that cannot tell everything: unknown, never 0, and the same in every command."""

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
from memtrace.analysis.ranks import working_ns
from tests.readers.making import Maker, frame


def said(*arguments: object) -> str:
    found = CliRunner().invoke(cli, list(map(str, arguments)))
    assert found.exit_code == 0, found.output
    return found.output


def optimizer_steps(folder: Path, count: int) -> Path:
    """A snapshot whose annotations name steps of an optimizer and no wait for data."""
    maker, ranges = Maker(), []
    for _ in range(count):
        maker.free(maker.alloc(1000))
        for stage in ("START", "END"):
            maker.clock_us += 1
            ranges.append({"name": "Optimizer.step#SGD.step", "stage": stage, "device": 0, "time_us": maker.clock_us})
    path = folder / "steps.pickle"
    path.write_bytes(pickle.dumps(maker.snapshot() | {"external_annotations": ranges}))
    return path


def test_a_file_that_names_no_waits_for_data_is_not_said_to_have_none(tmp_path: Path) -> None:
    three_steps = optimizer_steps(tmp_path, 3)
    assert "waiting for data unknown" in " ".join(said("summary", three_steps).split())
    assert "0.0 %" not in (text := said("stalls", three_steps)) and "3 steps" in text
    told = json.loads(said("stalls", three_steps, "--json"))
    assert told["share"] is None and told["median_wait_ns"] is None and told["median_duration_ns"] > 0
    assert [row["data_wait_ns"] for row in told["steps"]] == [None] * 3
    assert said("stalls", three_steps, "--csv").splitlines()[1].endswith(",")
    figure = steps_figure(memtrace.load(three_steps), "cuda:0")
    assert figure is not None and [trace.name for trace in figure.data if trace.type == "bar"] == ["duration"]


def test_a_name_cannot_turn_the_line_around(tmp_path: Path) -> None:
    """Marks of direction make a terminal show what is not there."""
    maker = Maker()
    maker.alloc(1000, [frame("me/\u202eyp.niart\u2066.py", 1, "f")])
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(maker.snapshot()))
    text = said("summary", path)
    assert "me/\ufffdyp.niart\ufffd.py:1" in text and "\u202e" not in text + said("summary", path, "--json")


def test_totals_have_no_allocations(tmp_path: Path) -> None:
    """``export_memory_timeline`` to JSON: each category is one block, made anew whenever its total changes."""
    levels = [[0, 2**20, 0, 0, size, 0, 0, 0, 0] for size in (0, 4096, 2**22, 2**21, 2**10) * 8]
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps([list(range(1000, 1000 + len(levels))), levels]))
    told = json.loads(said("summary", path, "--json"))
    assert told["steps"]["num_steps"] is None and told["devices"][0]["peak"]["requested_bytes"] == 5 << 20
    assert told["steps"]["median_allocated_bytes"] is None and told["steps"]["median_num_allocations"] is None
    assert told["patterns"]["stability_share"] is None
    assert "Steps unavailable: the file holds totals" in " ".join(said("summary", path).split())
    steps = json.loads(said("steps", path, "--json"))
    assert (steps["iterative"], steps["confidence"], steps["num_steps"]) == (None, None, 0)
    assert json.loads(said("leaks", path, "--json"))["bytes_per_step"] is None
    access = json.loads(said("access", path, "--json"))
    assert access["num_intervals"] is None and set(access["swappable"].values()) == {None}
    (device,) = json.loads(said("findings", path, "--json"))["devices"]
    assert device["findings"] == [] and device["peak_if_all_mended_bytes"] is None
    for command in ("steps", "leaks", "access", "findings"):
        assert "the file holds totals by category and no blocks" in " ".join(said(command, path).split())
    levels[12][4] *= 2
    other = tmp_path / "other.json"
    other.write_text(json.dumps([list(range(1000, 1000 + len(levels))), levels]))
    changes = json.loads(said("diff", path, other, "--json"))["changes"]
    assert [(row["grouping"], row["change_bytes"], row["after_blocks"]) for row in changes] == [
        ("category", 4 << 20, None)
    ]
    assert "lines unavailable: the file holds totals" in " ".join(said("diff", path, other).split())


def test_only_allocations_taken_for_the_backward_are_said_to_be(tmp_path: Path) -> None:
    maker = Maker()
    maker.alloc(1000)
    maker.alloc(1000, [frame("train.py", 1, "step")])
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(maker.snapshot()))
    notes = compute_coverage(memtrace.load(path)).notes
    assert "1 of its 2 allocations have no stack" in notes


def test_segments_that_cannot_be_are_a_contradiction(tmp_path: Path) -> None:
    maker = Maker()
    maker.alloc(1000)
    sound, short, twice = (maker.snapshot() for _ in range(3))
    short["segments"][0]["total_size"] = 10
    twice["segments"] *= 2

    def notes(value: object) -> str:
        path = tmp_path / "snapshot.pickle"
        path.write_bytes(pickle.dumps(value))
        return " ".join(compute_coverage(memtrace.load(path)).notes)

    assert "contradicts" not in notes(sound)
    assert "contradicts itself" in notes(short) and "1 segments of another size than their blocks" in notes(short)
    assert "contradicts itself" in notes(twice) and "1 segments that lie within others" in notes(twice)


def test_a_single_step_is_not_said_to_match_others(tmp_path: Path) -> None:
    path = optimizer_steps(tmp_path, 1)
    told = json.loads(said("summary", path, "--json"))
    assert told["steps"]["num_steps"] == 1 and told["steps"]["source"] == "marks"
    assert told["patterns"]["stability_share"] is None
    assert "Stability" not in said("summary", path) and "matches the others" not in said("steps", path)


def test_steps_found_in_the_events_are_said_to_be(tmp_path: Path) -> None:
    maker = Maker()
    for _ in range(12):
        for size in (1000, 2000, 3000, 500, 700, 900, 1100, 40, 60):
            maker.free(maker.alloc(size))
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(maker.snapshot()))
    assert json.loads(said("summary", path, "--json"))["steps"]["source"] == "events"
    assert "detected from the events" in said("summary", path)
    assert "detected from the events" not in said("summary", optimizer_steps(tmp_path, 3))


def test_operators_within_ranges_and_beside_each_other_work_once(tmp_path: Path) -> None:
    """An event in a range alone makes the range a call; what runs in it is no more time of work."""

    def row(name: str, ts: int, dur: int, tid: int, cat: str = "cpu_op") -> dict[str, object]:
        return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": {}}

    def memory(ts: int, tid: int) -> dict[str, object]:
        arguments = {"Device Type": 0, "Device Id": -1, "Bytes": 64, "Addr": ts}
        return {"ph": "i", "name": "[memory]", "pid": 1, "tid": tid, "ts": ts, "args": arguments}

    events = [row("ProfilerStep#1", 0, 1000, 1, "user_annotation"), memory(0, 1), memory(15, 1), memory(35, 1)]
    events += [row("forward", 10, 500, 1), row("aten::mm", 30, 300, 1), row("aten::add", 400, 200, 2), memory(450, 2)]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    working = working_ns(memtrace.load(path))
    assert working is not None and working.tolist() == [590_000]


@pytest.mark.parametrize("lacking", ["times", "history"])
def test_without_times_no_time_is_told(tmp_path: Path, lacking: str) -> None:
    """Torch before 2.2 wrote none: the number of an entry is no nanosecond."""
    maker = Maker()
    maker.alloc(1000)
    maker.alloc(9000)
    maker.out_of_memory(1 << 40, 0)
    value = maker.snapshot()
    for entry in value["device_traces"][0]:
        del entry["time_us"]
    if lacking == "history":
        value["device_traces"] = []
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(value))
    told = json.loads(said("summary", path, "--json"))
    (device,) = told["devices"]
    assert device["peak"]["requested_bytes"] == 10_000
    assert device["peak"]["event"] == (2 if lacking == "times" else -1)
    times = [told["coverage"]["first_event_ns"], told["coverage"]["last_event_ns"], device["peak"]["time_ns"]]
    times += [device["fragmentation"]["time_ns"], *(failure["time_ns"] for failure in told["out_of_memory"])]
    assert times == [None] * (5 if lacking == "times" else 4)
    text = said("summary", path)
    assert "0 us" not in text and " ns" not in text and ("at event 2" in text) == (lacking == "times")
    assert ("out of memory on cuda:0 at event 3" in text) == (lacking == "times")
    assert "At the fullest moment 2" in render(memtrace.load(path))
