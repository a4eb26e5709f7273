"""Benchmark of the pipeline simulator: seconds per schedule for many workers and micro-batches.

    python benchmarks/pipeline.py                 # 64 workers, 512 micro-batches (and 128, 256 for the growth)

Each row is one schedule: building its table, and simulating times and memory with uneven stages and a network.
"growth" is the exponent of seconds in the number of actions between N / 4 and N micro-batches; 1 is linear.
"""

from __future__ import annotations

import argparse
import math
import time

from memtrace.pipeline.costs import Network, StageCosts
from memtrace.pipeline.memory_rules import TORCH
from memtrace.pipeline.schedules.registry import ScheduleChoice, all_schedule_choices
from memtrace.pipeline.simulation.simulator import simulate_schedule
from memtrace.pipeline.simulation.worker_memory import simulate_memory


def make_uneven_stages(num_stages: int) -> list[StageCosts]:
    """Stages with different durations, so that no two workers run in lockstep."""
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


def time_schedule(choice: ScheduleChoice, workers: int, microbatches: int) -> tuple[int, float]:
    """Number of actions, and seconds to build and simulate one schedule."""
    begin = time.perf_counter()
    schedule = choice.build(workers, microbatches)
    network = Network(latency_s=0.01, seconds_per_byte=1e-4)
    simulate_memory(simulate_schedule(schedule, make_uneven_stages(schedule.num_stages), network=network), TORCH)
    return schedule.num_actions, time.perf_counter() - begin


def main() -> None:
    """Print one row per schedule."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--microbatches", type=int, default=512)
    arguments = parser.parse_args()
    sizes = [arguments.microbatches // 4, arguments.microbatches // 2, arguments.microbatches]
    print(f"{'schedule':28} {'actions':>9} {'seconds':>8} {'us/action':>13} {'growth':>7}")
    total = 0.0
    for choice in all_schedule_choices(arguments.workers, arguments.microbatches):
        measurements = [time_schedule(choice, arguments.workers, size) for size in sizes]
        actions, seconds = measurements[-1]
        growth = math.log(seconds / measurements[0][1]) / math.log(actions / measurements[0][0])
        total += seconds
        print(f"{choice!s:28} {actions:9,} {seconds:8.2f} {1e6 * seconds / actions:13.1f} {growth:7.2f}")
    print(f"{'all':28} {'':9} {total:8.2f}")


if __name__ == "__main__":
    main()
