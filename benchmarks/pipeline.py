"""Seconds to make, simulate and weigh every pipeline schedule, for many workers and micro-batches.

    python benchmarks/pipeline.py                 # D=64 workers, N=512 micro-batches, and N=128 and 256 beside it

Each row is one schedule: making its table, simulating it with uneven stages and a network, and the memory of every
worker over time. "growth" is the exponent of seconds in the number of actions between N / 4 and N: 1 is linear.
"""

from __future__ import annotations

import argparse
import math
import time

from memtrace.pipeline.costs import Network, StageCosts
from memtrace.pipeline.schedules.registry import Choice, all_choices
from memtrace.pipeline.simulation.memory import TORCH, memory
from memtrace.pipeline.simulation.simulate import simulate


def uneven(num_stages: int) -> list[StageCosts]:
    """Stages that differ, so that no two workers are in step."""
    return [
        StageCosts(
            forward_s=1 + 0.01 * (stage % 7),
            input_backward_s=1 + 0.01 * (stage % 5),
            weight_backward_s=0.9,
            parameter_bytes=1000,
            gradient_bytes=1000,
            activation_bytes=100 + stage,
            weight_activation_bytes=50,
            input_bytes=10,
            output_bytes=10,
        )
        for stage in range(num_stages)
    ]


def once(choice: Choice, workers: int, microbatches: int) -> tuple[int, float]:
    """Actions and seconds of one schedule."""
    begin = time.perf_counter()
    schedule = choice.build(workers, microbatches)
    network = Network(latency_s=0.01, seconds_per_byte=1e-4)
    memory(simulate(schedule, uneven(schedule.num_stages), network=network), TORCH)
    return schedule.num_actions, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    arguments = parser.parse_args()
    sizes = [arguments.microbatches // 4, arguments.microbatches // 2, arguments.microbatches]
    print(f"{'schedule':28} {'actions':>9} {'seconds':>8} {'us an action':>13} {'growth':>7}")
    total = 0.0
    for choice in all_choices(arguments.workers, arguments.microbatches):
        found = [once(choice, arguments.workers, size) for size in sizes]
        actions, seconds = found[-1]
        growth = math.log(seconds / found[0][1]) / math.log(actions / found[0][0])
        total += seconds
        print(f"{choice!s:28} {actions:9,} {seconds:8.2f} {1e6 * seconds / actions:13.1f} {growth:7.2f}")
    print(f"{'all':28} {'':9} {total:8.2f}")


if __name__ == "__main__":
    main()
