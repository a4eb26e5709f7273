"""Measured peaks of real pipelines in four processes, and their prediction from a trace of one process.

    python benchmarks/pipeline_measured.py            # all schedules, then a badly and a well partitioned model
    python benchmarks/pipeline_measured.py --blocks 6 --schedule torch:gpipe --schedule chimera

``examples/pipeline/run.py`` runs and records every schedule (gloo, on this machine); ``torch:`` schedules are those of
torch.distributed.pipelining, its executor runs the others. Peaks are requested bytes. The second part partitions the
model badly on purpose, asks the planner for a partition that balances memory, and runs both.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import memtrace
from memtrace.pipeline.layer_costs import MeasuredLayers, measure_layer_costs
from memtrace.pipeline.measured import measure_pipeline
from memtrace.pipeline.partition import MEMORY
from memtrace.pipeline.plan import PlanSettings, predict_schedule
from memtrace.pipeline.prediction import PipelineComparison, predict_recorded_pipeline
from memtrace.pipeline.recorded import last_complete_step, recorded_actions
from memtrace.pipeline.schedules.registry import parse_schedule_choice

RUN = Path(__file__).parent.parent / "examples" / "pipeline" / "run.py"
SCHEDULES = (
    "torch:gpipe", "torch:1f1b", "torch:interleaved", "gpipe", "1f1b", "pipedream", "pipedream-2bw",
    "pipedream-2bw:update_every=4", "interleaved", "chimera", "chimera:f=2", "gems", "zb-h1", "zb-h2",
    "zb-v", "dualpipe", "dualpipe-v",
)  # fmt: skip


def record_schedules(
    folder: Path, arguments: argparse.Namespace, schedules: list[str], first_layers: list[int] | None = None
) -> Any:
    """Run and record ``schedules``; returns the differences that run.py prints."""
    command = [sys.executable, str(RUN), "--workers", str(arguments.workers), "--record", str(folder)]
    command += ["--microbatches", str(arguments.microbatches), "--blocks", str(arguments.blocks)]
    command += [word for schedule in schedules for word in ("--schedule", schedule)]
    command += ["--partition", *map(str, first_layers)] if first_layers else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return json.loads(done.stdout)


def file_name(schedule: str) -> str:
    """The name of the trace that run.py records for a schedule, without its suffix."""
    return schedule.replace(":", "-").replace("=", "-").replace(",", "-")


def load_recorded(folder: Path, schedule: str) -> memtrace.Trace:
    """Open the trace of a schedule."""
    return memtrace.load(folder / f"{file_name(schedule)}.memtrace")


def compare_planned(
    trace: memtrace.Trace,
    costs: MeasuredLayers,
    schedule: str,
    arguments: argparse.Namespace,
    first_layers: list[int] | None = None,
) -> PipelineComparison:
    """Compare a recorded pipeline with the schedule that was planned, not with the recorded order."""
    table = parse_schedule_choice(schedule.removeprefix("torch:")).build(arguments.workers, arguments.microbatches)
    equal = [stage * len(costs.layers) // table.num_stages for stage in range(table.num_stages)]
    return predict_recorded_pipeline(trace, costs, schedule=table, first_layers=first_layers or equal).comparison


def print_schedules(folder: Path, arguments: argparse.Namespace, differences: Any) -> None:
    """Print the prediction error of every schedule, and whether micro-batches in flight and results are right."""
    costs = measure_layer_costs(memtrace.load(folder / "single.memtrace"))
    print(
        f"{'schedule':28} {'measured peaks (MiB)':32} {'predicted peaks (MiB)':32} {'error':>6}  {'in flight':28} "
        "difference of results"
    )
    for schedule in arguments.schedule:
        comparison = compare_planned(load_recorded(folder, schedule), costs, schedule, arguments)
        ranks = differences[file_name(schedule)]
        difference = max(rank["largest_difference"] / rank["largest_value"] for rank in ranks)
        same = all(worker.measured_in_flight == worker.predicted_in_flight for worker in comparison.workers)
        in_flight = " ".join(str(worker.measured_in_flight) for worker in comparison.workers)
        print(
            f"{schedule:28} {mebibytes(worker.measured_peak_bytes for worker in comparison.workers):32} "
            f"{mebibytes(worker.predicted_peak_bytes for worker in comparison.workers):32} "
            f"{100 * (comparison.largest_error or 0):5.1f}%  "
            f"{in_flight + (' as predicted' if same else ' NOT AS PREDICTED'):28} {difference:.1e}"
        )


def mebibytes(values: Iterable[int]) -> str:
    """Several sizes in MiB, for a table."""
    return " ".join(f"{value / 2**20:.2f}" for value in values)


def demonstrate_partition(folder: Path, arguments: argparse.Namespace) -> None:
    """Run a partition that gives the last stage most of the model, then the partition of the planner."""
    costs = measure_layer_costs(memtrace.load(folder / "single.memtrace"))
    settings = PlanSettings(objective=MEMORY, model=costs.model)
    choice = parse_schedule_choice("1f1b")
    proposal = predict_schedule(costs.layers, arguments.workers, arguments.microbatches, choice, settings=settings)
    unbalanced = list(range(0, 2 * arguments.workers, 2))
    print(f"\npartitions of {len(costs.layers)} layers over {arguments.workers} workers, schedule 1f1b")
    peaks = []
    for name, first_layers in (("unbalanced", unbalanced), ("planned", list(proposal.partition.first_layers))):
        record_schedules(folder / name, arguments, ["1f1b"], first_layers)
        trace = load_recorded(folder / name, "1f1b")
        measured = measure_pipeline(trace)
        comparison = compare_planned(trace, costs, "1f1b", arguments, first_layers)
        peaks.append(max(worker.peak_bytes for worker in measured.workers))
        print(
            f"{name:11} first layers {first_layers}: "
            f"measured {mebibytes(worker.peak_bytes for worker in measured.workers)} MiB, "
            f"predicted {mebibytes(worker.predicted_peak_bytes for worker in comparison.workers)} MiB, "
            f"imbalance {measured.imbalance:.2f}, busiest worker {busiest_worker_ms(trace):.1f} ms per step"
        )
    print(f"highest peak: {peaks[1] / peaks[0]:.2f} times that of the unbalanced partition")


def busiest_worker_ms(trace: memtrace.Trace) -> float:
    """Milliseconds of the actions of the busiest rank in the last complete step."""
    ranks = recorded_actions(trace)
    step = last_complete_step(ranks)
    return max(float(np.sum((rank.end_ns - rank.start_ns)[rank.step == step])) / 1e6 for rank in ranks)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=14)
    parser.add_argument("--schedule", action="append")
    parser.add_argument("--folder", type=Path, help="folder that keeps the traces; default: a temporary one")
    arguments = parser.parse_args()
    arguments.schedule = arguments.schedule or list(SCHEDULES)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        print_schedules(folder, arguments, record_schedules(folder, arguments, arguments.schedule))
        demonstrate_partition(folder, arguments)


if __name__ == "__main__":
    main()
