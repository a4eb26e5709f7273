"""Predictions of ``memtrace plan whatif`` against second real runs: peak memory of a step, on the CPU.

    python benchmarks/what_if.py [--width 256] [--ranks 2,4]

For an MLP, a CNN and a transformer: batch 8 to 16 and 32, bfloat16 autocast, accumulation over 4 micro-batches, SGD to
AdamW, foreach to fused AdamW, and FSDP2 over processes that communicate through Gloo.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from memtrace.planning import plan_whatif
from memtrace.planning.recorded_step import choose_step
from memtrace.planning.whatif_changes import (
    Accumulate,
    Autocast,
    Change,
    ChangeOptimizer,
    FuseOptimizer,
    ScaleBatch,
    Shard,
)
from memtrace.trace import Trace
from memtrace.units import format_bytes
from tests.programs.changed import MODELS, UNITS, Setup, record_sharded, record_training, sharded_peaks

TIMEOUT_S = 900


def comparisons(first: Setup, ranks: list[int]) -> list[tuple[str, Setup, Setup, Change]]:
    """Return for each change its name, the two programs, and the what-if that leads from one to the other."""
    foreach = replace(first, optimizer="adamw", implementation="foreach")
    adamw = replace(first, optimizer="adamw")
    found: list[tuple[str, Setup, Setup, Change]] = [
        ("batch 8 -> 16", first, replace(first, batch=16), ScaleBatch(2)),
        ("batch 8 -> 32", first, replace(first, batch=32), ScaleBatch(4)),
        ("SGD -> AdamW", first, adamw, ChangeOptimizer("adamw", "for-loop")),
        ("foreach -> fused", foreach, replace(foreach, implementation="fused"), FuseOptimizer()),
        ("accumulate 4", first, replace(first, num_microbatches=4), Accumulate(4)),
        ("bf16 autocast", first, replace(first, autocast=True), Autocast("bfloat16")),
    ]
    for num_ranks in ranks:
        second = replace(adamw, num_ranks=num_ranks, num_steps=8)
        found.append((f"FSDP2, {num_ranks} ranks", adamw, second, Shard("fsdp", num_ranks, UNITS[first.model])))
    return found


def main() -> None:
    """Print one row per model and change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=256, help="size of the models")
    parser.add_argument("--ranks", default="2,4", help="numbers of FSDP ranks; empty: none")
    parser.add_argument("--models", default=",".join(MODELS))
    options = parser.parse_args()
    ranks = [int(text) for text in options.ranks.split(",") if text]
    print(f"{'model':5} {'change':16} {'recorded':>9} {'predicted':>9} {'measured':>9} {'error':>7}")
    with tempfile.TemporaryDirectory(prefix="memtrace-") as folder:
        for model in options.models.split(","):
            traces: dict[Setup, Trace] = {}
            rows = comparisons(Setup(model, width=options.width), ranks)
            for number, (name, first, second, change) in enumerate(rows):
                if first not in traces:
                    traces[first] = record_training(first, Path(folder, f"{model}-{number}-first"))
                path = Path(folder, f"{model}-{number}-second")
                is_sharded = second.num_ranks > 1
                trace = record_sharded(second, path, TIMEOUT_S) if is_sharded else record_training(second, path)
                result = plan_whatif(traces[first], [change], device="cpu")
                measured = choose_step(trace, "cpu").cost.peak_bytes
                predicted, note = result.predicted.peak_bytes, ""
                if is_sharded:
                    high, measured = measured, min(sharded_peaks(trace))
                    note = f"  (with what Gloo frees late: {format_bytes(high)})" if high > 1.01 * measured else ""
                print(
                    f"{model:5} {name:16} {format_bytes(result.recorded.peak_bytes):>9} {format_bytes(predicted):>9} "
                    f"{format_bytes(measured):>9} {100 * (predicted / measured - 1):+6.2f}%{note}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
