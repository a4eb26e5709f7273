"""Programs that run out of memory: what the verdict says, and whether its fix lets the same program run."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import memtrace
from memtrace.planning.fix import Fix
from memtrace.planning.verdict import MAX_FIXES, Verdict, find_verdict
from tests.cuda.settings import on_null_device

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not on_null_device(), reason="needs a device of 2 GiB")]
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Case:
    """A program of ``tests/programs/out_of_memory.py``, and a fix of it."""

    program: str
    sentence: str
    """Part of the verdict."""
    what: str
    """Part of the fix."""
    fix: str
    """Name of the fix in the program; a setting of the allocator is taken from the fix itself."""


CASES = (
    Case("forward", "in forward: a request for 72.0 MiB", "Recompute Net.blocks.*", "checkpoint"),
    Case("forward", "The optimizer had no state yet", "4 micro-batches", "4"),
    Case("backward", "in backward: a request for 281 MiB", "2 micro-batches", "2"),
    Case("optimizer_state", "of state, of which 336 MiB did not exist yet", "Update each parameter", "in-backward"),
    Case("optimizer_temporaries", "of temporary tensors", "fused implementation", "fused"),
    Case("optimizer_temporaries", "in the optimizer step", "Update each parameter", "in-backward"),
    Case("fragmentation", "No memory was missing", "settings of the CUDA allocator", ""),
    Case("another_process", "were in use outside torch's allocator", "Stop the other processes", "alone"),
    Case("too_large", "could not have served it", "Check the shape", "shape"),
)


def run(program: str, trace: Path, fix: str = "", allocator: str = "") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"NULLCUDA_MEMORY": "2GiB", "PYTORCH_CUDA_ALLOC_CONF": allocator}
    command = [sys.executable, "-m", "tests.programs.out_of_memory", program, str(trace), *([fix] if fix else [])]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Verdict]:
    """The verdicts on the programs without a fix."""
    folder, found = tmp_path_factory.mktemp("failures"), {}
    for program in dict.fromkeys(case.program for case in CASES):
        failed = run(program, folder / program)
        assert "OutOfMemoryError" in failed.stderr, failed.stderr
        found[program] = find_verdict(memtrace.load(folder / program))
    return found


def find_fix(verdict: Verdict, what: str) -> Fix:
    return next(fix for fix in verdict.fixes if what in fix.what)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.program}-{case.fix or 'setting'}")
def test_a_program_that_ran_out_of_memory_runs_with_the_fix(
    case: Case, verdicts: dict[str, Verdict], tmp_path: Path
) -> None:
    verdict = verdicts[case.program]
    assert verdict.device == "cuda:0" and len(verdict.fixes) <= MAX_FIXES
    assert case.sentence in " ".join(verdict.sentences)
    fix = find_fix(verdict, case.what)
    assert fix.is_enough or case.program == "too_large"
    allocator = "" if case.fix else (fix.paste or "").partition("=")[2]
    again = run(case.program, tmp_path / "again.memtrace", case.fix, allocator)
    assert again.returncode == 0 and "completed" in again.stdout, again.stderr


def test_a_fix_that_is_not_enough_is_not_called_enough(verdicts: dict[str, Verdict], tmp_path: Path) -> None:
    fix = find_fix(verdicts["optimizer_state"], "fused implementation")
    assert fix.is_enough is False
    assert "OutOfMemoryError" in run("optimizer_state", tmp_path / "again.memtrace", "fused").stderr
