"""The adapter that all integrations share, and what they import."""

from __future__ import annotations

import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import memtrace
from memtrace.analysis import compute_coverage, step_columns
from memtrace.integrations.adapter import RecorderAdapter, protected
from tests.integrations.helpers import range_names, steps_overlap_ranges

FRAMEWORKS = ("lightning", "pytorch_lightning", "transformers", "accelerate", "IPython", "tensorboard", "wandb", "ray")
OWN = {"lightning": (), "pytest_plugin": (), "accelerate": (), "tensorboard": (), "wandb": (), "ipython": ()}
"""The frameworks that importing a module of ``memtrace.integrations`` may import."""


def train(model: torch.nn.Module, num_steps: int = 1) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_importing_memtrace_and_its_integrations_imports_no_framework() -> None:
    code = (
        "import sys, memtrace\n"
        "assert not [name for name in sys.modules if name.startswith('memtrace.integrations')]\n"
        f"for module in {list(OWN)}:\n"
        "    __import__('memtrace.integrations.' + module)\n"
        f"print([name for name in {FRAMEWORKS} if name in sys.modules])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.strip() == "[]"


def test_steps_and_ranges_are_those_that_were_marked(tmp_path: Path) -> None:
    adapter, model = RecorderAdapter(tmp_path / "run.memtrace"), torch.nn.Linear(8, 8)
    adapter.start(model=model)
    train(model)  # before the first mark: belongs to no step
    adapter.begin_step()
    for number in range(3):
        train(model)
        adapter.end_step()
        if number == 1:
            adapter.open_range("validation")
            model(torch.ones(1 << 10, 8))
            adapter.open_range("validation")
            adapter.close_range("validation")
            adapter.close_range("validation")
    adapter.end()
    adapter.end()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert step_columns(trace).step.tolist() == [0, 1, 2]
    assert range_names(trace).count("validation") == 1
    assert not steps_overlap_ranges(trace, "validation")
    before = compute_coverage(trace).baseline_bytes
    assert before is not None and max(step_columns(trace).peak_bytes) - before < 4 * 8 * (1 << 10)


def test_a_second_start_ends_the_first_recording(tmp_path: Path) -> None:
    adapter = RecorderAdapter(tmp_path / "run.memtrace")
    adapter.start()
    adapter.start()
    assert adapter.is_recording
    adapter.end()
    assert memtrace.load(tmp_path / "run-old1.memtrace").manifest.finished
    assert memtrace.load(tmp_path / "run.memtrace").manifest.finished


def test_an_open_range_ends_with_the_recording_and_the_error_is_its_reason(tmp_path: Path) -> None:
    adapter = RecorderAdapter(tmp_path / "run.memtrace")
    adapter.start()
    adapter.open_range("validation")
    adapter.end(ValueError("bad batch"))
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert range_names(trace).count("validation") == 1
    assert "ValueError" in str(trace.manifest.stop_reason)


def test_a_pickled_adapter_starts_a_recording_of_its_own(tmp_path: Path) -> None:
    adapter = RecorderAdapter(tmp_path / "run.memtrace", last_steps=5)
    adapter.start()
    other = pickle.loads(pickle.dumps(adapter))
    assert adapter.is_recording
    assert not other.is_recording
    adapter.end()
    other.start()
    other.end()
    assert memtrace.load(tmp_path / "run.memtrace").manifest.options.last_steps == 5


def test_the_end_of_the_process_closes_a_recording_with_the_error_that_ended_it(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from memtrace.integrations.adapter import RecorderAdapter\n"
        "adapter = RecorderAdapter(sys.argv[1])\n"
        "adapter.start()\n"
        "raise ValueError('bad batch')\n"
    )
    path = tmp_path / "run.memtrace"
    result = subprocess.run(
        [sys.executable, "-c", code, path], capture_output=True, text=True, check=False, timeout=120
    )
    assert "ValueError: bad batch" in result.stderr
    manifest = memtrace.load(path).manifest
    assert manifest.finished
    assert "ValueError" in str(manifest.stop_reason)


class Callback:
    def __init__(self, path: Path) -> None:
        self.adapter = RecorderAdapter(path)
        self.num_calls = 0

    @protected
    def hook(self, error: BaseException | None) -> None:
        self.num_calls += 1
        if error is not None:
            raise error


def test_the_first_error_of_a_hook_is_reported_and_ends_all_hooks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = Callback(tmp_path / "run.memtrace")
    callback.adapter.start()
    with caplog.at_level(logging.WARNING, logger="memtrace"):
        callback.hook(None)
        callback.hook(RuntimeError("changed"))
        callback.hook(RuntimeError("changed"))
    assert callback.num_calls == 2
    (record,) = caplog.records
    assert "RuntimeError: changed" in record.getMessage()
    assert not callback.adapter.is_recording
    assert memtrace.load(tmp_path / "run.memtrace").manifest.finished


def test_an_interrupt_inside_a_hook_reaches_the_program(tmp_path: Path) -> None:
    callback = Callback(tmp_path / "run.memtrace")
    with pytest.raises(KeyboardInterrupt):
        callback.hook(KeyboardInterrupt())
    assert not callback.adapter.is_disabled


def test_a_subscriber_that_fails_is_reported_once_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[int] = []
    ends: list[bool] = []

    def fail(*_: Any) -> None:
        raise RuntimeError("no connection")

    with caplog.at_level(logging.WARNING, logger="memtrace"), memtrace.record(tmp_path / "run.memtrace") as recording:
        recording.subscribe(fail, lambda: ends.append(recording.is_recording))
        recording.subscribe(steps.append, lambda: ends.append(recording.is_recording))
        for _ in range(3):
            train(torch.nn.Linear(8, 8))
            recording.step()
    assert steps == [0, 1, 2]
    assert ends == [False, False]
    assert ["no connection" in record.getMessage() for record in caplog.records] == [True]


def test_a_forked_child_does_not_call_subscribers(tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def ended(*_: int) -> None:
        with calls.open("a") as file:
            file.write(f"{os.getpid()}\n")

    with memtrace.record(tmp_path / "run.memtrace") as recording:
        recording.subscribe(ended, ended)
        if (child := os.fork()) == 0:
            recording.step()
            recording.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(child, 0)
        recording.step()
    assert calls.read_text().split() == [str(os.getpid())] * 2


def test_a_range_of_an_inner_recording_is_in_both_traces(tmp_path: Path) -> None:
    inner = memtrace.record(tmp_path / "inner.memtrace")
    with memtrace.record(tmp_path / "outer.memtrace"), inner, inner.range("warm-up"):
        torch.ones(10)
    for name in ("outer", "inner"):
        assert "warm-up" in range_names(memtrace.load(tmp_path / f"{name}.memtrace"))
