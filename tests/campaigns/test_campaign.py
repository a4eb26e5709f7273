"""Commands on mutated traces and files: an answer or one sentence, never a traceback. The full campaign: ``mutate.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", ["--traces", "--files", "--plans"])
@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_commands_answer_or_refuse_mutated_inputs(kind: str, count: int, data: Path) -> None:
    """A program of its own: it limits its memory, and a crash must not end the tests."""
    others = [word for other in ("--traces", "--files") if other != kind for word in (other, "0")]
    arguments = [kind, str(count), *others, "--seed", "5", "--slow-every", "10", "--share"]
    process = subprocess.run(
        [sys.executable, "-m", "tests.campaigns.mutate", *arguments],
        capture_output=True, text=True, check=False, timeout=600, cwd=ROOT,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr
    assert f"{count} inputs" in process.stdout and ", 0 faults" in process.stdout
