"""The status of a running recording against the analysis of its trace."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memtrace
from memtrace.analysis.live_recording import rank_folders, read_live_recording
from memtrace.analysis.peak import level_at, requested_bytes
from memtrace.analysis.steps import step_columns
from memtrace.errors import TraceError
from memtrace.format import schema
from memtrace.format.decode import decode_columns
from memtrace.format.keyframes import LiveSet, PartColumns
from memtrace.format.live_status import LIVE_STATUS_NAME, LIVE_STATUS_TEMPORARY, LiveStatus, read_live_status
from memtrace.format.schema import TABLES
from memtrace.recording import arrow, live_status
from memtrace.recording.live_status import LiveStatusFile
from tests.format.random_traces import RandomTrace, in_memory, tables_of

ROOT = Path(__file__).parents[2]


def batches_of(seed: int, cuts: list[int]) -> list[PartColumns]:
    """The rows of a random trace as a writer gets them: events in batches, each step's span in the batch after its end."""
    rows = RandomTrace(seed, num_steps=5).rows
    tables = tables_of(rows)
    columns = {
        name: decode_columns(name, [tables[name]], [column.name for column in TABLES[name]], arrow.DEVICES)
        for name in ("events", "spans")
    }
    time = np.maximum.accumulate(columns["events"]["time_ns"])
    edges = sorted({0, len(time), *(cut % (len(time) + 1) for cut in cuts)})
    ends = columns["spans"]["start_ns"] + columns["spans"]["duration_ns"]
    # A span is drained with the first batch that ends after it.
    batch_of_span = np.searchsorted([int(time[edge - 1]) for edge in edges[1:]], ends, side="left")
    return [
        PartColumns(
            {name: values[first:end] for name, values in columns["events"].items()},
            spans={
                name: values[np.minimum(batch_of_span, len(edges) - 2) == number]
                for name, values in columns["spans"].items()
            },
        )
        for number, (first, end) in enumerate(pairwise(edges))
    ]


def written_status(seed: int, cuts: list[int], folder: Path) -> LiveStatus:
    live, status = LiveSet(), LiveStatusFile(folder)
    num_events = 0
    for batch in batches_of(seed, cuts):
        live.advance(batch)
        status.advance(batch)
        num_events += len(batch.events["kind"])
        status.due = 0.0
        status.write_if_due(live, num_events, num_events)
    written = read_live_status(folder)
    assert written is not None
    return written


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 10**6), max_size=6))
def test_levels_and_steps_are_those_of_the_whole_trace(seed: int, cuts: list[int]) -> None:
    trace = in_memory(RandomTrace(seed, num_steps=5).rows)
    with tempfile.TemporaryDirectory() as folder:
        status = written_status(seed, cuts, Path(folder))
    # Blocks that are older than the recording count from their first sight, which the whole trace knows from the start.
    events = trace.columns("events", "kind", "size", "device", "time_ns")
    kind = events["kind"]
    grows = np.isin(kind, [schema.EVENT_KINDS.index(name) for name in ("alloc", "baseline")])
    change = np.where(grows, events["size"], np.where(kind == schema.EVENT_KINDS.index("free"), -events["size"], 0))
    time = np.maximum.accumulate(events["time_ns"])
    for code, device in enumerate(trace.devices):
        level = np.cumsum(np.where(events["device"] == code, change, 0))
        assert status.live_bytes.get(device, 0) == level[-1]
        assert status.live_bytes.get(device, 0) == level_at(requested_bytes(trace, device), np.array([len(kind)]))[0]
        assert status.peak_bytes.get(device, 0) == level.max()
        assert sum(status.category_bytes.get(device, {}).values()) == level[-1]
        for step in status.steps:
            start = max((s.start_ns + s.duration_ns for s in status.steps if s.number < step.number), default=0)
            before = np.searchsorted(time, start, side="left")
            end = np.searchsorted(time, step.start_ns + step.duration_ns, side="left")
            at_start = level[before - 1] if before else 0
            assert step.peak_bytes.get(device, 0) == max(at_start, level[before:end].max(initial=0))
            assert step.end_bytes.get(device, 0) == (level[end - 1] if end else 0)
    assert [step.number for step in status.steps] == step_columns(trace).step.tolist()
    assert status.num_events == len(kind)


