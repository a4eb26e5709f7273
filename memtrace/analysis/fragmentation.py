"""Fragmentation: memory that the caching allocator reserves but the program does not use, and what pins it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.allocator.rules import SMALL_REQUEST_BYTES
from memtrace.analysis.blocks import blocks
from memtrace.analysis.device_state import DeviceState, device_state_at, has_segments
from memtrace.analysis.peak import LiveBytes, level_at, requested_bytes, reserved_bytes
from memtrace.display import Displayed
from memtrace.errors import TraceError
from memtrace.format.arrays import Array
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

PINNED_COLUMNS: Final = (
    "address",
    "size",
    "stream",
    "pool",
    "small",
    "expandable",
    "num_blocks",
    "live_bytes",
    "free_bytes",
    "largest_free_bytes",
    "pin_block",
    "pin_bytes",
    "pin_stack",
)


@dataclass(frozen=True)
class Fragmentation(Displayed):
    """How a device's reserved memory is used at one moment: requested, rounding and free bytes add up to it."""

    device: str
    time_ns: int | None
    """Time of the moment; None: the trace has no times."""
    event: int
    """Row of the last event before the moment; -1: the start."""
    requested_bytes: int
    """Bytes that the program requested for live blocks."""
    waste_bytes: int
    """Bytes by which live blocks exceed their requests."""
    free_bytes: int
    """Bytes reserved but in no live block."""
    reserved_bytes: int
    releasable_bytes: int
    """Bytes of wholly free segments, which ``torch.cuda.empty_cache()`` would release."""
    pinned_bytes: int
    """Free bytes in segments that a live block keeps from being released."""
    largest_fit_bytes: int
    """Largest request that fits without a new segment, in the default pool and on the stream that uses it most."""
    num_segments: int


def compute_fragmentation(trace: Trace, device: str, *, row: int | None = None) -> Fragmentation | None:
    """Return how the reserved memory of a device is used at one moment.

    Args:
        trace: a trace of one rank.
        device: a name from ``trace.devices``.
        row: row of ``events`` after which to measure. The default is the peak of reserved memory, and of all moments at
            that peak the one with most live bytes: what is free even then is the cost of fragmentation.

    Returns:
        None where the trace has no segments (Chrome traces, CPU recordings), or its segments contradict its blocks.
    """
    state = _select_state(trace, device, row)
    is_damaged = state is not None and bool((state.live.segment < 0).any())
    return None if state is None or is_damaged else measure_fragmentation(trace, state)


def measure_fragmentation(trace: Trace, state: DeviceState) -> Fragmentation:
    """Return how the reserved memory of a device is used in a given state."""
    segments, live, free = state.segments, state.live, state.free
    inside = live.segment >= 0
    used = np.bincount(live.segment[inside], weights=live.size[inside], minlength=len(segments))
    requested, allocated = int(live.requested[inside].sum()), int(live.size[inside].sum())
    releasable = int(segments.size[used == 0].sum())
    time = trace.columns("events", "time_ns")["time_ns"]
    return Fragmentation(
        device=trace.devices[state.device],
        time_ns=int(time[max(state.row, 0)]) if len(time) and trace.has_times else None,
        event=state.row,
        requested_bytes=requested,
        waste_bytes=allocated - requested,
        free_bytes=int(free.size.sum()),
        reserved_bytes=int(segments.size.sum()),
        releasable_bytes=releasable,
        pinned_bytes=int(free.size.sum()) - releasable,
        largest_fit_bytes=largest_fit_bytes(state, *_most_used_list(state)),
        num_segments=len(segments),
    )


def largest_fit_bytes(state: DeviceState, pool: int, stream: int) -> int:
    """Return the largest request that finds a free block in ``pool`` on ``stream``.

    Requests of up to 1 MiB are served from small segments only, larger ones from large segments only.
    """
    segments, free = state.segments, state.free
    reachable = (segments.pool[free.segment] == pool) & (segments.stream[free.segment] == stream)
    small = segments.small[free.segment]
    large_fit = int(free.size[reachable & ~small].max(initial=0))
    if large_fit > SMALL_REQUEST_BYTES:
        return large_fit
    return min(int(free.size[reachable & small].max(initial=0)), SMALL_REQUEST_BYTES)


