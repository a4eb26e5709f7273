"""Plans carried out on six programs: predicted and measured peak and step time.

    python benchmarks/plans.py --kind recompute
    python benchmarks/plans.py --kind recompute --size small --program GPT
    python benchmarks/plans.py --kind offload --device cuda --program GPT-2      # needs a GPU

Every program (tests/programs/planned.py) is recorded in a process of its own with ``memtrace record``, planned, and
recorded again with ``memtrace record --apply``. Two plans are tried: the lowest peak, and the peak halfway between it
and the recorded one. Peaks are requested bytes, those of the second recording. Losses of both runs are compared bit by
bit. Steps are also timed without recording, steps with and without the plan in alternation, because the load of the
machine changes over minutes: the measured step time is the recorded one times the median ratio of neighbours.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

import memtrace
from memtrace import Plan, Trace
from memtrace.analysis.bandwidth import CopyBandwidths
from memtrace.errors import MemtraceError
from memtrace.execution.host_bandwidth import measure_bandwidths
from memtrace.execution.losses import read_losses
from memtrace.planning import plan_offload, plan_recompute
from memtrace.planning.recorded_step import choose_step
from memtrace.units import format_bytes, format_duration

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.programs.planned import PROGRAMS, PlannedProgram, Training, gpt, on_device, train  # noqa: E402

Planner = Callable[[Trace, int | None], Plan]


@cache
def bandwidths_here(device: str) -> CopyBandwidths:
    """Return the measured costs of copies to host memory."""
    return measure_bandwidths(device)


def planned_device(trace: Trace) -> str:
    """Return the GPU of a trace, or the CPU."""
    return next((name for name in trace.devices if name != "cpu"), "cpu")


PLANNERS: dict[str, Planner] = {
    "recompute": lambda trace, target_bytes: (
        plan_recompute(trace, device=planned_device(trace), target_bytes=target_bytes).plan
    ),
    "offload": lambda trace, target_bytes: plan_offload(
        trace,
        device=planned_device(trace),
        bandwidths=bandwidths_here(planned_device(trace)),
        target_bytes=target_bytes,
    ),
}
"""Makes the plan for a peak; None: the lowest."""
STEPS = 6
"""Recorded steps."""
GPT2 = PlannedProgram(
    "GPT-2",
    lambda steps: gpt(steps, width=768, layers=12, heads=12, length=256, vocabulary=50257, batch=1),
    lambda steps: gpt(steps, width=768, layers=12, heads=12, length=1024, vocabulary=50257, batch=8),
)
"""As large as the smallest GPT-2; for a GPU."""


@dataclass(frozen=True)
class Row:
    """One plan: what was predicted and what was measured."""

    program: str
    plan: Plan
    measured_bytes: int
    measured_ns: float
    has_equal_losses: bool

    @property
    def peak_error(self) -> float:
        """Share by which the measured peak differs from the predicted one."""
        return self.measured_bytes / self.plan.predicted.peak_bytes - 1

    @property
    def step_error(self) -> float:
        """The same of the step time."""
        return self.measured_ns / (self.plan.predicted.step_ns or 1) - 1


def synchronize(device: str) -> None:
    """Wait until a GPU has done its work."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def record(
    name: str, size: str, device: str, folder: Path, tag: str, plan: Plan | None = None
) -> tuple[Trace, tuple[str, ...]]:
    """Record a program in a process of its own and return its trace and its losses."""
    trace, losses = folder / f"{tag}.memtrace", folder / f"{tag}.json"
    command = [sys.executable, "-m", "memtrace.cli", "record", "-o", str(trace), "--losses", str(losses)]
    if plan is not None:
        memtrace.planning.write_plan(plan, folder / f"{tag}.plan.json")
        command += ["--apply", str(folder / f"{tag}.plan.json")]
    command += [__file__, "--run", name, "--size", size, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode or "not applied" in done.stderr:
        sys.exit(done.stderr[-3000:])
    return memtrace.load(trace), read_losses(losses)


def time_ratio(build: Callable[[int], Training], device: str, plan: Plan, rounds: int) -> float:
    """Return the median ratio of the times of neighbouring steps with and without a plan."""
    training = on_device(build(1), device)
    ratios = []
    for number in range(rounds + 1):
        seconds = []
        for is_planned in (False, True):
            with memtrace.apply(plan, training.model, training.optimizer) if is_planned else nullcontext():
                synchronize(device)
                start = time.perf_counter()
                train(training)
                synchronize(device)
                seconds.append(time.perf_counter() - start)
        if number:  # the first round warms up
            ratios.append(seconds[1] / seconds[0])
    return statistics.median(ratios)


def try_program(
    program: PlannedProgram, planner: Planner, size: str, device: str, rounds: int, folder: Path
) -> Iterator[Row]:
    """Yield a row for the plan of the lowest peak and for the plan halfway to it."""
    before, losses = record(program.name, size, device, folder, "before")
    lowest = planner(before, None)
    halfway = (lowest.predicted.peak_bytes + lowest.recorded.peak_bytes) // 2
    for tag, plan in (("lowest", lowest), ("halfway", planner(before, halfway))):
        after, losses_with_plan = record(program.name, size, device, folder, tag, plan)
        measured = choose_step(after, plan.device).cost
        ratio = time_ratio(getattr(program, size), device, plan, rounds)
        yield Row(
            f"{program.name}, {tag}",
            plan,
            measured.peak_bytes,
            (plan.recorded.step_ns or 0) * ratio,
            losses_with_plan == losses and len(losses) > 0,
        )


def print_rows(rows: list[Row]) -> None:
    """Print one line for each plan."""
    head = (
        "program, plan",
        "recorded",
        "predicted",
        "measured",
        "error",
        "step",
        "predicted",
        "measured",
        "error",
        "losses",
    )
    lines = [head]
    for row in rows:
        recorded, predicted = row.plan.recorded, row.plan.predicted
        lines.append(
            (
                row.program,
                format_bytes(recorded.peak_bytes),
                format_bytes(predicted.peak_bytes),
                format_bytes(row.measured_bytes),
                f"{row.peak_error:+.2%}",
                format_duration(recorded.step_ns),
                format_duration(predicted.step_ns),
                format_duration(row.measured_ns),
                f"{row.step_error:+.1%}",
                "equal" if row.has_equal_losses else "DIFFERENT",
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=list(PLANNERS), default="recompute")
    parser.add_argument("--size", choices=("small", "full"), default="full")
    parser.add_argument("--program", action="append", choices=[program.name for program in (*PROGRAMS, GPT2)])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of steps that are timed")
    parser.add_argument("--run", help="only run this program (what is recorded)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.run:
        program = next(each for each in (*PROGRAMS, GPT2) if each.name == arguments.run)
        train(on_device(getattr(program, arguments.size)(STEPS), arguments.device))
        return
    names = arguments.program or [program.name for program in PROGRAMS]
    chosen = [program for program in (*PROGRAMS, GPT2) if program.name in names]
    rows: list[Row] = []
    for program in chosen:
        with tempfile.TemporaryDirectory() as folder:
            try:
                planner = PLANNERS[arguments.kind]
                rows += try_program(program, planner, arguments.size, arguments.device, arguments.rounds, Path(folder))
            except MemtraceError as error:
                print(f"{program.name}: {error}")
    print_rows(rows)


if __name__ == "__main__":
    main()
