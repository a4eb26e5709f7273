"""Records random programs on a CUDA device and replays the recordings: every event and every block size must be exact.

    python -m tests.allocator.replay_fuzz [--seeds N] [--operations N] [SETTING ...]

runs the full campaign, one process per setting, on a GPU or on the null device, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np

VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
SETTINGS: Final = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:64,max_non_split_rounding_mb:40",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[64:8,256:4,>:2],expandable_segments:True",
    "garbage_collection_threshold:0.3,per_process_memory_fraction:0.8",
    "garbage_collection_threshold:0.5,expandable_segments:True,per_process_memory_fraction:0.9",
    "per_process_memory_fraction:0.5",
    "large_segment_size_mb:40",
    "expandable_segments:True,max_split_size_mb:32",
)
FEATURES: Final = {
    "streams": ("streams", "record_stream", "empty_cache"),
    "full device": ("streams", "record_stream", "empty_cache", "large"),
    "pools": ("streams", "empty_cache", "pools"),
    "graphs": ("record_stream", "empty_cache", "graphs"),
}
"""What the programs do; a seed selects one."""


@dataclass(frozen=True)
class FuzzResult:
    """How exactly one recorded program replays, and what else differs from torch's own counters."""

    seed: int
    features: str
    is_mid_run: bool
    """The recording began when the program held memory already."""
    num_allocations: int
    num_segment_events: int
    num_ooms: int
    differences: tuple[str, ...]
    """What is not exact, in sentences; empty: everything is."""


def record_and_replay(seed: int, num_operations: int, folder: Path) -> FuzzResult:
    """Record the program of a seed on the current device and compare its replay with torch's counters."""
    import torch

    import memtrace
    from tests.programs.cuda_fuzz import FuzzProgram

    name = list(FEATURES)[seed % len(FEATURES)]
    is_mid_run = seed // len(FEATURES) % 2 == 1
    fraction = (0.6, 1.0)[seed // (2 * len(FEATURES)) % 2] if "fraction" not in os.environ.get(VARIABLE, "") else None
    torch.cuda.empty_cache()
    program = FuzzProgram(seed, FEATURES[name])
    if is_mid_run:
        program.run(num_operations // 2)
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    path = folder / f"{seed}.memtrace"
    with memtrace.record(path, stacks=seed % 3 > 0):
        program.run(num_operations)
        after = torch.cuda.memory_stats()
    num_ooms = program.num_ooms
    program.close()
    torch.cuda.synchronize()
    allocated = after.get("allocated_bytes.all.allocated", 0) - before.get("allocated_bytes.all.allocated", 0)
    peaks = {name: after.get(f"{name}_bytes.all.peak", 0) for name in ("requested", "allocated", "reserved")}
    counts, differences = compare_replay(path, allocated, peaks)
    return FuzzResult(seed, name, is_mid_run, *counts, num_ooms, tuple(differences))


def compare_replay(path: Path, allocated: int, peaks: dict[str, int]) -> tuple[tuple[int, int], list[str]]:
    """Return the allocations and segment events of a recording, and what its replay or its peaks have wrong.

    Args:
        path: the recording.
        allocated: bytes of all blocks allocated in it, by torch's counters.
        peaks: the peaks by torch's counters.
    """
    import memtrace
    from memtrace.allocator.history import ALLOC, AllocatorHistory
    from memtrace.allocator.infer_rules import reproduce_history
    from memtrace.allocator.replay import run_history
    from memtrace.allocator.requests import read_device_history
    from memtrace.analysis.blocks import blocks
    from memtrace.analysis.peak import find_peak

    trace = memtrace.load(path)
    history = read_device_history(trace, "cuda:0")
    assert isinstance(history, AllocatorHistory)
    prepared, result = reproduce_history(history)
    differences = [] if result.reason is None else [result.reason]
    if not result.final_blocks_match:
        differences.append("The final blocks differ.")
    if result.is_exact:
        num_older = prepared.operations.num_older
        _, placed = run_history(prepared)
        size = placed.size[num_older : num_older + int((history.kind == ALLOC).sum())]
        if int(size.sum()) != allocated:
            differences.append(
                f"Blocks of {int(size.sum()):,} bytes were allocated in the replay, of {allocated:,} here."
            )
        table = blocks(trace)
        born = np.flatnonzero((table.alloc_event >= 0) & (table.device == trace.devices.index("cuda:0")))
        recorded = table.allocated_size[born[np.argsort(table.alloc_event[born], kind="stable")]]
        num_wrong = int(((recorded != size) & (recorded >= 0)).sum())
        differences += [f"{num_wrong} recorded block sizes are wrong."] if num_wrong else []
        num_unknown = int((recorded < 0).sum())
        differences += [f"{num_unknown} recorded block sizes are unknown."] if num_unknown else []
    peak = find_peak(trace, "cuda:0")
    for name, maximum in (("requested", peak.requested), ("allocated", peak.allocated), ("reserved", peak.reserved)):
        if maximum is None or maximum.bytes != peaks[name]:
            found = "unknown" if maximum is None else f"{maximum.bytes:,}"
            differences.append(f"Peak {name}: {found}, by torch's counters {peaks[name]:,}.")
    return (len(recorded_allocations(history)), result.num_segment_events), differences


def recorded_allocations(history: object) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the entries of a history that are allocations."""
    from memtrace.allocator.history import ALLOC, AllocatorHistory

    assert isinstance(history, AllocatorHistory)
    return np.flatnonzero(history.kind == ALLOC)


def run_setting(setting: str, seeds: Sequence[int], num_operations: int) -> list[FuzzResult]:
    """Run the programs of some seeds under a setting, in a process of its own, and return their results."""
    environment = {**os.environ, VARIABLE: setting}
    command = [sys.executable, "-m", "tests.allocator.replay_fuzz", "--worker", f"--operations={num_operations}"]
    command.append("--list=" + ",".join(map(str, seeds)))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    results = [FuzzResult(**{**row, "differences": tuple(row["differences"])}) for row in rows]
    missing = set(seeds) - {result.seed for result in results}
    for seed in sorted(missing):
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        results.append(FuzzResult(seed, "", False, 0, 0, 0, (f"The process died: {lines[-1]}",)))
    return results


def _work(seeds: Sequence[int], num_operations: int) -> Iterator[FuzzResult]:
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            yield record_and_replay(seed, num_operations, Path(folder))


def main() -> int:
    """Run the campaign; the exit code is 1 where something is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=SETTINGS)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--operations", type=int, default=300)
    parser.add_argument("--list", default="")
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args()
    if options.worker:
        for result in _work([int(seed) for seed in options.list.split(",")], options.operations):
            print(json.dumps(asdict(result)), flush=True)
        return 0
    num_wrong = 0
    print(f"{'setting':90s} {'exact':>9s} {'allocations':>11s} {'segment events':>14s} {'OOM':>5s}")
    for setting in options.settings:
        results = run_setting(setting, range(options.seeds), options.operations)
        wrong = [result for result in results if result.differences]
        num_wrong += len(wrong)
        exact = f"{len(results) - len(wrong)} of {len(results)}"
        totals = [
            sum(getattr(result, name) for result in results) for name in ("num_allocations", "num_segment_events")
        ]
        num_ooms = sum(result.num_ooms for result in results)
        print(f"{setting or 'default':90s} {exact:>9s} {totals[0]:>11,} {totals[1]:>14,} {num_ooms:>5}", flush=True)
        for result in wrong:
            print(f"  seed {result.seed} ({result.features}{', mid-run' * result.is_mid_run}):", *result.differences)
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
