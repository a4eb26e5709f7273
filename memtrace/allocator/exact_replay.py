"""What an exact replay reveals about a trace: the size of every block, with rounding and slack.

A file says how much the program requested. How much more the allocator gave out depends on the free blocks of that
moment, which only a replay of the whole history finds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.allocator.history import ALLOC, FREE, AllocatorHistory, Int64s
from memtrace.allocator.infer_rules import reproduce_history
from memtrace.allocator.replay import PreparedHistory, ReplayResult, run_history
from memtrace.allocator.requests import BASELINE, LIVE, history_rows, read_device_history
from memtrace.errors import MemtraceError

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_ENTRIES: Final = 500_000
"""Longest history that is replayed unasked: about two seconds, several times that if no attempt replays exactly."""


def reproduce_exactly(trace: Trace, device: str) -> tuple[PreparedHistory, ReplayResult] | None:
    """Replay the history of a device (cached).

    Args:
        trace: a trace of one rank.
        device: a name from `trace.devices`.

    Returns:
        None where the device has no history, more than `MAX_ENTRIES` entries, or a history that does not replay
        exactly.
    """
    return trace.cached(_reproduce_exactly, device)


def _reproduce_exactly(trace: Trace, device: str) -> tuple[PreparedHistory, ReplayResult] | None:
    # Counted before the history is read, which takes longer and more memory than all else in a summary.
    if len(history_rows(trace, device)) > MAX_ENTRIES:
        return None
    try:
        source = read_device_history(trace, device)
        if not isinstance(source, AllocatorHistory):
            return None
        prepared, result = reproduce_history(source)
    except MemtraceError:  # an absurd size, address or setting
        return None
    return (prepared, result) if result.is_exact else None


def replayed_block_sizes(trace: Trace, device: str) -> Int64s | None:
    """Return the allocator's size of each block by an exact replay (cached).

    Returns:
        Bytes by block id, rounding and slack included; -1 for a block of another device, and for one older than the
        history that several sizes fit. None where `reproduce_exactly` returns None, and where a size contradicts the
        file.
    """
    return trace.cached(_replayed_block_sizes, device)


def _replayed_block_sizes(trace: Trace, device: str) -> Int64s | None:
    reproduced = reproduce_exactly(trace, device)
    if reproduced is None:
        return None
    prepared, _ = reproduced
    events = trace.columns("events", "block_id", "allocated_size")
    block = _block_ids(trace, device, prepared)
    size = run_history(prepared)[1].size[: len(block)].copy()
    size[: prepared.operations.num_older][~prepared.start.is_size_certain] = -1
    sizes = np.full(int(events["block_id"].max(initial=-1)) + 1, -1, np.int64)
    sizes[block[block >= 0]] = size[block >= 0]
    rows = np.flatnonzero((events["block_id"] >= 0) & (events["allocated_size"] >= 0))
    replayed = sizes[events["block_id"][rows]]
    contradicts = (replayed >= 0) & (replayed != events["allocated_size"][rows])
    return None if contradicts.any() else sizes


def _block_ids(trace: Trace, device: str, prepared: PreparedHistory) -> Int64s:
    """Return the block id of each block of the replay that is not a failed request; -1: unknown."""
    events = trace.columns("events", "kind", "device", "block_id", "address")
    block: Int64s = events["block_id"].astype(np.int64)
    entries = block[history_rows(trace, device)]
    start = prepared.start
    older = np.where(start.freed_by >= 0, np.append(entries, -1)[start.freed_by], -1)
    of_device = events["device"] == trace.devices.index(device)
    born_before = np.flatnonzero(of_device & ((events["kind"] == BASELINE) | (events["kind"] == LIVE)))
    freed = block[of_device & (events["kind"] == FREE)]
    outliving = born_before[~np.isin(block[born_before], freed)]
    outliving = outliving[np.argsort(events["address"][outliving], kind="stable")]
    address = events["address"][outliving]
    place = np.searchsorted(address, start.address)
    is_found = (start.freed_by < 0) & (np.append(address, -1)[place] == start.address)
    older[is_found] = block[outliving[place[is_found]]]
    return np.concatenate([older, entries[prepared.history.kind == ALLOC]])