def test_a_second_step_zero_voids_the_steps_before_it(tmp_path: Path) -> None:
    status = LiveStatusFile(tmp_path)
    events = {
        "kind": np.array([0]),
        "block_id": np.array([0]),
        "size": np.array([8]),
        "device": np.array([0]),
        "time_ns": np.array([1]),
    }
    spans = {
        "kind": np.zeros(3, np.int64),
        "index": np.array([0, 1, 0]),
        "start_ns": np.array([0, 2, 0]),
        "duration_ns": np.array([2, 2, 9]),
    }
    batch, live = PartColumns(events, spans=spans), LiveSet()
    live.advance(PartColumns(events))
    status.advance(batch)
    status.write_if_due(live, 1, 10)
    written = read_live_status(tmp_path)
    assert written is not None
    assert [step.number for step in written.steps] == [0]


def test_a_status_that_cannot_be_written_is_left_out(tmp_path: Path) -> None:
    status = LiveStatusFile(tmp_path / "absent")
    status.write_if_due(LiveSet(), 1, 1)
    status.due = 0.0
    status.write_if_due(LiveSet(), 2, 2)
    status.remove()
    assert not (tmp_path / "absent").exists()


def test_the_status_exists_while_the_recording_runs_and_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_status, "STATUS_SECONDS", 0.01)
    folder, seen = tmp_path / "run.memtrace" / "rank=0", threading.Event()
    write = live_status.write_live_status

    def write_and_tell(path: Path, status: LiveStatus) -> None:
        write(path, status)
        if status.live_bytes.get("cpu", 0) >= 4 << 20:
            seen.set()

    monkeypatch.setattr(live_status, "write_live_status", write_and_tell)
    with memtrace.record(tmp_path / "run.memtrace") as recording:
        kept = torch.zeros(1 << 20)
        recording.step()
        assert seen.wait(60)
        running = read_live_recording(folder)
        assert running.state == "running"
        assert running.status is not None
        assert running.status.live_bytes["cpu"] >= kept.nbytes
        assert running.devices == ("cpu",)
    assert not (folder / LIVE_STATUS_NAME).exists()
    ended = read_live_recording(folder)
    assert (ended.state, ended.status) == ("finished", None)


KILLED = """
import os, sys, time, torch, memtrace
from memtrace.recording import live_status
live_status.STATUS_SECONDS = 0.01
with memtrace.record(sys.argv[1], flush_seconds=0.05):
    kept = []
    while True:
        kept.append(torch.zeros(1000))
        time.sleep(0.001)
        if os.path.exists(sys.argv[1] + "/rank=0/live.json") and os.path.exists(sys.argv[1] + "/rank=0/events-00001.parquet"):
            print("written", flush=True)
"""


def test_a_killed_recording_is_stopped_and_its_trace_opens(tmp_path: Path) -> None:
    trace = tmp_path / "run.memtrace"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(trace)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "written"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    folder = trace / "rank=0"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["process"] == process.pid
    status = json.loads((folder / LIVE_STATUS_NAME).read_text())
    status["written_epoch_ns"] -= 60 * 10**9
    (folder / LIVE_STATUS_NAME).write_text(json.dumps(status))
    stopped = read_live_recording(folder)
    assert stopped.state == "stopped"
    assert stopped.status is not None
    (folder / LIVE_STATUS_TEMPORARY).write_text("{")  # the process was killed while it wrote the status
    opened = memtrace.load(trace)
    assert opened.num_rows("events") > 0
    assert not any(LIVE_STATUS_NAME in note for note in opened.file_notes)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"format_version": 3, "steps": 3}', "\x00", '{"format_version": 1e999}']
)
def test_a_damaged_status_is_an_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    (tmp_path / LIVE_STATUS_NAME).write_text(content)
    with pytest.raises(TraceError, match=LIVE_STATUS_NAME):
        read_live_status(tmp_path)


def test_a_folder_without_ranks_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="not a memtrace trace"):
        rank_folders(tmp_path)


SERVED = """
import json, sys, urllib.request, torch, memtrace
with memtrace.record(sys.argv[1]) as recording:
    address = recording.serve()
    base, token = address.split("/?token=")
    request = urllib.request.Request(base + "/api/status", headers={"Authorization": "Bearer " + token})
    with urllib.request.urlopen(request, timeout=60) as answer:
        print(json.dumps(json.load(answer)))
print(memtrace.record(sys.argv[1]).serve())
"""


def test_a_recording_serves_itself_from_another_process(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    trace = tmp_path / "run.memtrace"
    result = subprocess.run(
        [sys.executable, "-c", SERVED, str(trace)], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    status, after = result.stdout.splitlines()
    assert json.loads(status)["follow"] is True
    assert after == "None"
    assert "nothing is served" in result.stderr
    assert memtrace.load(trace).manifest.coverage.notes == ()  # the server is not a child process of the program's
