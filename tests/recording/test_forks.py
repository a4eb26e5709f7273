"""Child processes: a forked child is inert, the parent's trace stays whole, and the trace says what it lacks."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memtrace
from memtrace.recording.options import ObserverKind
from memtrace.recording.session import Recording
from tests.programs.tasks import make_step, mlp
from tests.recording.helpers import part_written

CHILD_TIMEOUT_SECONDS = 60


def leave(recording: Recording) -> None:
    recording.__exit__(None, None, None)


def leave_by_exception(recording: Recording) -> None:
    raise SystemExit(0)


def train(recording: Recording) -> None:
    assert not recording.is_recording
    assert not sys.modules["memtrace_native"].status()["thread_enabled"]
    assert nn.Module.__call__.__module__.startswith("torch.")
    make_step(mlp())()
    recording.step()


def record_elsewhere(recording: Recording) -> None:
    with memtrace.record(recording.path) as own:
        assert own.is_recording
        make_step(mlp())()
    assert own.path != recording.path
    assert memtrace.load(own.path).manifest.finished


def fork_again(recording: Recording) -> None:
    child = in_child(recording, leave_by_exception)
    assert exit_code(child) == 0


def in_child(recording: Recording, action: Callable[[Recording], None]) -> int:
    """Fork; the child runs ``action`` inside the recorded block, leaves the block, and exits."""
    child = os.fork()
    if child > 0:
        return child
    code = 1
    try:
        signal.alarm(CHILD_TIMEOUT_SECONDS)  # a child that hangs is killed
        try:
            action(recording)
        finally:
            recording.__exit__(*sys.exc_info())
        code = 0
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("action", [leave, leave_by_exception, train, record_elsewhere, fork_again])
@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_a_forked_child_is_inert(
    action: Callable[[Recording], None], observer: ObserverKind, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, step = tmp_path / "run.memtrace", make_step(mlp())
    if observer == "dispatch" and action is train:
        pytest.skip("asks the native observer")
    with memtrace.record(path, observer=observer, flush_seconds=0.02) as recording:
        with part_written(recording):
            step()
        assert exit_code(in_child(recording, action)) == 0, capfd.readouterr().err
        assert not json.loads((path / "rank=0" / "manifest.json").read_text())["finished"]
        assert recording.is_recording
        step()
    trace = memtrace.load(path)
    assert trace.manifest.finished
    assert (trace.spans.kind == "step").sum() == 2
    assert any("1 child process was started" in note for note in trace.manifest.coverage.notes)


def test_many_forks_while_other_threads_train(tmp_path: Path) -> None:
    step, is_over = make_step(mlp()), threading.Event()

    def train_until_over() -> None:
        own_step = make_step(mlp())
        while not is_over.is_set():
            own_step()

    thread = threading.Thread(target=train_until_over)
    with memtrace.record(tmp_path / "run.memtrace", flush_seconds=0.01) as recording:
        thread.start()
        try:
            for number in range(10):
                step()
                action = (leave, train, leave_by_exception)[number % 3]
                assert exit_code(in_child(recording, action)) == 0
        finally:
            is_over.set()
            thread.join()
    trace = memtrace.load(recording.path)
    assert trace.manifest.finished
    assert len(trace.events) > 0


def test_processes_of_multiprocessing_are_counted_but_not_data_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4, num_workers=1)
    with memtrace.record(tmp_path / "run.memtrace") as recording:
        for (batch,) in loader:
            batch.sum()
        processes = [multiprocessing.get_context("fork").Process(target=os.getpid) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert caplog.text.count("2 child processes were started while recording") == 1
    notes = memtrace.load(recording.path).manifest.coverage.notes
    assert any("2 child processes were started while recording" in note for note in notes)


def test_a_recording_with_data_workers_and_a_manager_mentions_no_child_processes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    loader = DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=4, num_workers=1)
    with memtrace.record(tmp_path / "run.memtrace"):
        for (batch,) in loader:
            batch.sum()
        with multiprocessing.get_context("fork").Manager() as manager:
            manager.list()
    assert "child process" not in caplog.text
