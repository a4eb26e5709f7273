"""Live bytes of a device over time, by category, at a bounded number of instants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import allocated_bytes, level_at, live_bytes, requested_bytes, reserved_bytes
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


def select_plot_points(values: Array, max_points: int) -> Array:
    """Return the sorted indices of at most ``max_points`` values: the first and the largest of equal bins."""
    if len(values) <= max_points:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), max_points // 2 + 1).astype(np.int64)[:-1]
    bins = np.searchsorted(edges, np.arange(len(values)), side="right") - 1
    # The last of a sorted bin is its largest.
    order = np.lexsort((values, bins))
    largest = order[np.append(edges[1:], len(values)) - 1]
    return np.unique(np.concatenate([edges, largest]))


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of a device at chosen instants, one element per instant in every array; exact at each of them.

    The first instant is the start of the trace, before its first event, and the last one its last event.
    """

    time_ns: Array
    """Times in rising order."""
    row: Array
    """Row of the events table after which the values hold; -1: at the start."""
    by_category: dict[str, Array]
    """Requested bytes by name of the category."""
    allocated: Array | None
    reserved: Array | None
    """None: unknown, or an allocator without segments."""
    num_changes: int
    """Instants at which a value changes, whether chosen or not."""

    @property
    def requested(self) -> Array:
        """Requested bytes of all categories."""
        total: Array = np.sum(list(self.by_category.values()), axis=0)
        return total


def compute_memory_curve(trace: Trace, device: str, max_instants: int) -> MemoryCurve:
    """Return the bytes of a device at all instants at which they change, or at about ``max_instants`` of them.

    Of more instants, they are cut into equal bins. Each bin keeps its first instant and those of its highest requested,
    allocated and reserved bytes, so that the curve has the maximum of every bin.
    """
    requested, allocated = requested_bytes(trace, device), allocated_bytes(trace, device)
    reserved = reserved_bytes(trace, device)
    curves = [curve for curve in (requested, allocated, reserved) if curve is not None]
    is_chosen = np.zeros(trace.num_rows("events") + 1, np.bool_)
    for curve in curves:
        is_chosen[curve.rows + 1] = True
    num_changes = int(is_chosen.sum())
    is_chosen[[0, -1]] = True
    rows = np.flatnonzero(is_chosen) - 1
    levels = [level_at(curve, rows) for curve in curves]
    chosen = _highest_of_bins(levels, max_instants)
    kept = rows[chosen]
    return MemoryCurve(
        time_ns=_rising_times(trace, kept),
        row=kept,
        by_category=_bytes_by_category(trace, device, kept),
        allocated=None if allocated is None else level_at(allocated, kept),
        reserved=None if reserved is None else level_at(reserved, kept),
        num_changes=num_changes,
    )


def _highest_of_bins(levels: Sequence[Array], max_instants: int) -> Array:
    """Return the sorted indices of the first and the highest values of equal bins; all of few enough values."""
    count = len(levels[0])
    if count <= max_instants:
        return np.arange(count)
    width = -(-count * (1 + len(levels)) // max_instants)
    chosen = [np.arange(0, count, width), np.array([count - 1])]
    for level in levels:
        padded = np.full(-(-count // width) * width, np.iinfo(np.int64).min)
        padded[:count] = level
        chosen.append(padded.reshape(-1, width).argmax(axis=1) + np.arange(0, count, width))
    return np.unique(np.concatenate(chosen))


def _rising_times(trace: Trace, rows: Array) -> Array:
    """Return the times of rows of events; of row -1 the start of the trace: that of the recording, or of a window."""
    time_ns = trace.columns("events", "time_ns")["time_ns"]
    times = np.where(rows >= 0, time_ns[np.maximum(rows, 0)], 0) if len(time_ns) else np.zeros(len(rows), np.int64)
    if len(rows) > 1:
        times[0] = times[1] if trace.surroundings is not None else min(0, int(times[1]))
    return np.maximum.accumulate(times)


def _bytes_by_category(trace: Trace, device: str, rows: Array) -> dict[str, Array]:
    """Return the requested bytes of each category after each of the rising rows of events."""
    table = blocks(trace)
    on_device = table.device == trace.devices.index(device)
    older = on_device & (table.alloc_event < 0)
    begins, ends = on_device & (table.alloc_event >= 0), on_device & (table.free_event >= 0)
    change = np.zeros(trace.num_rows("events") + 1, np.int64)
    category = np.full(len(change), -1, np.int8)
    for events, some, sign in ((table.alloc_event, begins, 1), (table.free_event, ends, -1)):
        change[events[some] + 1] = sign * table.size[some]
        category[events[some] + 1] = table.category[some]
    result = {}
    for code, name in enumerate(CATEGORIES):
        start = int(table.size[older & (table.category == code)].sum())
        result[name] = start + np.cumsum(np.where(category == code, change, 0))[rows + 1]
    return result


def compute_timeline(trace: Trace, device: str, max_points: int = 2000) -> pd.DataFrame:
    """Return the live bytes of a device at up to ``max_points`` instants; the values are exact at each of them.

    The peak is always one of the instants. Columns: time_ns, event (row of the events table after which the values
    hold), requested, allocated and reserved (bytes; NA where the trace has no such sizes), and one column of requested
    bytes for each of ``schema.CATEGORIES``.
    """
    import pandas as pd

    table, live = blocks(trace), requested_bytes(trace, device)
    indices = select_plot_points(live.bytes, max_points)
    rows = live.rows[indices]
    columns: dict[str, object] = {
        "time_ns": trace.columns("events", "time_ns")["time_ns"][rows],
        "event": rows,
        "requested": live.bytes[indices],
    }
    for name, level in (("allocated", allocated_bytes(trace, device)), ("reserved", reserved_bytes(trace, device))):
        columns[name] = level_at(level, rows) if level is not None else pd.NA
    for code, category in enumerate(CATEGORIES):
        sizes = np.where(table.category == code, table.size, 0)
        columns[category] = level_at(live_bytes(trace, device, sizes), rows)
    frame: pd.DataFrame = pd.DataFrame(columns)
    return frame
