"""What happens to the memory of a device, on one clock: counters at every change, allocations, frees, failures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import KIND
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.peak import LiveBytes, allocated_bytes, live_bytes, requested_bytes, reserved_bytes
from memtrace.exporters.slices import window_start_ns
from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True)
class Counter:
    """A number of bytes over time."""

    device: str
    name: str
    """``requested``, ``allocated``, ``reserved`` or a category."""
    time_ns: Array
    """Times at which the number changes, not falling; the first is the start of the trace."""
    bytes: Array
    """Number from each time on."""


@dataclass(frozen=True)
class BlockEvents:
    """Allocations or frees of the blocks of one device, in the order of what happened."""

    block: Array
    time_ns: Array


def event_times(trace: Trace) -> Array:
    """Return the time of each row of events, not falling: the order of the rows is what happened."""
    return np.maximum.accumulate(np.maximum(trace.columns("events", "time_ns")["time_ns"], window_start_ns(trace)))


def counters(trace: Trace, device: str) -> Iterator[Counter]:
    """Return the counters of a device that the trace knows; categories without a byte are left out."""
    table, time_ns = blocks(trace), trace.cached(event_times)
    requested = requested_bytes(trace, device)
    levels: dict[str, LiveBytes | None] = {"requested": requested}
    allocated = allocated_bytes(trace, device)
    if allocated is not None and not _is_same(allocated, requested):
        levels["allocated"] = allocated
    levels["reserved"] = reserved_bytes(trace, device)
    on_device = table.device == trace.devices.index(device)
    for category, code in CATEGORY.items():
        chosen = on_device & (table.category == code)
        if chosen.any():
            levels[category] = _changes(live_bytes(trace, device, np.where(chosen, table.size, 0)))
    for name, level in levels.items():
        if level is not None:
            yield _counter(device, name, level, time_ns, window_start_ns(trace))


def _counter(device: str, name: str, level: LiveBytes, time_ns: Array, start_ns: int) -> Counter:
    # A total can be read before the first event: its row is -1 then.
    times = np.where(level.rows >= 0, time_ns[np.maximum(level.rows, 0)], start_ns) if len(time_ns) else level.rows * 0
    return Counter(device, name, np.append(start_ns, times), np.append(level.start, level.bytes))


def _is_same(left: LiveBytes, right: LiveBytes) -> bool:
    return (
        left.start == right.start and np.array_equal(left.rows, right.rows) and np.array_equal(left.bytes, right.bytes)
    )


def _changes(level: LiveBytes) -> LiveBytes:
    """Leave out the rows after which the level is what it was before."""
    changes = np.diff(level.bytes, prepend=level.start) != 0
    return LiveBytes(level.rows[changes], level.bytes[changes], level.start)


def block_events(trace: Trace, device: str, *, frees: bool) -> BlockEvents:
    """Return the allocations of a device within the trace, or its frees."""
    table = blocks(trace)
    row = table.free_event if frees else table.alloc_event
    block = np.flatnonzero((table.device == trace.devices.index(device)) & (row >= 0))
    block = block[np.argsort(row[block], kind="stable")]
    return BlockEvents(block, trace.cached(event_times)[row[block]])


def failed_allocations(trace: Trace, device: str) -> tuple[Array, Array]:
    """Return the times of the failed allocations of a device, and the bytes that each asked for."""
    events = trace.columns("events", "kind", "device", "size")
    rows = np.flatnonzero((events["kind"] == KIND["oom"]) & (events["device"] == trace.devices.index(device)))
    return trace.cached(event_times)[rows], events["size"][rows]
