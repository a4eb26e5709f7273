"""Traces that are written on demand: when memory runs out (``on_oom``), by ``Recording.snapshot`` and by SIGUSR2."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import memtrace
from memtrace.analysis.blocks import blocks
from memtrace.analysis.gaps import find_gaps
from memtrace.analysis.oom import explain_out_of_memory
from memtrace.recording import memory_files, ring
from memtrace.recording.out_of_memory import FailedAllocation
from memtrace.trace import Trace
from tests.programs.tasks import make_step, mlp

TOO_LARGE = 1 << 50
SIGNALS = """
import os, signal, sys, time, torch, memtrace
from pathlib import Path
trace, mode = sys.argv[1:]
if mode == "own":
    received = []
    signal.signal(signal.SIGUSR2, lambda *_: received.append(1))
before = signal.getsignal(signal.SIGUSR2)
options = {"paused": {"schedule": lambda step: step == 0}, "on_oom": {"on_oom": True}}.get(mode, {})
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters())
kept = []
with memtrace.record(trace, flush_seconds=1000, **options):
    for _ in range(4):
        kept.append(torch.ones(1000))
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    os.kill(os.getpid(), signal.SIGUSR2)
    if mode == "own":
        assert received == [1]
        os._exit(len(list(Path(trace).glob("rank=0/events-*"))))
    def has_kept():
        try:
            sizes = memtrace.load(trace).columns("events", "size")["size"]
        except Exception:
            return False
        return (sizes == 4000).sum() >= 4
    while not has_kept():
        time.sleep(0.05)
    os._exit(0)
"""


def failures(trace: Trace) -> list[int]:
    return [failure.asked_bytes for failure in explain_out_of_memory(trace)]


@pytest.mark.parametrize("every", [None, 50])
def test_nothing_is_written_unless_memory_runs_out(every: int | None, tmp_path: Path) -> None:
    step = make_step(mlp())
    path = tmp_path / "run.memtrace"
    with memtrace.record(path, on_oom=True, every=every, flush_seconds=0.001):
        for _ in range(5):
            step()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="another"), memtrace.record(path, on_oom=True, every=every):
        raise ValueError("another")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("every", [None, 50])
@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_an_out_of_memory_error_writes_the_last_steps_and_its_cause(
    observer: str, every: int | None, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    step, held = make_step(mlp()), []
    with (
        pytest.raises(RuntimeError, match="allocate memory"),
        memtrace.record(
            tmp_path / "run.memtrace", on_oom=True, every=every, observer=observer, flush_seconds=0.001
        ) as recording,
    ):
        for _ in range(12):
            step()
        held.append(torch.ones(1 << 20))
        torch.empty(TOO_LARGE, dtype=torch.uint8)
    trace = memtrace.load(recording.path)
    if observer == "native" or every is not None:
        assert failures(trace) == [TOO_LARGE]
        assert "ran out of memory" in capfd.readouterr().err
    table = blocks(trace)
    assert (table.size[table.free_event < 0] == 4 << 20).any()
    assert (len(find_gaps(trace)) > 0) == (every is not None)


def test_an_error_that_the_program_handles_is_written_too(tmp_path: Path) -> None:
    step = make_step(mlp())
    with memtrace.record(tmp_path / "run.memtrace", on_oom=True) as recording:
        step()
        with pytest.raises(RuntimeError):
            torch.empty(TOO_LARGE, dtype=torch.uint8)
        for _ in range(3):
            step()
    assert failures(memtrace.load(recording.path)) == [TOO_LARGE]


def test_the_memory_of_a_flight_recorder_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without steps, and with a limit that one part reaches, parts are dropped all the same."""
    monkeypatch.setattr(ring, "MAX_HELD_BYTES", 20_000)
    sizes = []
    write = memory_files.MemoryFiles.write

    def measured(self: memory_files.MemoryFiles, *arguments: object) -> None:
        sizes.append(self.num_bytes)
        write(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(memory_files.MemoryFiles, "write", measured)
    model = mlp().model
    with memtrace.record(tmp_path / "run.memtrace", on_oom=True, flush_seconds=1000) as recording:
        for _ in range(60):
            model(torch.ones(2, 64))
            recording._recorder.writer.begin_part().wait()  # type: ignore[union-attr]
        assert recording.snapshot() == tmp_path / "run.memtrace"
    assert len(sizes) > 100
    assert max(sizes) < 120_000
    assert memtrace.load(recording.path).manifest.coverage.dropped_events


def test_a_snapshot_has_all_that_happened_before_it(tmp_path: Path) -> None:
    step = make_step(mlp())
    with memtrace.record(tmp_path / "run.memtrace", flush_seconds=1000) as recording:
        assert not list(recording.rank_folder.glob("events-*"))
        step()
        tensor = torch.ones(1000)
        assert recording.snapshot() == recording.path
        assert (blocks(memtrace.load(recording.path)).size == 4000).any()
        del tensor
        step()
        recording.snapshot()
        sizes = blocks(memtrace.load(recording.path))
        assert (sizes.free_event[sizes.size == 4000] >= 0).all()
    assert recording.snapshot() is None


def test_a_snapshot_in_a_pause_lists_what_is_live(tmp_path: Path) -> None:
    step = make_step(mlp())
    with memtrace.record(tmp_path / "run.memtrace", schedule=lambda number: number == 0) as recording:
        for _ in range(3):
            step()
        tensor = torch.ones(1000)
        assert not recording.is_recording
        recording.snapshot()
        assert not recording.is_recording
        trace = memtrace.load(recording.path)
        table = blocks(trace)
        assert ((table.size == 4000) & (table.free_event < 0)).any()
        del tensor
        step()
    trace = memtrace.load(recording.path)
    table, gaps = blocks(trace), find_gaps(trace)
    ours = np.flatnonzero(table.size == 4000)
    assert len(gaps) == 2
    assert gaps.contain_rows(table.free_event[ours]).all()


@pytest.mark.parametrize("mode", ["running", "paused", "on_oom", "own"])
def test_a_signal_writes_the_trace_unless_the_program_handles_it(mode: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIGNALS, tmp_path / "run.memtrace", mode]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0


def test_the_handler_of_the_signal_is_restored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    with memtrace.record(tmp_path / "a"):
        assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL
        with memtrace.record(tmp_path / "inner"):
            pass
        assert signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL

    def handler(number: int, frame: object) -> None:
        pass

    with memtrace.record(tmp_path / "b"):
        signal.signal(signal.SIGUSR2, handler)
    try:
        with caplog.at_level(logging.INFO), memtrace.record(tmp_path / "c"):
            assert signal.getsignal(signal.SIGUSR2) is handler
        assert signal.getsignal(signal.SIGUSR2) is handler
        assert "SIGUSR2" in caplog.text
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_a_handler_that_a_library_restores_too_late_does_not_keep_later_recordings_from_the_signal(
    tmp_path: Path,
) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    with memtrace.record(tmp_path / "a"):
        late = signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, late)
    try:
        with memtrace.record(tmp_path / "b"):
            assert signal.getsignal(signal.SIGUSR2) is not late
    finally:
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_the_messages_of_out_of_memory_errors_are_understood() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 1 has a total capacity of 79.15 GiB of which 3.50 MiB is "
        "free. Including non-PyTorch memory, this process has 76.00 GiB memory in use."
    )
    assert FailedAllocation.from_error(torch.OutOfMemoryError(message)) == FailedAllocation(2, 20 << 30, 7 << 19)
    assert FailedAllocation.from_error(torch.OutOfMemoryError("no more")) is None
