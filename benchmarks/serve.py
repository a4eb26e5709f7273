"""``memtrace serve`` on a trace of 100,000,000 events, and its lag and cost beside a training loop.

The large trace repeats recorded steps of the example GPT (``benchmarks/analysis.py``). Measured are the time to index
it, the resident memory of the server with its worker processes, and the time until the answer to requests for random
windows at all zooms. ``--live``: the time from an event to the status that has it, and the duration of training steps
with a recording that is served against one that is not, in alternation.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

from analysis import record_base, tile

NUM_WINDOWS = 50
BLOCK_BYTES = 1 << 20


def get(address: str, path: str, **parameters: object) -> tuple[Any, int]:
    """The JSON answer of a server, and its size."""
    base, _, token = address.partition("/?token=")
    query = "&".join(f"{name}={value}" for name, value in parameters.items())
    request = urllib.request.Request(f"{base}{path}?{query}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        content = answer.read()
    return json.loads(content), len(content)


@contextmanager
def serving(trace: Path, cache: Path) -> Iterator[tuple[str, int]]:
    """A server of a trace: its address and process."""
    command = [sys.executable, "-m", "memtrace.cli", "serve", str(trace), "--no-open"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-1], process.pid
    finally:
        process.terminate()
        process.wait(30)


def resident_mib(process: int) -> float:
    """Resident memory of a process and of those that it started."""
    children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
    total = 0.0
    for number in (process, *map(int, children)):
        try:
            lines = Path(f"/proc/{number}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))
    return total


def is_indexed(address: str) -> bool:
    ranks = get(address, "/api/status")[0]["ranks"]
    return all(rank["views"] and rank["num_indexed"] >= rank["num_parts"] for rank in ranks)


def measure_large(trace: Path, cache: Path) -> dict[str, float]:
    result: dict[str, float] = {}
    with serving(trace, cache) as (address, process):
        began, highest = time.perf_counter(), 0.0
        while not is_indexed(address):
            highest = max(highest, resident_mib(process))
            time.sleep(0.5)
        result["index, seconds"] = time.perf_counter() - began
        result["index, peak MiB of all processes"] = highest
    with serving(trace, cache) as (address, process):
        began = time.perf_counter()
        while not is_indexed(address):
            time.sleep(0.05)
        result["start with the index in the cache, seconds"] = time.perf_counter() - began
        (rank,) = get(address, "/api/status")[0]["ranks"]
        view, end_ns, random = next(iter(rank["views"])), rank["end_ns"], Random(0)
        began = time.perf_counter()
        _, size = get(address, "/api/payload", view=view)
        result["whole trace, seconds"] = time.perf_counter() - began
        seconds, sizes, exact, highest = [], [size], 0, 0.0
        for number in range(NUM_WINDOWS):
            width = end_ns * 10 ** (-6 * (number + 0.5) / NUM_WINDOWS)
            start = random.uniform(0, end_ns - width)
            began = time.perf_counter()
            answer, size = get(address, "/api/payload", view=view, from_ns=int(start), to_ns=int(start + width))
            seconds.append(time.perf_counter() - began)
            sizes.append(size)
            exact += bool(answer["payload"] and answer["payload"]["plain"]["served"]["is_exact"])
            highest = max(highest, resident_mib(process))
    return result | {
        "events": float(rank["num_events"]),
        "windows": float(NUM_WINDOWS),
        "windows analyzed themselves": float(exact),
        "window, median seconds": statistics.median(seconds),
        "window, slowest seconds": max(seconds),
        "largest answer, MiB": max(sizes) / 2**20,
        "server, peak MiB": highest,
    }


def train_steps(model: Any, optimizer: Any, seconds: float) -> list[float]:
    """Durations of the training steps in some seconds."""
    from gpt import synthetic_text, train_step

    durations, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        train_step(model, optimizer, synthetic_text(4, 32))
        durations.append(time.perf_counter() - began)
    return durations


def measure_lags(address: str, allocate: Any) -> list[float]:
    """Seconds from allocations to the first answer that counts them."""
    lags = []
    for number in range(12):
        time.sleep(0.37 * (number % 4))
        before = live_bytes(address)
        kept = allocate((64 + number) * BLOCK_BYTES)
        began = time.perf_counter()
        while live_bytes(address) < before + 32 * BLOCK_BYTES:
            time.sleep(0.02)
        lags.append(time.perf_counter() - began)
        del kept
        while live_bytes(address) >= before + 32 * BLOCK_BYTES:
            time.sleep(0.02)
    return lags


def live_bytes(address: str) -> int:
    live = get(address, "/api/status")[0]["ranks"][0]["live"]
    return sum(device["live_bytes"] for device in live["devices"]) if live else 0


def measure_live(folder: Path, rounds: int) -> dict[str, float]:
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    import torch
    from gpt import GPT

    import memtrace

    torch.set_num_threads(1)
    model = GPT(width=64, layers=4, length=32)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    train_steps(model, optimizer, 2)
    ratios, lags = [], []
    for number in range(rounds):
        medians = {}
        for is_served in (number % 2 == 0, number % 2 == 1):
            with memtrace.record(folder / f"live-{number}-{is_served}.memtrace") as recording:
                if is_served:
                    address = recording.serve()
                    assert address is not None
                    get(address, "/api/status")  # the server has started
                train_steps(model, optimizer, 1)
                medians[is_served] = statistics.median(train_steps(model, optimizer, 6))
        ratios.append(medians[True] / medians[False])
    with memtrace.record(folder / "lag.memtrace") as recording:
        address = recording.serve()
        assert address is not None
        get(address, "/api/status")
        is_over = threading.Event()
        measured: list[float] = []

        def measure() -> None:
            measured.extend(measure_lags(address, lambda size: torch.empty(size, dtype=torch.uint8)))
            is_over.set()

        threading.Thread(target=measure).start()
        while not is_over.is_set():
            train_steps(model, optimizer, 0.2)
        lags = measured
    return {
        "rounds": float(rounds),
        "step, served against not served, median ratio": statistics.median(ratios),
        "step, smallest ratio": min(ratios),
        "step, largest ratio": max(ratios),
        "lag, median seconds": statistics.median(lags),
        "lag, largest seconds": max(lags),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000_000)
    parser.add_argument("--folder", type=Path, help="Folder for the large trace (700 MB for each 100,000,000 events).")
    parser.add_argument("--trace", type=Path, help="Measure this trace instead of making one.")
    parser.add_argument("--live", action="store_true", help="Measure lag and cost beside a training loop instead.")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        if arguments.live:
            result = measure_live(folder, arguments.rounds)
        else:
            trace = arguments.trace or folder / "tiled.memtrace"
            if arguments.trace is None:
                tile(record_base(folder, 34), trace / "rank=0", arguments.events)
            result = measure_large(trace, folder / "cache")
    finally:
        shutil.rmtree(folder)
    for key, value in result.items():
        print(f"{key}: {value:,.3f}")


if __name__ == "__main__":
    main()
