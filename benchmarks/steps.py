"""Steps found without marks in eight real programs of 30 steps: against their optimizer, and how stable they are.

``allocations only`` looks at the same run recorded without accesses, as a CUDA snapshot would have it: boundaries then
lie where the least is live, so that a GAN's round may begin with its other half.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import memtrace  # noqa: E402
from memtrace.analysis.detection import detect  # noqa: E402
from memtrace.analysis.leaks import leaks  # noqa: E402
from memtrace.analysis.stability import law, stability, step_pattern  # noqa: E402
from tests.programs.training import PROGRAMS, not_iterative, recorded  # noqa: E402


def main() -> None:
    head = ("program", "steps", "agree", "conf.", "events", "stable: events", "bytes", "roles", "allocations",
            "leaks", "allocations only")  # fmt: skip
    print(" | ".join(head))
    with tempfile.TemporaryDirectory() as folder:
        for number, program in enumerate(PROGRAMS):
            trace = recorded(program.run, Path(folder) / f"{number}.memtrace")
            found, even, told = step_pattern(trace, from_events=True), stability(trace), law(trace)
            with memtrace.record(Path(folder) / f"{number}-bare.memtrace", accesses=False):
                program.run()
            bare = step_pattern(memtrace.load(Path(folder) / f"{number}-bare.memtrace"), from_events=True)
            print(
                f"{program.name} | {found.detection.num_steps} | {found.agreement:.1%} | "
                f"{found.detection.confidence:.2f} | {found.detection.period_events} | {even.usual_events:.1%} | "
                f"{even.usual_bytes:.1%} | {even.usual_roles:.1%} | {told.constant} + {told.per_step} n"
                f"{'' if told.exact else ' (usual)'} | {len(leaks(trace).leaks)} | "
                f"{bare.detection.num_steps}, {bare.agreement:.1%}"
            )
        found = detect(recorded(not_iterative, Path(folder) / "none.memtrace"))
        print(f"not iterative | {found.num_steps} | - | {found.confidence:.2f}")


if __name__ == "__main__":
    main()
