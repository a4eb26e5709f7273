"""Live bytes of a device over time, by category, at a bounded number of instants."""

from __future__ import annotations

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
