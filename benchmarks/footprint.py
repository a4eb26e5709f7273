"""Bytes per event on disk, and the memory that recording takes in the recorded process.

A small GPT runs for some steps in two processes, one of which records. Each prints how much its resident memory has
grown since the first of those steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

SAMPLES = 5


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmRSS in /proc/self/status")


def run(steps: int, trace: str | None) -> None:
    """The measured process: prints its additional memory in MiB after each fifth of the steps."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import torch
    from gpt import GPT, synthetic_text, train_step

    torch.set_num_threads(1)
    model = GPT(width=64, layers=4, length=32)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(20):
        train_step(model, optimizer, synthetic_text(4, 32))
    before = resident_mib()
    if trace:
        import memtrace

        recording = memtrace.record(trace)
    else:
        recording = nullcontext()
    with recording:
        for step in range(1, steps + 1):
            train_step(model, optimizer, synthetic_text(4, 32))
            if step % (steps // SAMPLES) == 0:
                print(resident_mib() - before, flush=True)


def samples(steps: int, trace: str | None) -> list[float]:
    command = [sys.executable, __file__, "--steps", str(steps), "--run", trace or "-"]
    return [float(line) for line in subprocess.check_output(command, text=True).split()]


def sizes(trace: Path) -> dict[str, int]:
    """Return the bytes on disk by table."""
    size_by_table: dict[str, int] = {}
    for part in trace.glob("rank=0/*.parquet"):
        table = part.name.partition("-")[0]
        size_by_table[table] = size_by_table.get(table, 0) + part.stat().st_size
    return size_by_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--run", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.steps, None if arguments.run == "-" else arguments.run)
        return
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "run.memtrace"
        recorded, plain = samples(arguments.steps, str(trace)), samples(arguments.steps, None)
        events = json.loads((trace / "rank=0" / "manifest.json").read_text())["num_events"]
        tables = sizes(trace)
    result = {
        "steps": arguments.steps,
        "events": events,
        "bytes_per_event": sum(tables.values()) / events,
        "bytes_per_event_by_table": {name: size / events for name, size in sorted(tables.items())},
        "extra_memory_mib": [round(a - b, 1) for a, b in zip(recorded, plain, strict=True)],
    }
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for name, value in result.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
