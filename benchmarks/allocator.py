"""How exactly the allocator's model replays each recorded snapshot, and how many trace entries a second it takes.

Histories: the recorded snapshots beside the repository, where they are, and one of a million entries made by putting
training-like requests to the model itself. Timed are the replay check with all it needs (start state, program, run,
comparison), and one run of another setting with its start state laid out afresh. Target: 200,000 entries a second.
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


def made_history(entries: int) -> AllocatorHistory:
    """A history of about `entries` entries: steps of 600 blocks that grow to a peak and are freed backwards."""
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


def recorded() -> dict[str, AllocatorHistory]:
    from memtrace.trace import load

    found = {}
    for path in sorted(DATA.glob("*.pickle")):
        trace = load(path)
        history = read_device_history(trace, trace.devices[0])
        assert isinstance(history, AllocatorHistory)
        found[path.stem] = history
    return found


def exactness(name: str, history: AllocatorHistory) -> dict[str, Any]:
    """How the model reproduces a file, by the rules of the torch that wrote it."""
    result = reproduce_history(history)[1]
    return {
        "file": name,
        "allocations": result.num_allocations,
        "num_allocations_exact": result.num_allocations_exact,
        "segment_events": result.num_segment_events,
        "num_segment_events_exact": result.num_segment_events_exact,
        "peak_reserved_bytes": result.peak_reserved_bytes,
        "recorded_peak_reserved_bytes": result.recorded_peak_reserved_bytes,
        "final_blocks_match": result.final_blocks_match,
        "reason": result.reason,
    }


def timed(call: Callable[[], object], rounds: int) -> float:
    """Seconds of the median round."""
    taken = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken)


def measure(name: str, history: AllocatorHistory, rounds: int) -> dict[str, Any]:
    prepared: PreparedHistory = prepare_history(history)
    result = replay_history(prepared)[0]
    assert result.is_exact, result.reason
    case = workload_of(prepared)
    return {
        "history": name,
        "entries": len(history),
        "replay_entries_per_s": round(len(history) / timed(lambda: replay_history(prepare_history(history)), rounds)),
        "what_if_entries_per_s": round(len(history) / timed(lambda: simulate_settings(case, OTHER), rounds)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=1_000_000, help="length of the made history")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    histories = recorded() if DATA.is_dir() else {}
    replays = [exactness(name, history) for name, history in histories.items()]
    rows = [measure(name, history, options.rounds) for name, history in histories.items() if len(history) > MIN_ENTRIES]
    rows.append(measure("made", made_history(options.entries), min(3, options.rounds)))
    if options.json:
        print(json.dumps({"target_entries_per_s": TARGET, "replays": replays, "histories": rows}, indent=1))
        return
    print(f"{'file':30} {'allocations exact':>19} {'segment events':>15} {'peak reserved, MiB':>19} final blocks")
    for row in replays:
        exact = f"{row['num_allocations_exact']:,}/{row['allocations']:,}"
        events = f"{row['num_segment_events_exact']}/{row['segment_events']}"
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
