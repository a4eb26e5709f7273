"""Steps: what each training step allocated, peaked at and left behind. The steps are those the recording marked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.attribution import KIND, SPAN, step_rows
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import LiveBytes, requested_bytes
from memtrace.format.arrays import Array
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


def step_columns(trace: Trace) -> dict[str, Array]:
    """The columns of ``steps`` as numpy arrays."""
    return trace.cached(_compute)


def steps_table(trace: Trace) -> pd.DataFrame:
    """One row a step, in order of time; a step is half-open, [start, start + duration). Empty where none are known.

    Columns: step (number), start_ns, duration_ns, peak_bytes (most requested bytes live at once in it, all devices
    added), allocated_bytes (requested bytes of its allocations), num_allocs, num_frees, num_reads, num_writes,
    data_wait_ns (time it waited for data), live_end_bytes (live when it ends).
    """
    import pandas as pd

    frame: pd.DataFrame = pd.DataFrame(step_columns(trace))
    return frame


def _compute(trace: Trace) -> dict[str, Array]:
    found = step_rows(trace)
    kind = trace.columns("events", "kind")["kind"]
    sums = {name: np.concatenate([[0], np.cumsum(kind == KIND[name])]) for name in ("alloc", "free", "read", "write")}
    counts = {name: total[found.end_row] - total[found.first_row] for name, total in sums.items()}
    live = _all_devices(trace)
    first = np.searchsorted(live.rows, found.first_row)
    end = np.searchsorted(live.rows, found.end_row)
    level = np.concatenate([[live.start], live.bytes])
    return {
        "step": found.number,
        "start_ns": found.start_ns,
        "duration_ns": found.duration_ns,
        "peak_bytes": _window_maxima(level, first, end),
        "allocated_bytes": _allocated_bytes(trace, found.first_row, found.end_row),
        "num_allocs": counts["alloc"],
        "num_frees": counts["free"],
        "num_reads": counts["read"],
        "num_writes": counts["write"],
        "data_wait_ns": _data_wait(trace, found.start_ns, found.duration_ns),
        "live_end_bytes": level[end],
    }


def _all_devices(trace: Trace) -> LiveBytes:
    lives = [requested_bytes(trace, device) for device in trace.devices]
    if len(lives) == 1:
        return lives[0]
    rows = np.concatenate([live.rows for live in lives]) if lives else np.empty(0, np.int64)
    changes = [np.diff(live.bytes, prepend=live.start) for live in lives]
    change = np.concatenate(changes) if lives else np.empty(0, np.int64)
    order = np.argsort(rows, kind="stable")
    start = sum(live.start for live in lives)
    return LiveBytes(rows[order], start + np.cumsum(change[order]), start)


def _window_maxima(level: Array, first: Array, end: Array) -> Array:
    """max(level[first : end + 1]) for each window: the level it began with, and all its own."""
    if not len(first):
        return np.empty(0, np.int64)
    bounds = np.stack([first, np.minimum(end + 1, len(level))], axis=1).ravel()
    padded = np.append(level, np.int64(0))
    highest: Array = np.maximum.reduceat(padded, bounds)[::2]
    return highest


def _allocated_bytes(trace: Trace, first_row: Array, end_row: Array) -> Array:
    found = blocks(trace)
    made = found.alloc_event >= 0
    order = np.argsort(found.alloc_event[made], kind="stable")
    rows = found.alloc_event[made][order]
    total = np.concatenate([[0], np.cumsum(found.size[made][order])])
    made_in: Array = total[np.searchsorted(rows, end_row)] - total[np.searchsorted(rows, first_row)]
    return made_in


def tells_waits(trace: Trace) -> bool:
    """Whether the trace has waits for data: only those of a DataLoader or of ``rec.steps`` are seen."""
    return bool((trace.columns("spans", "kind")["kind"] == SPAN["data_wait"]).any())


def _data_wait(trace: Trace, start_ns: Array, duration_ns: Array) -> Array:
    spans = trace.columns("spans", "kind", "start_ns", "duration_ns")
    waits = spans["kind"] == SPAN["data_wait"]
    order = np.argsort(spans["start_ns"][waits], kind="stable")
    begins = spans["start_ns"][waits][order]
    total = np.concatenate([[0], np.cumsum(spans["duration_ns"][waits][order])])
    waited: Array = total[np.searchsorted(begins, start_ns + duration_ns)] - total[np.searchsorted(begins, start_ns)]
    return waited
