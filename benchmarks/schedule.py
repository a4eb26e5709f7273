"""What a scheduled recording costs: the time of the steps that are not recorded, and of a pause and a resumption.

Windows of a few steps alternate between no recording and a recording that is paused. The median step of each window
counts, and the ratio of the two windows of each round is printed, next to that of two windows without a recording,
which is noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import memtrace

sys.path.insert(0, str(Path(__file__).parent))
from overhead import Step, operator_bound, realistic


def median_step(step: Step, steps: int, clock: Callable[[], float]) -> float:
    times = []
    for _ in range(steps):
        began = clock()
        step()
        times.append(clock() - began)
    return statistics.median(times)


def spread(values: list[float], digits: int) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), digits),
        "lowest": round(min(values), digits),
        "highest": round(max(values), digits),
    }


def measure(step: Step, rounds: int, steps: int, folder: Path, clock: Callable[[], float]) -> dict[str, Any]:
    paused, nothing, pauses, resumptions = [], [], [], []
    for _ in range(rounds):
        plain = median_step(step, steps, clock)
        with memtrace.record(folder / "run.memtrace", schedule=lambda number: number == 0) as recording:
            step()
            step()
            assert not recording.is_recording
            paused.append(median_step(step, steps, clock) / plain)
            controls = recording._recorder.pauses  # type: ignore[union-attr]
            for work, times in ((controls.resume, resumptions), (controls.pause, pauses)):
                began = clock()
                work()
                times.append(1000 * (clock() - began))
        first = median_step(step, steps, clock)
        nothing.append(median_step(step, steps, clock) / first)
    return {
        "step_ms": round(1000 * median_step(step, steps, clock), 2),
        "paused_ratio": spread(paused, 4),
        "noise_ratio": spread(nothing, 4),
        "resume_ms": spread(resumptions, 1),
        "pause_ms": spread(pauses, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--steps", type=int, default=30, help="steps of a window of the operator-bound program")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of the process, on a machine that is busy")
    parser.add_argument("--only", choices=("operator_bound", "realistic"), help="Measure one of the two programs.")
    arguments = parser.parse_args()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as folder:
        results = {}
        num_threads = torch.get_num_threads()
        programs = {
            "operator_bound": (operator_bound, arguments.steps),
            "realistic": (partial(realistic, arguments.device), max(arguments.steps // 6, 3)),
        }
        for name in [arguments.only] if arguments.only else programs:
            torch.set_num_threads(num_threads)  # the operator-bound program changes it
            create, steps = programs[name]
            step = create()
            median_step(step, 2, clock)
            results[name] = measure(step, arguments.rounds, steps, Path(folder), clock)
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
