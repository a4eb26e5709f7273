"""Scalars of steps in TensorBoard's event files and in an offline run of Weights & Biases, read back from disk."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memtrace
from memtrace.analysis import measure_step_memory, steps_table
from memtrace.analysis.steps import step_columns
from memtrace.categories import CATEGORY_LABELS
from memtrace.integrations.scalars import ScalarStream, step_scalars
from memtrace.integrations.tensorboard import log_scalars as log_to_tensorboard
from memtrace.integrations.wandb import log_scalars as log_to_wandb
from memtrace.recording.session import Recording
from memtrace.trace import Trace
from tests.recording.helpers import part_written, wait_until


def train(recording: Recording, num_steps: int, after_step: Any = None) -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 1))
    optimizer = torch.optim.Adam(model.parameters())
    kept = []
    for step in range(num_steps):
        model(torch.ones(32, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(torch.ones(1 << 10))
        recording.step()
        if after_step is not None:
            after_step(step)
    return model


def expected_scalars(trace: Trace) -> dict[int, dict[str, float]]:
    return {memory.step: step_scalars(memory) for memory in measure_step_memory(trace)}


def test_measures_of_steps_are_those_of_the_other_analyses(tmp_path: Path) -> None:
    with memtrace.record(tmp_path / "run.memtrace") as recording:
        train(recording, 6)
    trace = memtrace.load(tmp_path / "run.memtrace")
    measured, columns = [memory.devices[0] for memory in measure_step_memory(trace)], step_columns(trace)
    assert [memory.peak_bytes for memory in measured] == columns.peak_bytes.tolist()
    assert [memory.live_end_bytes for memory in measured] == columns.live_end_bytes.tolist()
    assert [memory.growth_bytes for memory in measured] == [None, *np.diff(columns.live_end_bytes).tolist()]
    assert [sum(memory.category_bytes.values()) for memory in measured] == columns.peak_bytes.tolist()
    assert {name for memory in measured for name in memory.category_bytes} <= set(CATEGORY_LABELS)
    assert all(memory.reserved_bytes is None for memory in measured)  # the CPU's allocator has no segments


def test_training_is_bitwise_the_same_with_a_stream(tmp_path: Path) -> None:
    results = []
    for sinks in (None, [lambda step, scalars: None]):
        torch.manual_seed(7)
        with memtrace.record(tmp_path / "run.memtrace", flush_seconds=0.01) as recording:
            if sinks is not None:
                ScalarStream(recording, sinks)
            results.append([parameter.detach().clone() for parameter in train(recording, 8).parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_steps_are_logged_while_the_recording_runs(tmp_path: Path) -> None:
    got: dict[int, dict[str, float]] = {}
    with memtrace.record(tmp_path / "run.memtrace", flush_seconds=0.05) as recording:
        ScalarStream(recording, [got.__setitem__])

        def wait_for_part(step: int) -> None:
            if step < 3:
                with part_written(recording):
                    torch.ones(10)

        def train_until_logged() -> bool:
            recording.step()
            torch.ones(10)
            return bool(got)

        train(recording, 4, wait_for_part)
        wait_until(train_until_logged)
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert sorted(got) == steps_table(trace)["step"].tolist()
    for step, scalars in expected_scalars(trace).items():
        totals = {name: value for name, value in scalars.items() if "by_category" not in name}
        assert totals == {name: value for name, value in got[step].items() if "by_category" not in name}


def test_steps_that_a_ring_deleted_are_left_out(tmp_path: Path) -> None:
    got: dict[int, dict[str, float]] = {}
    with memtrace.record(tmp_path / "run.memtrace", last_steps=1, flush_seconds=0.02) as recording:
        stream = ScalarStream(recording, [got.__setitem__])
        stream._is_over.set()  # as if the thread were far behind

        def flush(step: int) -> None:
            with part_written(recording):
                torch.ones(10)
            if step == 0:
                stream._measure(is_complete=False)

        train(recording, 6, flush)
    kept = steps_table(memtrace.load(tmp_path / "run.memtrace"))["step"].tolist()
    assert len(kept) < 6
    assert set(kept) <= set(got) <= {0, *kept}
    assert "memtrace/cpu/growth_bytes" not in got[kept[0]]


def test_marks_of_the_program_replace_the_steps_of_its_optimizer(tmp_path: Path) -> None:
    got: dict[int, dict[str, float]] = {}
    with memtrace.record(tmp_path / "run.memtrace") as recording:
        ScalarStream(recording, [got.__setitem__])
        weight = torch.zeros(8, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(4):
            for _ in range(2):
                weight.sum().backward()
                optimizer.step()
            recording.step()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert got == expected_scalars(trace)
    assert len(got) == 4


def test_a_failing_sink_is_reported_once_and_the_others_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(step: int, scalars: dict[str, float]) -> None:
        scalars.clear()
        raise OSError("disk full")

    got: dict[int, dict[str, float]] = {}
    with caplog.at_level(logging.WARNING, logger="memtrace"), memtrace.record(tmp_path / "run.memtrace") as recording:
        ScalarStream(recording, [fail, got.__setitem__])
        train(recording, 3)
    assert got == expected_scalars(memtrace.load(tmp_path / "run.memtrace"))
    assert ["disk full" in record.getMessage() for record in caplog.records] == [True]


def test_tensorboard_has_the_scalars_of_every_step(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path / "tb")) as writer, memtrace.record(tmp_path / "run.memtrace") as recording:
        log_to_tensorboard(recording, writer)
        train(recording, 4)
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    read: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            read.setdefault(event.step, {})[tag] = event.value
    assert read == expected_scalars(memtrace.load(tmp_path / "run.memtrace"))


@pytest.fixture
def wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An offline run of Weights & Biases."""
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    for name in ("DIR", "CACHE_DIR", "CONFIG_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="test")
    yield run
    run.finish()


def history(folder: Path) -> list[dict[str, Any]]:
    """The rows of the history in the file of an offline run that has finished."""
    (path,) = folder.rglob("run-*.wandb")
    wait_until(lambda: any(record.WhichOneof("record_type") == "exit" for record in run_records(path)))
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in run_records(path)
        if record.WhichOneof("record_type") == "history"
    ]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]


