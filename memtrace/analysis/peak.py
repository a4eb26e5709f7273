"""Peak memory of a device: how much was live or reserved at most, when, and in which blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memtrace.analysis.attribution import KIND, op_column, phase_rows, rows_at, step_rows
from memtrace.analysis.block_groups import BlockGroup, group_by_category, group_by_module_pattern, group_by_site
from memtrace.analysis.blocks import Blocks, allocated_sizes, blocks, blocks_table
from memtrace.display import Displayed
from memtrace.format.arrays import Array, stable_sort
from memtrace.format.schema import COUNTERS, PHASES
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Maximum:
    """The highest level of one byte count over time."""

    bytes: int
    event: int
    """Row of the events table after which the level was reached; -1: at the start of the recording."""


@dataclass(frozen=True)
class Peak(Displayed):
    """The peaks of one device.

    ``requested``, ``baseline_bytes`` and ``end_bytes`` count requested bytes; where ``is_requested`` is False, the
    trace has only the sizes that the allocator rounded up, and they count those.
    """

    device: str
    is_requested: bool
    requested: Maximum
    allocated: Maximum | None
    """Peak of the bytes that the allocator counts for the blocks (`allocated_bytes`); None: unknown."""
    reserved: Maximum | None
    """Peak of the bytes reserved in segments; None: unknown, or an allocator without segments (the CPU)."""
    time_ns: int | None
    """Time of the requested peak since the start of the recording; None: unknown, or at the start."""
    step: int | None
    """Step of the requested peak; None: outside every step."""
    phase: str | None
    """Phase of the requested peak, one of ``schema.PHASES``; None: unknown."""
    live: Array
    """Ids of the blocks that are live at the requested peak."""
    baseline_bytes: int
    """Bytes that were allocated before the recording."""
    end_bytes: int
    """Bytes that are live at the end of the recording."""
    reserved_end_bytes: int | None
    """Bytes that are reserved at the end of the recording; None: unknown."""


@dataclass(frozen=True)
class LiveBytes:
    """A byte count of one device over time: a step function of the rows of the events table."""

    rows: Array
    """Rows of the events table after which the level changes."""
    bytes: Array
    """Level after each of ``rows``."""
    start: int
    """Level at the start of the recording."""


def live_bytes(trace: Trace, device: str, sizes: Array) -> LiveBytes:
    """Return the bytes live on a device over time.

    Args:
        trace: A single-rank trace.
        device: One of ``trace.devices``.
        sizes: Bytes of every block of the trace, such as a size column of ``Blocks``.
    """
    return _bytes_until(trace, device, sizes, blocks(trace).free_event)


def _bytes_until(trace: Trace, device: str, sizes: Array, end_event: Array) -> LiveBytes:
    """Return the bytes of the blocks from their allocation to a row of events that ends each (-1: none does)."""
    table = blocks(trace)
    on_device = table.device == trace.devices.index(device)
    begins, ends = on_device & (table.alloc_event >= 0), on_device & (end_event >= 0)
    start = int(sizes[on_device & (table.alloc_event < 0)].sum())
    rows = np.concatenate([table.alloc_event[begins], end_event[ends]])
    change = np.concatenate([sizes[begins], -sizes[ends]])
    order, rows = stable_sort(rows)
    return LiveBytes(rows, start + np.cumsum(change[order]), start)


def requested_bytes(trace: Trace, device: str) -> LiveBytes:
    """Return the requested bytes live on a device over time (cached)."""
    return trace.cached(_requested_bytes, device)


def _requested_bytes(trace: Trace, device: str) -> LiveBytes:
    return live_bytes(trace, device, blocks(trace).size)


def allocated_bytes(trace: Trace, device: str) -> LiveBytes | None:
    """Return the bytes that the allocator counts for the blocks of a device over time (cached).

    A block counts from its allocation until the program frees it, as in `torch.cuda.memory_allocated`: a freed block
    that waits for a stream no longer counts, although it is still live. The source is the allocated sizes of the
    blocks (`allocated_sizes`); where one is unknown, the totals of a file that has one for every change. None where it
    has none.
    """
    return trace.cached(_allocated_bytes, device)


def _allocated_bytes(trace: Trace, device: str) -> LiveBytes | None:
    table = blocks(trace)
    on_device = table.device == trace.devices.index(device)
    sizes = allocated_sizes(trace)
    if not on_device.any() or (sizes[on_device] < 0).any():
        return _complete_totals(trace, device, "allocated")
    requested = _requested_frees(trace)
    freed = np.where(requested >= 0, requested, table.free_event)
    if (requested[on_device] >= 0).any():
        # The program freed these blocks before the recording, and a stream used them until their free was completed.
        waits_at_start = on_device & (table.alloc_event < 0) & (requested < 0) & (table.free_event >= 0)
        sizes = np.where(waits_at_start, 0, sizes)
    return _bytes_until(trace, device, sizes, freed)


def _requested_frees(trace: Trace) -> Array:
    """Return the row of events in which the program requests to free each block; -1: none."""
    events = trace.columns("events", "kind", "block_id")
    rows = np.flatnonzero((events["kind"] == KIND["free_requested"]) & (events["block_id"] >= 0))
    requested = np.full(len(blocks(trace)), -1, np.int64)
    requested[events["block_id"][rows]] = rows
    return requested


def reserved_bytes(trace: Trace, device: str) -> LiveBytes | None:
    """Return the bytes reserved on a device over time (cached).

    The source is the segment events, or else the totals of a file that has one for every change. None where the trace
    has neither, as for the CPU.
    """
    return trace.cached(_reserved_bytes, device)


def _reserved_bytes(trace: Trace, device: str) -> LiveBytes | None:
    events = trace.columns("events", "kind", "device", "size")
    grows = (events["kind"] == KIND["segment_alloc"]) | (events["kind"] == KIND["segment_map"])
    shrinks = (events["kind"] == KIND["segment_free"]) | (events["kind"] == KIND["segment_unmap"])
    code = trace.devices.index(device)
    rows = np.flatnonzero((grows | shrinks) & (events["device"] == code))
    segments = trace.columns("segments", "device", "size")
    final = segments["device"] == code
    if not len(rows) and not final.any():
        return _complete_totals(trace, device, "reserved")
    level = np.cumsum(np.where(grows[rows], events["size"][rows], -events["size"][rows]))
    if trace.num_rows("segments"):
        start = int(segments["size"][final].sum()) - int(level[-1] if len(level) else 0)
    else:
        start = _reserved_at_start(trace, device, LiveBytes(rows, level, 0))
    return LiveBytes(rows, start + level, start)


def _reserved_at_start(trace: Trace, device: str, changes: LiveBytes) -> int:
    """Return what was reserved before the first segment event, by the first reading of the allocator's total.

    A recording that was cut off and a window that ends before the recording do not have the segments at their end.
    """
    readings = counted_bytes(trace, device, "reserved")
    if readings is None:
        return 0
    return max(0, readings.start - int(level_at(changes, readings.rows[:1])[0]))


def _complete_totals(trace: Trace, device: str, counter: str) -> LiveBytes | None:
    """Return a total of a file that has a value for every change; None for a recording, which reads totals at steps.

    The highest value at the end of a step is not the peak.
    """
    return None if trace.manifest.source.kind == "recording" else counted_bytes(trace, device, counter)


def counted_bytes(trace: Trace, device: str, counter: str) -> LiveBytes | None:
    """Return a total that the trace itself holds, at the moments at which it was read; None where it has none.

    Args:
        trace: A single-rank trace.
        device: One of ``trace.devices``.
        counter: One of ``schema.COUNTERS``. The level at the start is the first value that the trace holds.
    """
    counters = trace.columns("counters", "time_ns", "device", "name", "value")
    selected = (counters["device"] == trace.devices.index(device)) & (counters["name"] == COUNTERS.index(counter))
    if not selected.any():
        return None
    value = counters["value"][selected]
    return LiveBytes(rows_at(trace, counters["time_ns"][selected] + 1) - 1, value, int(value[0]))


def level_at(live: LiveBytes, rows: Array) -> Array:
    """Return the level after each of ``rows`` of the events table; row -1 is the start of the recording."""
    level = np.concatenate([[live.start], live.bytes])
    return level[np.searchsorted(live.rows, rows, side="right")]


def live_after(table: Blocks, device: int, event: int) -> Array:
    """Return the ids of the blocks of a device that are live after a row of the events table (-1: at the start)."""
    live = (
        (table.device == device) & (table.alloc_event <= event) & ((table.free_event < 0) | (table.free_event > event))
    )
    return np.flatnonzero(live)


def live_blocks_at(trace: Trace, device: str, time_ns: int) -> pd.DataFrame:
    """Return the blocks that are live on a device at a time, largest first: rows of ``blocks_table``.

    Args:
        trace: A single-rank trace.
        device: One of ``trace.devices``.
        time_ns: Nanoseconds since the start of the recording.
    """
    row = int(rows_at(trace, np.array([time_ns + 1]))[0]) - 1
    live = live_after(blocks(trace), trace.devices.index(device), row)
    frame: pd.DataFrame = blocks_table(trace).iloc[live].sort_values("size", ascending=False, kind="stable")
    return frame


def find_peak(trace: Trace, device: str) -> Peak:
    """Find the peaks of one device of a single-rank trace and the blocks live at the requested peak (cached)."""
    return trace.cached(_find_peak, device)


def _find_peak(trace: Trace, device: str) -> Peak:
    table, live = blocks(trace), requested_bytes(trace, device)
    top, allocated, reserved = _maximum(live), allocated_bytes(trace, device), reserved_bytes(trace, device)
    row = np.array([max(top.event, 0)])
    step = int(step_rows(trace).of_rows(row)[0])
    return Peak(
        device=device,
        is_requested=bool(table.size_is_requested[table.device == trace.devices.index(device)].all()),
        requested=top,
        allocated=_maximum(allocated) if allocated is not None else None,
        reserved=_maximum(reserved) if reserved is not None else None,
        time_ns=_event_time(trace, top.event),
        step=step if step >= 0 else None,
        phase=phase_at(trace, top.event) if top.event >= 0 else None,
        live=live_after(table, trace.devices.index(device), top.event),
        baseline_bytes=live.start,
        end_bytes=_end_bytes(trace, device, live),
        reserved_end_bytes=_last_level(reserved) if reserved is not None else None,
    )


def peak_by_category(trace: Trace, device: str) -> list[BlockGroup]:
    """Return the bytes at the requested peak of a device by category, largest first."""
    return group_by_category(trace, find_peak(trace, device).live)


def peak_by_module(trace: Trace, device: str) -> list[BlockGroup]:
    """Return the bytes at the requested peak of a device by module pattern (``GPT.blocks.*.mlp``), largest first."""
    return group_by_module_pattern(trace, find_peak(trace, device).live)


def peak_by_site(trace: Trace, device: str) -> list[BlockGroup]:
    """Return the bytes at the requested peak of a device by allocation site, largest first."""
    return group_by_site(trace, find_peak(trace, device).live)


def _maximum(live: LiveBytes) -> Maximum:
    if not len(live.rows) or int(live.bytes.max()) <= live.start:
        return Maximum(live.start, -1)
    index = int(live.bytes.argmax())
    return Maximum(int(live.bytes[index]), int(live.rows[index]))


def _event_time(trace: Trace, event: int) -> int | None:
    return int(trace.columns("events", "time_ns")["time_ns"][event]) if event >= 0 and trace.has_times else None


def _last_level(live: LiveBytes) -> int:
    return int(live.bytes[-1]) if len(live.bytes) else live.start


def _end_bytes(trace: Trace, device: str, live: LiveBytes) -> int:
    """Return the live bytes at the end by the final segments, where the file has them, else by the events.

    The two differ in a file whose history was edited.
    """
    segments = trace.columns("segments", "device", "requested_size")
    requested = segments["requested_size"][segments["device"] == trace.devices.index(device)]
    return int(requested.sum()) if len(requested) and (requested >= 0).all() else _last_level(live)


def phase_at(trace: Trace, event: int) -> str | None:
    """Return the phase of a row of the events table; None: unknown."""
    row = np.array([event])
    code = int(op_column(trace, trace.columns("events", "op_id")["op_id"][row], "phase")[0])
    spans = phase_rows(trace)
    if code < 0 and spans is not None:
        code = int(spans.phase[spans.pieces(row)][0])
    return PHASES[code] if code >= 0 else None
