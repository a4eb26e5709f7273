"""Real pipelines of four processes beside what the trace of one process predicts for them.

    python benchmarks/pipeline_measured.py            # the table of all schedules, then the demonstration of a cut
    python benchmarks/pipeline_measured.py --blocks 6 --schedule torch:gpipe --schedule chimera

Every schedule is run by ``examples/pipeline/run.py`` (gloo, on this machine) and recorded; ``torch:`` are those of
torch.distributed.pipelining, the others tables that the executor runs. Peaks are requested bytes. The demonstration
cuts the model badly on purpose, asks the planner for a cut that balances memory, and runs both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import memtrace
from memtrace.pipeline.compare import Comparison, compare
from memtrace.pipeline.from_trace import TraceCosts, trace_costs
from memtrace.pipeline.measured import Measured, measured
from memtrace.pipeline.partition import MEMORY
from memtrace.pipeline.plan import Setting, predict
from memtrace.pipeline.recorded import RankActions
from memtrace.pipeline.schedules.registry import parse_choice

RUN = Path(__file__).parent.parent / "examples" / "pipeline" / "run.py"
SCHEDULES = (
    "torch:gpipe", "torch:dapple", "torch:interleaved", "gpipe", "dapple", "interleaved", "chimera", "chimera:f=2",
    "gems", "zb-h1", "zb-h2", "zb-v", "dualpipe", "dualpipe-v",
)  # fmt: skip


def run(folder: Path, arguments: argparse.Namespace, schedules: list[str], cut: list[int] | None = None) -> Any:
    """Run and record ``schedules``; what run.py found of their gradients."""
    command = [sys.executable, str(RUN), "--workers", str(arguments.workers), "--record", str(folder)]
    command += ["--microbatches", str(arguments.microbatches), "--blocks", str(arguments.blocks)]
    command += [word for schedule in schedules for word in ("--schedule", schedule)]
    command += ["--cut", *map(str, cut)] if cut else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout)


def file_name(schedule: str) -> str:
    return schedule.replace(":", "-").replace("=", "-").replace(",", "-")


def read(folder: Path, schedule: str) -> Measured:
    return measured(memtrace.load(folder / f"{file_name(schedule)}.memtrace"))


def compared(
    found: Measured, costs: TraceCosts, schedule: str, arguments: argparse.Namespace, cut: list[int] | None = None
) -> Comparison:
    """Against the planned table, not the recorded order."""
    table = parse_choice(schedule.removeprefix("torch:")).build(arguments.workers, arguments.microbatches)
    equal = [stage * len(costs.layers) // table.num_stages for stage in range(table.num_stages)]
    return compare(found, costs, table, cut or equal)


def print_table(folder: Path, arguments: argparse.Namespace, gradients: Any) -> None:
    """The largest error of every schedule, and whether in-flight counts and gradients are those expected."""
    costs = trace_costs(memtrace.load(folder / "single.memtrace"))
    print(
        f"{'schedule':18} {'measured peaks, MiB':32} {'predicted':32} {'error':>6}  {'in flight':28} gradients off by"
    )
    for schedule in arguments.schedule:
        found = compared(read(folder, schedule), costs, schedule, arguments)
        ranks = gradients[file_name(schedule)]
        off = max(rank["largest_difference"] / rank["largest_gradient"] for rank in ranks)
        same = all(one.measured_in_flight == one.predicted_in_flight for one in found.workers)
        seen = " ".join(str(one.measured_in_flight) for one in found.workers)
        print(
            f"{schedule:18} {mib(one.measured_peak_bytes for one in found.workers):32} "
            f"{mib(one.predicted_peak_bytes for one in found.workers):32} {100 * found.largest_error:5.1f}%  "
            f"{seen + (' as predicted' if same else ' NOT AS PREDICTED'):28} {off:.1e}"
        )


def mib(values: Any) -> str:
    return " ".join(f"{value / 2**20:.2f}" for value in values)


def demonstrate_cut(folder: Path, arguments: argparse.Namespace) -> None:
    """A cut that gives the last stage most of the model, the planner's, and what each gave."""
    costs = trace_costs(memtrace.load(folder / "single.memtrace"))
    setting = Setting(objective=MEMORY, model=costs.model)
    proposal = predict(costs.layers, arguments.workers, arguments.microbatches, parse_choice("dapple"), setting=setting)
    bad = list(range(0, 2 * arguments.workers, 2))
    print(f"\na cut for dapple, {len(costs.layers)} layers on {arguments.workers} workers")
    peaks = []
    for name, cut in (("deliberate", bad), ("proposed", list(proposal.cut.first_layers))):
        place = folder / name
        run(place, arguments, ["dapple"], cut)
        found = read(place, "dapple")
        against = compared(found, costs, "dapple", arguments, cut)
        peaks.append(max(worker.peak_bytes for worker in found.workers))
        print(
            f"{name:11} first layers {cut}: measured {mib(worker.peak_bytes for worker in found.workers)} MiB, "
            f"predicted {mib(one.predicted_peak_bytes for one in against.workers)} MiB, "
            f"imbalance {found.imbalance:.2f}, longest work of a worker {slowest_ms(found):.1f} ms a step"
        )
    print(f"highest peak: {peaks[1] / peaks[0]:.2f} of what it was")


def slowest_ms(found: Measured) -> float:
    """The actions of the busiest worker in one step."""

    def busy(one: RankActions) -> float:
        return float(np.sum((one.end_ns - one.start_ns)[one.round == found.round])) / 1e6

    return max(busy(one) for one in found.ranks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=14)
    parser.add_argument("--schedule", action="append")
    parser.add_argument("--folder", type=Path, help="keep the traces here")
    arguments = parser.parse_args()
    arguments.schedule = arguments.schedule or list(SCHEDULES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        print_table(folder, arguments, run(folder, arguments, arguments.schedule))
        demonstrate_cut(folder, arguments)


if __name__ == "__main__":
    main()
