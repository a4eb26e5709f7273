"""Findings on programs that carry their own fixes: the edited program has the predicted peak.

``benchmarks/findings_precision.py`` runs all programs; these are one of each kind.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs.edits import read_programs

ROOT = Path(__file__).parents[2]
SAMPLE = (
    "contrastive_clone",
    "gradients_zeroed",
    "held_logits_module",
    "evaluation_with_grad",
    "accumulation_predictions",
    "lstm_hidden_not_detached",
    "moco_queue",
)


def run_programs(*names: str, benchmark: str = "findings_precision") -> str:
    """Return what a benchmark prints about some programs."""
    command = [sys.executable, ROOT / f"benchmarks/{benchmark}.py", *names]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


@pytest.mark.slow
def test_savings_of_the_sample_are_those_of_the_edited_programs() -> None:
    output = run_programs(*SAMPLE)
    assert f"{len(SAMPLE)} programs" in output
    assert "FALSE" not in output and "MISSED" not in output, output
    assert "lower bounds above a peak: 0" in output


@pytest.mark.slow
def test_live_bytes_equal_the_reachable_tensors_and_numpys_memory() -> None:
    output = run_programs("mlp_clean", "shared_buffer_numpy", benchmark="peaks")
    assert "live tensors: 2 of 2 equal" in output, output
    assert "tracemalloc (NumPy): 1 of 1 equal" in output, output


def test_every_edit_changes_its_program() -> None:
    programs = read_programs()
    assert len(programs) >= 40
    for program in programs:
        compile(program.source, str(program.path), "exec")
        for edit in program.edits:
            assert program.apply(edit) != program.source
            compile(program.apply(edit), str(program.path), "exec")
