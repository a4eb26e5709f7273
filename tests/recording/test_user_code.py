"""Recordings neither run code of the program's objects nor change what the program can see."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import memtrace
from memtrace.recording.options import ObserverKind
from tests.programs.user_code import PROGRAMS, Program, compiled_model, compiled_submodules, recursion_limit


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_the_program_computes_and_sees_the_same(
    program: Program, observer: ObserverKind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if observer == "dispatch" and program in (compiled_model, compiled_submodules, recursion_limit):
        pytest.skip("torch.compile compiles nothing under a dispatch mode, whose Python functions need frames")
    program()  # what torch prepares and warns about at first use
    torch.manual_seed(1)
    expected = program()
    torch.manual_seed(1)
    with memtrace.record(tmp_path / "run.memtrace", observer=observer) as recording:
        actual = program()
    assert actual == expected
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert memtrace.load(recording.path).manifest.coverage.notes == ()
