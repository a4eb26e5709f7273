"""Access time intervals (ATI): the time between consecutive accesses of a block, in which nothing reads or writes it.

Source: "Pinpointing the Memory Behaviors of DNN Training" (ISPASS 2021), which defines the ATI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.blocks import blocks
from memtrace.analysis.event_codes import KIND
from memtrace.analysis.peak import find_peak
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class AccessIntervals:
    """Pairs of consecutive accesses, ordered by block and time.

    Accesses by one operator call count as one access: the block is in use between them.
    """

    block: Array
    """Block that is accessed."""
    first_event: Array
    """Row of ``events`` of the earlier access."""
    second_event: Array
    """Row of ``events`` of the later access."""
    duration_ns: Array
    """Time between the two accesses, on the host's clock."""

    def __len__(self) -> int:
        return len(self.block)


def access_intervals(trace: Trace) -> AccessIntervals:
    """Return every access interval of a single-rank trace; empty where accesses or times are unknown.

    Takes O(n log n) time in the number of events.
    """
    return trace.cached(_access_intervals)


def _access_intervals(trace: Trace) -> AccessIntervals:
    events = trace.columns("events", "time_ns", "kind", "block_id", "op_id")
    is_access = (events["kind"] == KIND["read"]) | (events["kind"] == KIND["write"])
    rows = np.flatnonzero(is_access) if trace.has_times else np.empty(0, np.int64)
    rows = rows[np.argsort(events["block_id"][rows], kind="stable")]
    block, op = events["block_id"][rows], events["op_id"][rows]
    is_interval = (block[1:] == block[:-1]) & ((op[1:] != op[:-1]) | (op[1:] < 0))
    first, second = rows[:-1][is_interval], rows[1:][is_interval]
    # Times of different threads can be slightly out of order.
    duration = np.maximum(events["time_ns"][second] - events["time_ns"][first], 0)
    return AccessIntervals(block[1:][is_interval], first, second, duration)


def device_intervals(trace: Trace, device: str) -> Array:
    """Return the intervals of a device that are longer than 0, as positions in ``access_intervals(trace)``."""
    intervals = access_intervals(trace)
    on_device = blocks(trace).device[intervals.block] == trace.devices.index(device)
    return np.flatnonzero(on_device & (intervals.duration_ns > 0))


def spans_peak(trace: Trace, rows: Array) -> Array:
    """Return whether each interval contains the memory peak of its block's device.

    Args:
        trace: a single-rank trace.
        rows: positions in ``access_intervals(trace)``.
    """
    intervals, device = access_intervals(trace), blocks(trace).device
    peak_events = np.array([find_peak(trace, name).requested.event for name in trace.devices], np.int64)
    event = peak_events[device[intervals.block[rows]]]
    return (intervals.first_event[rows] < event) & (event < intervals.second_event[rows])


def access_intervals_table(trace: Trace) -> pd.DataFrame:
    """Return one row per access interval.

    Columns: block_id, bytes, category, site (``file:line function`` of the block's allocation), start_ns, interval_ns,
    spans_peak (whether the interval contains the memory peak of the device).
    """
    import pandas as pd

    intervals, table = access_intervals(trace), blocks(trace)
    sites, site = allocation_sites(trace, table.stack[intervals.block])
    frame: pd.DataFrame = pd.DataFrame({
        "block_id": intervals.block,
        "bytes": table.size[intervals.block],
        "category": pd.Categorical.from_codes(table.category[intervals.block].tolist(), pd.Index(CATEGORIES)),
        "site": pd.Categorical.from_codes(site.tolist(), pd.Index(range(len(sites)))).map(dict(enumerate(sites))),
        "start_ns": trace.columns("events", "time_ns")["time_ns"][intervals.first_event],
        "interval_ns": intervals.duration_ns,
        "spans_peak": spans_peak(trace, np.arange(len(intervals))),
    })  # fmt: skip
    return frame
