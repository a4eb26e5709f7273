"""Measures how exactly and how fast the allocator model replays recorded and synthetic histories.

The histories are the snapshots in the shared data folder, if it exists, and a synthetic one of a million entries,
made by running training-like requests on the model itself. Timed are the replay with its preparation (start state,
operations, comparison) and one simulation of another setting. Target: 200,000 trace entries per second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from memtrace.allocator.history import (
    ALLOC,
    FREE,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    AllocatorHistory,
    RecordedBlocks,
    RecordedSegments,
)
from memtrace.allocator.infer_rules import reproduce_history
from memtrace.allocator.model import CachingAllocator
from memtrace.allocator.plan import workload_of
from memtrace.allocator.replay import PreparedHistory, prepare_history, replay_history
from memtrace.allocator.requests import read_device_history
from memtrace.allocator.settings import AllocatorSettings
from memtrace.allocator.simulated_devices import SyntheticDevice
from memtrace.allocator.what_if import simulate_settings

DATA = Path(__file__).parents[1] / ".." / "shared" / "data" / "snapshots"
TARGET = 200_000
MIN_ENTRIES = 5_000
OTHER = AllocatorSettings.parse("expandable_segments:True")


def make_synthetic_history(entries: int) -> AllocatorHistory:
    """Return a history of about `entries` entries: steps of 600 blocks that are freed in reverse order."""
    random = np.random.default_rng(0)
    allocator = CachingAllocator(AllocatorSettings(), SyntheticDevice())
    rows: list[tuple[int, int, int]] = []
    sizes = random.choice([2048, 40_000, 700_000, 1 << 20, 3_000_000, 12_000_000, 40_000_000], 600)
    while len(rows) < entries:
        live = []
        for size in np.where(random.random(600) < 0.05, 2, 1) * sizes:
            seen = len(allocator.log)
            block = allocator.malloc(int(size))
            assert block is not None
            for _, kind, *where in allocator.log[seen:]:
                rows.append((kind, *where))
            rows.append((ALLOC, block.address, int(size)))
            live.append(block)
            if random.random() < 0.5:
                free(allocator, rows, live.pop(int(random.integers(len(live)))))
        for block in reversed(live):
            free(allocator, rows, block)
    columns = np.array(rows, np.int64).T
    heads = [segment[0] for segment in allocator.segments()]
    sizes_held = np.array([sum(block.size for block in segment) for segment in allocator.segments()])
    assert not np.isin(columns[0], (SEGMENT_FREE,)).any() and np.isin(columns[0], (SEGMENT_ALLOC,)).any()
    nothing = np.zeros(0, np.int64)
    return AllocatorHistory(
        device="cuda:0",
        kind=columns[0].astype(np.int8),
        address=columns[1],
        size=columns[2],
        stream=np.zeros(len(rows), np.int64),
        pool=np.zeros(len(rows), np.int64),
        by_program=np.full(len(rows), -1, np.int8),
        device_free=np.full(len(rows), -1),
        time_ns=np.arange(len(rows)),
        settings=AllocatorSettings(),
        segments=RecordedSegments(
            address=np.array([head.address for head in heads]),
            size=sizes_held,
            stream=np.zeros(len(heads), np.int64),
            pool=np.zeros(len(heads), np.int64),
            small=np.array([head.free_list.pool.small for head in heads]),
            expandable=np.zeros(len(heads), bool),
        ),
        blocks=RecordedBlocks(address=nothing, size=nothing, requested=nothing),
    )


def free(allocator: CachingAllocator, rows: list[tuple[int, int, int]], block: Any) -> None:
    rows.append((FREE_REQUESTED, block.address, block.requested))
    rows.append((FREE, block.address, block.requested))
    allocator.free(block)


def load_recorded_histories() -> dict[str, AllocatorHistory]:
    from memtrace.trace import load

    histories = {}
    for path in sorted(DATA.glob("*.pickle")):
        trace = load(path)
        history = read_device_history(trace, trace.devices[0])
        assert isinstance(history, AllocatorHistory)
        histories[path.stem] = history
    return histories


def measure_exactness(name: str, history: AllocatorHistory) -> dict[str, Any]:
    """Replay a file under the rules of the PyTorch version that wrote it."""
    result = reproduce_history(history)[1]
    return {
        "file": name,
        "num_allocations": result.num_allocations,
        "num_allocations_exact": result.num_allocations_exact,
        "num_segment_events": result.num_segment_events,
        "num_segment_events_exact": result.num_segment_events_exact,
        "peak_reserved_bytes": result.peak_reserved_bytes,
        "recorded_peak_reserved_bytes": result.recorded_peak_reserved_bytes,
        "final_blocks_match": result.final_blocks_match,
        "reason": result.reason,
    }


def median_seconds(call: Callable[[], object], rounds: int) -> float:
    """Return the median time of a call, in seconds."""
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def measure_speed(name: str, history: AllocatorHistory, rounds: int) -> dict[str, Any]:
    prepared: PreparedHistory = prepare_history(history)
    result = replay_history(prepared)[0]
    assert result.is_exact, result.reason
    workload = workload_of(prepared)
    return {
        "history": name,
        "entries": len(history),
        "replay_entries_per_s": round(
            len(history) / median_seconds(lambda: replay_history(prepare_history(history)), rounds)
        ),
        "what_if_entries_per_s": round(
            len(history) / median_seconds(lambda: simulate_settings(workload, OTHER), rounds)
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000, help="length of the synthetic history")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    histories = load_recorded_histories() if DATA.is_dir() else {}
    replays = [measure_exactness(name, history) for name, history in histories.items()]
    rows = [
        measure_speed(name, history, options.rounds)
        for name, history in histories.items()
        if len(history) > MIN_ENTRIES
    ]
    rows.append(measure_speed("synthetic", make_synthetic_history(options.entries), min(3, options.rounds)))
    if options.json:
        print(json.dumps({"target_entries_per_s": TARGET, "replays": replays, "histories": rows}, indent=1))
        return
    print(f"{'file':30} {'allocations exact':>19} {'segment events':>15} {'peak reserved, MiB':>19} final blocks")
    for row in replays:
        exact = f"{row['num_allocations_exact']:,}/{row['num_allocations']:,}"
        events = f"{row['num_segment_events_exact']}/{row['num_segment_events']}"
        peaks = f"{row['peak_reserved_bytes'] / 2**20:,.0f}/{row['recorded_peak_reserved_bytes'] / 2**20:,.0f}"
        end = "equal" if row["final_blocks_match"] else "differ"
        print(f"{row['file']:30} {exact:>19} {events:>15} {peaks:>19} {end}")
    print()
    print(f"{'history':30} {'entries':>10} {'replay/s':>10} {'what-if/s':>10}   (target {TARGET:,})")
    for row in rows:
        rates = f"{row['replay_entries_per_s']:>10,} {row['what_if_entries_per_s']:>10,}"
        print(f"{row['history']:30} {row['entries']:>10,} {rates}")


if __name__ == "__main__":
    main()
