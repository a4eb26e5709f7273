"""The live bytes of a device over time, by category."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import level_at, live_bytes, requested_bytes, reserved_bytes
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


def kept_places(values: Array, max_points: int) -> Array:
    """Which of many values to keep: in each of ``max_points`` / 2 equal bins the first and the largest."""
    if len(values) <= max_points:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), max_points // 2 + 1).astype(np.int64)[:-1]
    bins = np.searchsorted(edges, np.arange(len(values)), side="right") - 1
    # The last of a sorted bin is its largest.
    order = np.lexsort((values, bins))
    largest = order[np.append(edges[1:], len(values)) - 1]
    return np.unique(np.concatenate([edges, largest]))


def timeline(trace: Trace, device: str, max_points: int = 2000) -> pd.DataFrame:
    """The live bytes of a device at up to ``max_points`` instants, exact at each; the peak is always among them.

    Columns: time_ns, event (row of events after which it holds), requested, allocated and reserved (bytes; NA where
    the trace cannot tell), and one column of requested bytes for each of ``schema.CATEGORIES``.
    """
    import pandas as pd

    found, live = blocks(trace), requested_bytes(trace, device)
    places = kept_places(live.bytes, max_points)
    rows = live.rows[places]
    table: dict[str, object] = {
        "time_ns": trace.columns("events", "time_ns")["time_ns"][rows],
        "event": rows,
        "requested": live.bytes[places],
    }
    here = found.device == trace.devices.index(device)
    known = not (found.allocated_size[here] < 0).any()
    table["allocated"] = level_at(live_bytes(trace, device, found.allocated_size), rows) if known else pd.NA
    reserved = reserved_bytes(trace, device)
    table["reserved"] = level_at(reserved, rows) if reserved is not None else pd.NA
    for code, category in enumerate(CATEGORIES):
        sizes = np.where(found.category == code, found.size, 0)
        table[category] = level_at(live_bytes(trace, device, sizes), rows)
    frame: pd.DataFrame = pd.DataFrame(table)
    return frame
