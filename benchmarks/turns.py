"""A step with recording against the same step without, in turns within one recording that is paused in between.

Each turn consists of four groups of steps in random order: one recorded and three while the recording is paused. The
groups that are not recorded show the noise. The first step of a group does not count. All ratios are against all steps
that were not recorded.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import memtrace

sys.path.insert(0, str(Path(__file__).parent))
from overhead import Step, operator_bound, print_result, realistic

PAUSED = ("nothing_1", "nothing_2", "nothing_3")


def measure(step: Step, turns: int, steps: int, stacks: bool, folder: Path) -> dict[str, object]:
    times: dict[str, list[float]] = {group: [] for group in ("recorded", *PAUSED)}
    order = list(times)
    chance = random.Random(0)
    for _ in range(2):
        step()
    with memtrace.record(folder / "run.memtrace", stacks=stacks) as recording:
        controls = recording._recorder.pauses  # type: ignore[union-attr]
        for _ in range(turns):
            chance.shuffle(order)
            for group in order:
                if group == "recorded" and not recording.is_recording:
                    controls.resume()
                elif group != "recorded" and recording.is_recording:
                    controls.pause()
                step()
                for _ in range(steps):
                    began = time.perf_counter()
                    step()
                    times[group].append(time.perf_counter() - began)
    plain = [seconds for group in PAUSED for seconds in times[group]]
    return {
        group: {
            "median": statistics.median(values) / statistics.median(plain),
            "mean": statistics.mean(values) / statistics.mean(plain),
            "fifth_percentile": statistics.quantiles(values, n=20)[0] / statistics.quantiles(plain, n=20)[0],
        }
        for group, values in times.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=45)
    parser.add_argument("--stacks", action="store_true", help="Record call stacks.")
    parser.add_argument("--only", choices=("operator_bound", "realistic"), default="realistic")
    arguments = parser.parse_args()
    step, steps = (realistic("cpu"), 2) if arguments.only == "realistic" else (operator_bound(), 20)
    with tempfile.TemporaryDirectory() as folder:
        print_result(measure(step, arguments.turns, steps, arguments.stacks, Path(folder)))


if __name__ == "__main__":
    main()
