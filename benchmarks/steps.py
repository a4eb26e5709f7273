"""Step detection without marks on eight training programs of 30 steps: agreement with the optimizer, and stability.

The column ``from allocations`` repeats detection on the same program recorded without accesses, as a CUDA snapshot
would hold it. Boundaries then lie at memory minima, so that the step of a GAN may begin with either of its two models.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from memtrace.analysis import analyze_steps, detect_steps, find_leaks  # noqa: E402
from memtrace.analysis.step_analysis import find_boundaries  # noqa: E402
from memtrace.units import format_share  # noqa: E402
from tests.programs.training import PROGRAMS, Program, not_iterative, recorded  # noqa: E402

COLUMNS = ("program", "steps", "agreement", "confidence", "events", "stable events", "stable bytes", "stable blocks",
           "allocations", "leaks", "from allocations")  # fmt: skip


def benchmark_row(program: Program, folder: Path) -> tuple[str, ...]:
    """Return the row of one program, which is recorded twice in ``folder``."""
    trace = recorded(program.run, folder / "run.memtrace")
    boundaries, result = find_boundaries(trace, from_events=True), analyze_steps(trace)
    allocations = find_boundaries(
        recorded(program.run, folder / "allocations.memtrace", accesses=False), from_events=True
    )
    assert boundaries.marks is not None and allocations.marks is not None and result.allocation_fit is not None
    fit, stability = result.allocation_fit, result.stability
    return (
        program.name,
        str(boundaries.detected.num_steps),
        format_share(boundaries.marks.agreement),
        f"{boundaries.detected.confidence:.2f}",
        str(boundaries.detected.period_events),
        format_share(stability.events),
        format_share(stability.bytes),
        format_share(stability.blocks),
        f"{fit.constant} + {fit.per_step} n{'' if fit.is_exact else ' (median)'}",
        str(len(find_leaks(trace).leaks)),
        f"{allocations.detected.num_steps}, {format_share(allocations.marks.agreement)}",
    )


def main() -> None:
    print(" | ".join(COLUMNS))
    with tempfile.TemporaryDirectory() as folder:
        for number, program in enumerate(PROGRAMS):
            program_folder = Path(folder, str(number))
            program_folder.mkdir()
            print(" | ".join(benchmark_row(program, program_folder)))
        detected = detect_steps(recorded(not_iterative, Path(folder) / "none.memtrace"))
        print(f"not iterative | {detected.num_steps} | - | {detected.confidence:.2f}")


if __name__ == "__main__":
    main()