def pinned_segments_table(trace: Trace, device: str, *, row: int | None = None) -> pd.DataFrame:
    """Return the segments with free memory that a live block keeps from being released, most free memory first.

    Columns: address, size (bytes), stream, pool, small, expandable, num_blocks (live), live_bytes, free_bytes,
    largest_free_bytes, pin_block (its largest live block), pin_bytes, pin_stack (names.id; -1: not recorded). The table
    is empty where the trace has no segments. The arguments are those of ``compute_fragmentation``.
    """
    import pandas as pd

    state = _select_state(trace, device, row)
    empty = np.zeros(0, np.int64)
    columns = _pinned_columns(trace, state) if state is not None else dict.fromkeys(PINNED_COLUMNS, empty)
    table: pd.DataFrame = pd.DataFrame(columns)
    return table


def _pinned_columns(trace: Trace, state: DeviceState) -> dict[str, Array]:
    segments, live, free = state.segments, state.live, state.free
    inside = np.flatnonzero(live.segment >= 0)
    owner = live.segment[inside]
    num_blocks = np.bincount(owner, minlength=len(segments))
    live_bytes = np.bincount(owner, weights=live.size[inside], minlength=len(segments)).astype(np.int64)
    free_bytes = np.bincount(free.segment, weights=free.size, minlength=len(segments)).astype(np.int64)
    largest_free = np.zeros(len(segments), np.int64)
    np.maximum.at(largest_free, free.segment, free.size)
    # Of the blocks of a segment, assigned by ascending size, the largest remains.
    by_size = inside[np.argsort(live.size[inside], kind="stable")]
    pin = np.full(len(segments), -1, np.int64)
    pin[live.segment[by_size]] = by_size
    rows = np.flatnonzero((num_blocks > 0) & (free_bytes > 0))
    rows = rows[np.argsort(-free_bytes[rows], kind="stable")]
    return {name: getattr(segments, name)[rows] for name in PINNED_COLUMNS[:6]} | {
        "num_blocks": num_blocks[rows],
        "live_bytes": live_bytes[rows],
        "free_bytes": free_bytes[rows],
        "largest_free_bytes": largest_free[rows],
        "pin_block": live.block[pin[rows]],
        "pin_bytes": live.size[pin[rows]],
        "pin_stack": blocks(trace).stack[live.block[pin[rows]]],
    }


def _select_state(trace: Trace, device: str, row: int | None) -> DeviceState | None:
    if device not in trace.devices:
        raise TraceError(f"the trace has no device {device}. Its devices: {', '.join(trace.devices) or 'none'}.")
    code = trace.devices.index(device)
    reserved = reserved_bytes(trace, device)
    if reserved is None or not has_segments(trace, code):
        return None
    if row is None:
        row = _row_of_peak(trace, device, reserved)
    return trace.cached(device_state_at, code, row)


def _row_of_peak(trace: Trace, device: str, reserved: LiveBytes) -> int:
    """Return, of the rows at the peak of reserved memory, the first with most live bytes; -1: the start."""
    live = requested_bytes(trace, device)
    rows = np.concatenate([[-1], live.rows])
    reserved_at_rows = level_at(reserved, rows)
    peak = max(reserved.start, int(reserved.bytes.max(initial=0)))
    if not (reserved_at_rows == peak).any():
        return int(reserved.rows[np.argmax(reserved.bytes)])
    live_at_rows = np.concatenate([[live.start], live.bytes])
    return int(rows[np.argmax(np.where(reserved_at_rows == peak, live_at_rows, -1))])


def _most_used_list(state: DeviceState) -> tuple[int, int]:
    """Return the default pool and the stream with most bytes of segments in it."""
    segments = state.segments
    streams, place = np.unique(segments.stream, return_inverse=True)
    if not len(streams):
        return 0, 0
    in_default_pool = np.where(segments.pool == 0, segments.size, 0)
    reserved = np.bincount(place, weights=in_default_pool, minlength=len(streams))
    return 0, int(streams[np.argmax(reserved)])
