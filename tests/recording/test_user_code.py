"""Recordings neither run code of the program's objects nor change what the program can see."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import memtrace
from memtrace.recording.labels import Labeller
from memtrace.recording.observers import ModuleCalls, Observer
from memtrace.recording.observers.dispatch_observer import DispatchObserver
from memtrace.recording.observers.native_observer import NativeObserver
from memtrace.recording.options import ObserverKind
from tests.programs.user_code import PROGRAMS, Program, overridden_methods, recursion_limit


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_the_program_computes_and_sees_the_same(
    program: Program, observer: ObserverKind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if observer == "dispatch" and program is recursion_limit:
        pytest.skip("the functions of the dispatch observer are written in Python, so they need frames of their own")
    program()  # what torch prepares and warns about at first use
    torch.manual_seed(1)
    expected = program()
    torch.manual_seed(1)
    with memtrace.record(tmp_path / "run.memtrace", observer=observer) as recording:
        actual = program()
    if program is recursion_limit and sys.version_info < (3, 11):
        # Python 3.10 counts the call of a hook at the innermost level as well.
        actual = max(actual, expected) if actual == expected - 1 else actual
    assert actual == expected
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert memtrace.load(recording.path).manifest.coverage.notes == ()


def test_an_error_of_a_hook_is_reported_once_and_the_program_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise ValueError("a mistake in memtrace")

    for name in ("label_inputs", "before_optimizer_step", "add_model", "label_computed_gradients"):
        monkeypatch.setattr(Labeller, name, fail)
    torch.manual_seed(0)
    expected = overridden_methods()
    torch.manual_seed(0)
    with memtrace.record(tmp_path / "run.memtrace") as recording:
        actual = overridden_methods()
    assert actual == expected
    assert caplog.text.count("a mistake in memtrace") == 1
    trace = memtrace.load(recording.path)
    assert trace.manifest.finished
    assert [note for note in trace.manifest.coverage.notes if "a mistake in memtrace" in note]
    assert len(trace.events) > 0


def test_an_interrupt_during_a_hook_reaches_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Labeller, "label_inputs", interrupt)
    with memtrace.record(tmp_path / "run.memtrace") as recording, pytest.raises(KeyboardInterrupt):
        nn.Linear(4, 4)(torch.ones(1, 4))
    assert memtrace.load(recording.path).manifest.finished


@pytest.mark.parametrize("observer_type", [NativeObserver, DispatchObserver])
def test_the_hook_of_module_calls_passes_its_errors_on(observer_type: type[Observer]) -> None:
    errors: list[Exception] = []

    def fail(module: nn.Module) -> None:
        raise ValueError("a mistake in memtrace")

    def interrupt(module: nn.Module) -> None:
        raise KeyboardInterrupt

    failing = observer_type().module_hook(ModuleCalls({}, fail, lambda inputs: None, errors.append))
    assert failing(nn.Identity(), (), {}) == -1
    assert [(type(error), str(error)) for error in errors] == [(ValueError, "a mistake in memtrace")]
    interrupted = observer_type().module_hook(ModuleCalls({}, interrupt, lambda inputs: None, errors.append))
    with pytest.raises(KeyboardInterrupt):
        interrupted(nn.Identity(), (), {})
    assert len(errors) == 1


def test_the_stacks_of_the_program_do_not_contain_hooks(tmp_path: Path) -> None:
    with memtrace.record(tmp_path / "run.memtrace") as recording:
        overridden_methods()
    trace = memtrace.load(recording.path)
    files = {frame.file for stack in trace.ops["stack"].dropna().unique() for frame in trace.frames(int(stack))}
    assert files
    assert not [file for file in files if "/memtrace/recording/" in file]
