"""Steps: what each training step allocates, its peak, and what it retains. Steps are marked ones or detected ones."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.attribution import KIND, SPAN, step_rows
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import LiveBytes, requested_bytes
from memtrace.format.arrays import Array
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class StepColumns:
    """One element per step, in order of time. A step is half-open: [start, start + duration). Bytes are requested bytes
    of all devices."""

    step: Array
    """Step number."""
    start_ns: Array
    """Nanoseconds since the recording began."""
    duration_ns: Array
    peak_bytes: Array
    """Maximum of the live bytes during the step."""
    allocated_bytes: Array
    """Sum of the sizes of the step's allocations."""
    num_allocs: Array
    num_frees: Array
    num_reads: Array
    num_writes: Array
    data_wait_ns: Array
    """Time that the step waited for data; 0 where waits were not recorded, see ``records_data_waits``."""
    live_end_bytes: Array
    """Bytes live when the step ends."""

    def __len__(self) -> int:
        return len(self.step)


def step_columns(trace: Trace) -> StepColumns:
    """Return the steps of a single-rank trace as arrays; empty where the trace has no steps."""
    return trace.cached(_step_columns)


def steps_table(trace: Trace) -> pd.DataFrame:
    """Return one row per step, in order of time; the columns are the fields of ``StepColumns``."""
    import pandas as pd

    columns = step_columns(trace)
    frame: pd.DataFrame = pd.DataFrame({field.name: getattr(columns, field.name) for field in fields(columns)})
    return frame


def device_step_peaks(trace: Trace, device: str) -> Array:
    """Return for each step of ``step_columns`` the peak of the requested bytes of one device."""
    steps, live = step_rows(trace), requested_bytes(trace, device)
    level = np.concatenate([[live.start], live.bytes])
    return _window_maxima(level, np.searchsorted(live.rows, steps.first_row), np.searchsorted(live.rows, steps.end_row))


def records_data_waits(trace: Trace) -> bool:
    """Return whether the trace holds waits for data. Only those of a DataLoader or of ``rec.steps`` are recorded."""
    return bool((trace.columns("spans", "kind")["kind"] == SPAN["data_wait"]).any())


def _step_columns(trace: Trace) -> StepColumns:
    steps = step_rows(trace)
    kind = trace.columns("events", "kind")["kind"]

    def count(name: str) -> Array:
        total = np.concatenate([[0], np.cumsum(kind == KIND[name])])
        in_steps: Array = total[steps.end_row] - total[steps.first_row]
        return in_steps

    live = _live_bytes_of_all_devices(trace)
    first = np.searchsorted(live.rows, steps.first_row)
    end = np.searchsorted(live.rows, steps.end_row)
    level = np.concatenate([[live.start], live.bytes])
    return StepColumns(
        step=steps.number,
        start_ns=steps.start_ns,
        duration_ns=steps.duration_ns,
        peak_bytes=_window_maxima(level, first, end),
        allocated_bytes=_allocated_bytes(trace, steps.first_row, steps.end_row),
        num_allocs=count("alloc"),
        num_frees=count("free"),
        num_reads=count("read"),
        num_writes=count("write"),
        data_wait_ns=_data_wait_ns(trace, steps.start_ns, steps.duration_ns),
        live_end_bytes=level[end],
    )


def _live_bytes_of_all_devices(trace: Trace) -> LiveBytes:
    """Return the running sum of the requested bytes of all devices."""
    devices = [requested_bytes(trace, device) for device in trace.devices]
    if len(devices) == 1:
        return devices[0]
    rows = np.concatenate([np.empty(0, np.int64), *(live.rows for live in devices)])
    changes = [np.diff(live.bytes, prepend=live.start) for live in devices]
    change = np.concatenate([np.empty(0, np.int64), *changes])
    order = np.argsort(rows, kind="stable")
    start = sum(live.start for live in devices)
    return LiveBytes(rows[order], start + np.cumsum(change[order]), start)


def _window_maxima(level: Array, first: Array, end: Array) -> Array:
    """Return max(level[first : end + 1]) for each window: the level at its start and all levels within it."""
    if not len(first):
        return np.empty(0, np.int64)
    bounds = np.stack([first, np.minimum(end + 1, len(level))], axis=1).ravel()
    padded = np.append(level, np.int64(0))
    maxima: Array = np.maximum.reduceat(padded, bounds)[::2]
    return maxima


def _allocated_bytes(trace: Trace, first_row: Array, end_row: Array) -> Array:
    table = blocks(trace)
    allocated = np.flatnonzero(table.alloc_event >= 0)
    allocated = allocated[np.argsort(table.alloc_event[allocated], kind="stable")]
    rows = table.alloc_event[allocated]
    total = np.concatenate([[0], np.cumsum(table.size[allocated])])
    in_steps: Array = total[np.searchsorted(rows, end_row)] - total[np.searchsorted(rows, first_row)]
    return in_steps


def _data_wait_ns(trace: Trace, start_ns: Array, duration_ns: Array) -> Array:
    spans = trace.columns("spans", "kind", "start_ns", "duration_ns")
    waits = np.flatnonzero(spans["kind"] == SPAN["data_wait"])
    waits = waits[np.argsort(spans["start_ns"][waits], kind="stable")]
    return waiting_ns(spans["start_ns"][waits], spans["duration_ns"][waits], start_ns, duration_ns)


def waiting_ns(wait_start: Array, wait_duration: Array, start_ns: Array, duration_ns: Array) -> Array:
    """Return how long each step waits: the durations of the waits that begin in it, which are given by start."""
    total = np.concatenate([[0], np.cumsum(wait_duration)])
    in_steps: Array = (
        total[np.searchsorted(wait_start, start_ns + duration_ns)] - total[np.searchsorted(wait_start, start_ns)]
    )
    return in_steps