def run_records(path: Path) -> Iterator[Any]:
    """The records in the file of an offline run, which another process writes."""
    from wandb.proto import wandb_internal_pb2

    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def log_records(content: bytes) -> Iterator[bytes]:
    """The records in a file in the log format of LevelDB, after the header of 7 bytes that wandb writes."""
    position, record, block_bytes, header_bytes = 7, b"", 1 << 15, 7
    while position + header_bytes <= len(content):
        left = block_bytes - position % block_bytes
        if left < header_bytes:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += header_bytes + length
        if position > len(content):
            return  # it is being written
        record += content[position - length : position]
        if kind in (1, 4):  # a whole record, or the end of one
            yield record
            record = b""


def test_wandb_has_a_row_for_every_step_if_asked(tmp_path: Path, wandb_run: Any) -> None:
    with memtrace.record(tmp_path / "run.memtrace") as recording:
        log_to_wandb(recording, wandb_run, own_rows=True)
        train(recording, 4)
    wandb_run.finish()
    rows = history(tmp_path)
    expected = expected_scalars(memtrace.load(tmp_path / "run.memtrace"))
    assert rows == [{"memtrace/step": step, **scalars} for step, scalars in expected.items()]


def test_rows_that_the_program_logs_with_a_step_are_never_dropped(tmp_path: Path, wandb_run: Any) -> None:
    with memtrace.record(tmp_path / "run.memtrace") as recording:
        log_to_wandb(recording, wandb_run)
        train(recording, 6, lambda step: wandb_run.log({"loss": float(step)}, step=step))
    wandb_run.log({"loss": 6.0}, step=6)
    wandb_run.finish()
    rows = history(tmp_path)
    assert [row["loss"] for row in rows] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    expected = expected_scalars(memtrace.load(tmp_path / "run.memtrace"))
    (logged,) = [row for row in rows if "memtrace/step" in row]
    assert logged["memtrace/cpu/peak_bytes"] == max(row["memtrace/cpu/peak_bytes"] for row in expected.values())
