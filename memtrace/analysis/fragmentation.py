"""Memory that the caching allocator holds and the program does not use: how much, where, and what keeps it there."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.analysis.device_state import SMALL_BYTES, DeviceState, has_segments, state_at
from memtrace.analysis.peak import LiveBytes, level_at, requested_bytes, reserved_bytes
from memtrace.errors import TraceError
from memtrace.format.arrays import Array
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Fragmentation:
    """A device at one moment. Bytes but for ``num_segments``; the first three sum up to what is reserved."""

    device: str
    time_ns: int | None
    event: int
    """Row of events after which it is so; -1: the start."""
    requested_bytes: int
    """What live blocks were asked for."""
    waste_bytes: int
    """What their sizes were rounded up by."""
    free_bytes: int
    """Reserved and in no block."""
    reserved_bytes: int
    releasable_bytes: int
    """Free segments, whole: what ``torch.cuda.empty_cache()`` would give back."""
    pinned_bytes: int
    """Free bytes of segments that a live block keeps."""
    largest_fit_bytes: int
    """The largest request that would fit without a new segment, in the default pool on its busiest stream."""
    num_segments: int

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


def fragmentation(trace: Trace, device: str, *, row: int | None = None) -> Fragmentation | None:
    """The device after a row of events; by default, of the moments when most was reserved, the one when most was in
    use: what is free even then is what fragmentation costs.

    None where the trace does not tell of segments, as a Chrome trace or a recording of the CPU does not, and where its
    segments contradict its blocks.
    """
    state = _state(trace, device, row)
    # Live blocks outside of every segment: the file contradicts itself, and its segments say nothing.
    return None if state is None or (state.live.segment < 0).any() else measure(trace, device, state)


def measure(trace: Trace, device: str, state: DeviceState) -> Fragmentation:
    """The numbers of one state of a device."""
    segments, live, free = state.segments, state.live, state.free
    inside = live.segment >= 0
    used = np.bincount(live.segment[inside], weights=live.size[inside], minlength=len(segments))
    empty = used == 0
    reserved, requested = int(segments.size.sum()), int(live.requested[inside].sum())
    allocated = int(live.size[inside].sum())
    releasable = int(segments.size[empty].sum())
    time = trace.columns("events", "time_ns")["time_ns"]
    return Fragmentation(
        device=device,
        time_ns=int(time[max(state.row, 0)]) if len(time) and trace.has_times else None,
        event=state.row,
        requested_bytes=requested,
        waste_bytes=allocated - requested,
        free_bytes=int(free.size.sum()),
        reserved_bytes=reserved,
        releasable_bytes=releasable,
        pinned_bytes=int(free.size.sum()) - releasable,
        largest_fit_bytes=largest_fit(state, *_busiest(state)),
        num_segments=len(segments),
    )


def largest_fit(state: DeviceState, pool: int, stream: int) -> int:
    """The largest request that would find a free block in ``pool`` on ``stream``. Bytes.

    Requests of up to 1 MiB look in the small segments only, larger ones in the large segments only.
    """
    segments, free = state.segments, state.free
    reachable = (segments.pool[free.segment] == pool) & (segments.stream[free.segment] == stream)
    small = segments.small[free.segment]
    large_fit = int(free.size[reachable & ~small].max(initial=0))
    if large_fit > SMALL_BYTES:
        return large_fit
    return min(int(free.size[reachable & small].max(initial=0)), SMALL_BYTES)


def pinned_segments(trace: Trace, device: str, *, row: int | None = None) -> pd.DataFrame:
    """Segments that hold free memory and cannot be given back, those with most of it first; empty without segments.

    Columns: address, size (bytes), stream, pool, small, expandable, num_blocks (live), live_bytes, free_bytes,
    largest_free_bytes, pin_block (its largest live block), pin_bytes, pin_stack (names.id; -1: not taken).
    """
    import pandas as pd

    state = _state(trace, device, row)
    empty = np.zeros(0, np.int64)
    frame: pd.DataFrame = pd.DataFrame(
        _pinned(trace, state) if state is not None else dict.fromkeys(PINNED_COLUMNS, empty)
    )
    return frame


PINNED_COLUMNS = (
    "address", "size", "stream", "pool", "small", "expandable", "num_blocks", "live_bytes", "free_bytes",
    "largest_free_bytes", "pin_block", "pin_bytes", "pin_stack",
)  # fmt: skip


def _pinned(trace: Trace, state: DeviceState) -> dict[str, Array]:
    segments, live, free = state.segments, state.live, state.free
    inside = np.flatnonzero(live.segment >= 0)
    owner = live.segment[inside]
    count = np.bincount(owner, minlength=len(segments))
    live_bytes = np.bincount(owner, weights=live.size[inside], minlength=len(segments)).astype(np.int64)
    free_bytes = np.bincount(free.segment, weights=free.size, minlength=len(segments)).astype(np.int64)
    largest_free = np.zeros(len(segments), np.int64)
    np.maximum.at(largest_free, free.segment, free.size)
    # The last of a segment's blocks in order of size is its largest.
    by_size = inside[np.argsort(live.size[inside], kind="stable")]
    pin = np.full(len(segments), -1, np.int64)
    pin[live.segment[by_size]] = by_size
    rows = np.flatnonzero((count > 0) & (free_bytes > 0))
    rows = rows[np.argsort(-free_bytes[rows], kind="stable")]
    stack = blocks(trace).stack[live.block[pin[rows]]]
    columns = {name: getattr(segments, name)[rows] for name in PINNED_COLUMNS[:6]}
    return columns | {
        "num_blocks": count[rows],
        "live_bytes": live_bytes[rows],
        "free_bytes": free_bytes[rows],
        "largest_free_bytes": largest_free[rows],
        "pin_block": live.block[pin[rows]],
        "pin_bytes": live.size[pin[rows]],
        "pin_stack": stack,
    }


def _state(trace: Trace, device: str, row: int | None) -> DeviceState | None:
    if device not in trace.devices:
        raise TraceError(f"the trace has no device {device}: it has {', '.join(trace.devices) or 'none'}.")
    code = trace.devices.index(device)
    reserved = reserved_bytes(trace, device)
    if reserved is None or not has_segments(trace, code):
        return None
    if row is None:
        row = _fullest(trace, device, reserved)
    return trace.cached(state_at, code, row)


def _fullest(trace: Trace, device: str, reserved: LiveBytes) -> int:
    """Of the rows at which most is reserved the first at which most is live; -1: the start."""
    live = requested_bytes(trace, device)
    rows = np.concatenate([[-1], live.rows])
    held = level_at(reserved, rows)
    most = max(reserved.start, int(reserved.bytes.max(initial=0)))
    if not (held == most).any():
        return int(reserved.rows[np.argmax(reserved.bytes)])
    return int(rows[np.argmax(np.where(held == most, np.concatenate([[live.start], live.bytes]), -1))])


def _busiest(state: DeviceState) -> tuple[int, int]:
    """The default pool and the stream that has most of its segments' bytes."""
    segments = state.segments
    streams, place = np.unique(segments.stream, return_inverse=True)
    if not len(streams):
        return 0, 0
    held = np.bincount(place, weights=np.where(segments.pool == 0, segments.size, 0), minlength=len(streams))
    return 0, int(streams[np.argmax(held)])
