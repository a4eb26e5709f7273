"""The proof of a plan: the program is recorded, planned, recorded again with the plan, and compared."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memtrace.errors import MemtraceError
from memtrace.execution.losses import read_losses
from memtrace.planning.plan import Plan, StepCost, write_plan
from memtrace.planning.recorded_step import choose_step
from memtrace.trace import Trace, load

_NUM_LINES: Final = 3
"""Lines of the program's last output that an error repeats."""


@dataclass(frozen=True)
class Proof:
    """A plan, and what a run of the program with the plan measured."""

    plan: Plan
    measured: StepCost
    """The step of the second recording that `choose_step` returns."""
    peak_error: float
    """(measured - predicted) / predicted peak."""
    step_error: float | None
    """The same of the duration of a step; None: unknown."""
    num_losses: int
    """Losses that the program computed in the run with the plan."""
    num_equal_losses: int
    """How many of them equal those of the first run bit by bit."""


def prove_plan(program: Sequence[str], make_plan: Callable[[Trace], Plan], folder: Path) -> Proof:
    """Record a program, plan, apply the plan, record again, and compare.

    Args:
        program: The script and its arguments.
        make_plan: Makes the plan from the first recording.
        folder: Where the traces ``before.memtrace`` and ``after.memtrace`` and the plan ``plan.json`` are written.

    Raises:
        MemtraceError: The program failed, or no plan could be made or applied.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before, after, plan_file = folder / "before.memtrace", folder / "after.memtrace", folder / "plan.json"
    expected = _record(program, before)
    plan = make_plan(load(before))
    write_plan(plan, plan_file)
    losses = _record(program, after, "--apply", str(plan_file))
    measured = choose_step(load(after), plan.device).cost
    return Proof(
        plan=plan,
        measured=measured,
        peak_error=measured.peak_bytes / plan.predicted.peak_bytes - 1,
        step_error=_relative_error(measured.step_ns, plan.predicted.step_ns),
        num_losses=len(losses),
        num_equal_losses=sum(one == other for one, other in zip(expected, losses, strict=False)),
    )


def _relative_error(measured: int | None, predicted: int | None) -> float | None:
    return None if measured is None or not predicted else measured / predicted - 1


def _record(program: Sequence[str], trace: Path, *options: str) -> tuple[str, ...]:
    """Record a program in a process of its own and return its losses."""
    losses = trace.with_suffix(".losses.json")
    command = [sys.executable, "-W", "always", "-m", "memtrace.cli", "record", "-o", str(trace)]
    result = subprocess.run(
        [*command, "--losses", str(losses), *options, *program],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False,
    )  # fmt: skip
    refused = next((line for line in result.stdout.splitlines() if "the plan was not applied" in line), None)
    if refused is not None:
        raise MemtraceError(refused[refused.index("the plan was not applied") :])
    if result.returncode != 0:
        last_lines = " | ".join(result.stdout.strip().splitlines()[-_NUM_LINES:])
        raise MemtraceError(f"{' '.join(program)} ended with exit code {result.returncode}: {last_lines}")
    return read_losses(losses)
