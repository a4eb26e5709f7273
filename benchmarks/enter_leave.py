"""What entering and leaving a recording costs, whether anything piles up over many recordings, and the import time.

    python benchmarks/enter_leave.py [--recordings 200]

Each recording is of one small training step. Prints the median and the largest time to enter and to leave, the time
with a large number of live Python objects, and the growth of threads, descriptors, hooks and resident memory.
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
from pathlib import Path

import torch
from torch import nn

import memtrace


def make_step() -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(16, 32)).sum().backward()
        optimizer.step()

    return step


def time_recording(step: Callable[[], None], path: Path) -> tuple[float, float]:
    """Milliseconds to enter and to leave a recording of one step."""
    started = time.perf_counter()
    with memtrace.record(path):
        entered = time.perf_counter()
        step()
        leaving = time.perf_counter()
    left = time.perf_counter()
    shutil.rmtree(path)
    return 1e3 * (entered - started), 1e3 * (left - leaving)


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


def report(title: str, times: list[tuple[float, float]]) -> None:
    for name, values in zip(("enter", "leave"), zip(*times, strict=True), strict=True):
        print(f"{title}: {name} median {statistics.median(values):6.1f} ms, largest {max(values):6.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=int, default=200)
    num_recordings = parser.parse_args().recordings
    print(f"torch {torch.__version__}, python {sys.version.split()[0]}")
    print(f"import memtrace:         {import_milliseconds('memtrace', after='sys'):6.1f} ms")
    print(f"import memtrace.recording.session after torch: "
          f"{import_milliseconds('memtrace.recording.session', after='torch'):6.1f} ms")  # fmt: skip
    step = make_step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.memtrace"
        report("first recording", [time_recording(step, path)])
        for _ in range(10):
            time_recording(step, path)
        before = resources()
        report(f"{num_recordings} recordings", [time_recording(step, path) for _ in range(num_recordings)])
        after = resources()
        print("growth: " + ", ".join(f"{name} {after[name] - before[name]:+d}" for name in before))
        live: list[list[int]] = [[] for _ in range(2_000_000)]
        report(f"with {len(live):,} more live objects", [time_recording(step, path) for _ in range(20)])


if __name__ == "__main__":
    main()
