"""Access time intervals (ATI): the time between consecutive accesses of a block, in which nothing reads or writes it.

Where the operators at both ends of an interval were timed on the GPU, the interval is measured by the GPU's clock; host
times are those of the launch.

Source: "Pinpointing the Memory Behaviors of DNN Training" (ISPASS 2021), which defines the ATI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.blocks import blocks
from memtrace.analysis.device_clock import CLOCKS, DEVICE, HOST, LAUNCH, access_times
from memtrace.analysis.event_codes import KIND
from memtrace.analysis.gaps import find_gaps
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
    """Time between the two accesses."""
    clock: Array
    """The clock of each duration, as a position in ``device_clock.CLOCKS``."""
    start_ns: Array
    """Time of the earlier access, by that clock."""

    def __len__(self) -> int:
        return len(self.block)


def access_intervals(trace: Trace) -> AccessIntervals:
    """Return every access interval of a single-rank trace; empty where accesses or times are unknown.

    In a gap, accesses are unknown: an interval that would contain one is left out.

    Takes O(n log n) time in the number of events.
    """
    return trace.cached(_access_intervals)


def _access_intervals(trace: Trace) -> AccessIntervals:
    events = trace.columns("events", "kind", "block_id", "op_id")
    is_access = (events["kind"] == KIND["read"]) | (events["kind"] == KIND["write"])
    rows = np.flatnonzero(is_access) if trace.has_times else np.empty(0, np.int64)
    rows = rows[np.argsort(events["block_id"][rows], kind="stable")]
    block, op = events["block_id"][rows], events["op_id"][rows]
    is_interval = (block[1:] == block[:-1]) & ((op[1:] != op[:-1]) | (op[1:] < 0))
    gaps = find_gaps(trace)
    if len(gaps):
        is_interval &= ~gaps.cut_rows(rows[:-1], rows[1:])
    first, second = np.flatnonzero(is_interval), np.flatnonzero(is_interval) + 1
    times = access_times(trace, rows, events["kind"][rows] == KIND["read"])
    by_device = (times.clock[first] == DEVICE) & (times.clock[second] == DEVICE)
    start_ns = np.where(by_device, times.device_ns[first], times.host_ns[first])
    end_ns = np.where(by_device, times.device_ns[second], times.host_ns[second])
    # A block is on one device; an access there that was not timed leaves the launch times of both.
    clock = np.where(by_device, times.clock[first], np.where(times.clock[first] == HOST, HOST, LAUNCH)).astype(np.int8)
    # Times of different threads, or of different streams, can be out of order.
    duration_ns = np.maximum(end_ns - start_ns, 0)
    return AccessIntervals(block[first], rows[first], rows[second], duration_ns, clock, start_ns)


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
    clock (of the two times: ``host``; ``launch``, the host time at which an operator on a GPU was launched; or
    ``device``, the GPU's time), spans_peak (whether the interval contains the memory peak of the device).
    """
    import pandas as pd

    intervals, table = access_intervals(trace), blocks(trace)
    sites, site = allocation_sites(trace, table.stack[intervals.block])
    frame: pd.DataFrame = pd.DataFrame({
        "block_id": intervals.block,
        "bytes": table.size[intervals.block],
        "category": pd.Categorical.from_codes(table.category[intervals.block].tolist(), pd.Index(CATEGORIES)),
        "site": pd.Categorical.from_codes(site.tolist(), pd.Index(range(len(sites)))).map(dict(enumerate(sites))),
        "start_ns": intervals.start_ns,
        "interval_ns": intervals.duration_ns,
        "clock": pd.Categorical.from_codes(intervals.clock.tolist(), pd.Index(CLOCKS)),
        "spans_peak": spans_peak(trace, np.arange(len(intervals))),
    })  # fmt: skip
    return frame
