"""What entering and leaving a recording costs, whether anything piles up over many recordings, and the import time.

    python benchmarks/enter_leave.py [--recordings 200] [--observer native]

Each recording is of one small training step. Prints the wall and processor time to enter and to leave, the same with a
large number of live Python objects and tensors, and the growth of threads, descriptors, hooks and resident memory.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import nn

import memtrace
from memtrace.recording.options import ObserverKind


def make_step() -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 32)).sum().backward()
        optimizer.step()

    return step


@dataclass(frozen=True)
class Times:
    """Milliseconds of wall and of processor time, the latter of all threads."""

    enter: float
    leave: float
    enter_cpu: float
    leave_cpu: float


def clocks() -> tuple[float, float]:
    return 1e3 * time.perf_counter(), 1e3 * time.process_time()


def time_recording(step: Callable[[], None], path: Path, observer: ObserverKind) -> Times:
    """Time a recording of one step."""
    started = clocks()
    with memtrace.record(path, observer=observer):
        entered = clocks()
        step()
        leaving = clocks()
    left = clocks()
    shutil.rmtree(path)
    return Times(entered[0] - started[0], left[0] - leaving[0], entered[1] - started[1], left[1] - leaving[1])


def resources() -> dict[str, int]:
    """What a recording must give back."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "gc callbacks": len(gc.callbacks),
        "resident KiB": int(status["VmRSS"].split()[0]),
    }


def import_milliseconds(module: str, *, after: str) -> float:
    """Milliseconds that ``import module`` takes in a new process that has imported ``after``."""
    code = f"import {after}, time; t = time.perf_counter(); import {module}; print(1e3 * (time.perf_counter() - t))"
    return min(
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    )


def report(title: str, times: list[Times]) -> None:
    for field in fields(Times):
        values = [getattr(item, field.name) for item in times]
        print(f"{title}: {field.name:<9} average {statistics.mean(values):6.1f} ms, best {min(values):6.1f} ms, "
              f"largest {max(values):6.1f} ms")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=int, default=200)
    parser.add_argument("--observer", choices=["native", "dispatch"], default="native")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, python {sys.version.split()[0]}, {options.observer} observer")
    print(f"import memtrace:         {import_milliseconds('memtrace', after='sys'):6.1f} ms")
    print(f"import memtrace.recording.session after torch: "
          f"{import_milliseconds('memtrace.recording.session', after='torch'):6.1f} ms")  # fmt: skip
    step = make_step()
    with tempfile.TemporaryDirectory() as folder:

        def time_recordings(count: int) -> list[Times]:
            return [time_recording(step, Path(folder) / "run.memtrace", options.observer) for _ in range(count)]

        report("first recording", time_recordings(1))
        time_recordings(10)
        before = resources()
        report(f"{options.recordings} recordings", time_recordings(options.recordings))
        after = resources()
        print("growth: " + ", ".join(f"{name} {after[name] - before[name]:+d}" for name in before))
        lists: list[list[int]] = [[] for _ in range(1_000_000)]
        report(f"with {len(lists):,} more objects", time_recordings(20))
        tensors = [torch.zeros(8) for _ in range(20_000)]
        report(f"and with {len(tensors):,} live tensors", time_recordings(20))


if __name__ == "__main__":
    main()
