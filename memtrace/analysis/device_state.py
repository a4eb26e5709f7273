"""What a CUDA device's caching allocator held at one moment: segments, live blocks in them, and the free gaps between.

The final segments are walked back to the moment; live blocks come from the events. Free neighbours are always merged
by the allocator, so segments and live blocks tell every free block. In the pool for large blocks a gap of at most 1 MiB
is no free block but belongs to the block before it, whose size was rounded up to what was left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.attribution import KIND
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import live_after
from memtrace.format.arrays import Array
from memtrace.trace import Trace

ROUNDING_BYTES: Final = 512
SMALL_BYTES: Final = 1 << 20
SMALL_SEGMENT_BYTES: Final = 2 << 20
_SEGMENT_KINDS: Final = [KIND[kind] for kind in ("segment_alloc", "segment_free", "segment_map", "segment_unmap")]


@dataclass(frozen=True)
class Segments:
    """Segments at one moment, in order of address. The pool is 0 where it is not told. Bytes."""

    address: Array
    size: Array
    stream: Array
    pool: Array
    small: Array
    expandable: Array

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True)
class LiveBlocks:
    """Blocks in use at one moment, in order of address. Bytes."""

    block: Array
    address: Array
    requested: Array
    size: Array
    """Rounding and slack included."""
    segment: Array
    """Row of the segments; -1: in none of them, which only a damaged file shows."""

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True)
class FreeBlocks:
    """Free stretches of segments at one moment. Bytes."""

    address: Array
    size: Array
    segment: Array


@dataclass(frozen=True)
class DeviceState:
    """A device (a code into ``Trace.devices``) after a row of ``events``."""

    device: int
    row: int
    segments: Segments
    live: LiveBlocks
    free: FreeBlocks


def has_segments(trace: Trace, device: int) -> bool:
    """Whether the trace tells of segments of the device (a code into ``trace.devices``)."""
    events = trace.columns("events", "kind", "device")
    return bool(
        (trace.columns("segments", "device")["device"] == device).any()
        or ((events["device"] == device) & np.isin(events["kind"], _SEGMENT_KINDS)).any()
    )


def state_at(trace: Trace, device: int, row: int) -> DeviceState:
    """The state of a device (a code into ``trace.devices``) once the event of ``row`` has happened."""
    segments = _segments_at(trace, device, row)
    live = _live_at(trace, device, row)
    live, free = _fill(segments, live)
    return DeviceState(device, row, segments, live, free)


def _live_at(trace: Trace, device: int, row: int) -> LiveBlocks:
    """Live blocks, their sizes as far as told (else the rounded request) and not yet in segments."""
    found = blocks(trace)
    live = live_after(found, device, row)
    live = live[np.argsort(found.address[live], kind="stable")]
    requested, allocated = found.size[live], found.allocated_size[live]
    rounded = np.maximum(-(-requested // ROUNDING_BYTES), 1) * ROUNDING_BYTES
    size = np.where(allocated >= 0, allocated, rounded)
    return LiveBlocks(live, found.address[live], requested, size, np.full(len(live), -1, np.int64))


def _segments_at(trace: Trace, device: int, row: int) -> Segments:
    names = ("kind", "device", "address", "size", "stream", "pool")
    events = trace.columns("events", *names)
    rows = np.flatnonzero((events["device"] == device) & np.isin(events["kind"], _SEGMENT_KINDS))
    kind, address, size, stream, pool = (events[name][rows] for name in ("kind", "address", "size", "stream", "pool"))
    final = trace.columns("segments", "device", "address", "size", "stream", "pool", "small", "expandable")
    mine = final["device"] == device
    end = Segments(*(final[name][mine] for name in ("address", "size", "stream", "pool", "small", "expandable")))
    whole = np.isin(kind, [KIND["segment_alloc"], KIND["segment_free"]])
    later = rows > row
    fixed = _whole_segments(end, kind[whole], address[whole], size[whole], stream[whole], pool[whole], later[whole])
    pages = ~whole & later
    grown = _expandable_ranges(
        end,
        address[pages],
        size[pages],
        stream[pages],
        pool[pages],
        np.where(kind[pages] == KIND["segment_map"], -1, 1),
    )
    parts = [np.concatenate(pair) for pair in zip(_columns(fixed), _columns(grown), strict=True)]
    order = np.argsort(parts[0], kind="stable")
    columns = [column[order] for column in parts]
    columns[3] = np.maximum(columns[3], 0)
    return Segments(*columns)


def _columns(segments: Segments) -> tuple[Array, ...]:
    return (segments.address, segments.size, segments.stream, segments.pool, segments.small, segments.expandable)


def _whole_segments(
    end: Segments, kind: Array, address: Array, size: Array, stream: Array, pool: Array, later: Array
) -> Segments:
    """Segments that come and go whole: at an address the last event before decides, else the first one after."""
    order = np.argsort(address, kind="stable")
    place, first = np.unique(address[order], return_index=True)
    telling = np.zeros(0, np.int64)
    if len(order):
        # Rows of one address are in order of time: those before the moment come first.
        before = np.add.reduceat((~later[order]).astype(np.int64), first)
        decisive = order[np.where(before > 0, first + before - 1, first)]
        alive = kind[decisive] == np.where(before > 0, KIND["segment_alloc"], KIND["segment_free"])
        telling = decisive[alive]
    untouched = ~end.expandable & ~np.isin(end.address, place)
    pairs = ((address, end.address), (size, end.size), (stream, end.stream), (pool, end.pool))
    where = [np.concatenate([events[telling], column[untouched]]) for events, column in pairs]
    small = np.concatenate([size[telling] <= SMALL_SEGMENT_BYTES, end.small[untouched]])
    return Segments(where[0], where[1], where[2], where[3], small, np.zeros(len(small), bool))


def _expandable_ranges(end: Segments, address: Array, size: Array, stream: Array, pool: Array, sign: Array) -> Segments:
    """Mapped stretches: the final ones, less what was mapped later, plus what was unmapped later."""
    mine = end.expandable
    start = np.concatenate([end.address[mine], address])
    length = np.concatenate([end.size[mine], size])
    weight = np.concatenate([np.ones(int(mine.sum()), np.int64), sign])
    edges = np.concatenate([start, start + length])
    order = np.argsort(edges, kind="stable")
    covered = np.cumsum(np.concatenate([weight, -weight])[order])
    edge = edges[order]
    last = np.ones(len(edge), bool)
    last[:-1] = edge[1:] != edge[:-1]
    edge, mapped = edge[last], covered[last] > 0
    begins = mapped & ~np.concatenate([[False], mapped[:-1]]) if len(mapped) else mapped
    ends = ~mapped & np.concatenate([[False], mapped[:-1]]) if len(mapped) else mapped
    low, high = edge[begins], edge[ends]
    # Stream, pool and page size are those of any piece that begins in the stretch.
    by_start = np.argsort(start, kind="stable")
    piece = (
        by_start[np.minimum(np.searchsorted(start[by_start], low), max(len(start) - 1, 0))] if len(start) else by_start
    )
    streams, pools = np.concatenate([end.stream[mine], stream]), np.concatenate([end.pool[mine], pool])
    smalls = np.concatenate([end.small[mine], size <= SMALL_SEGMENT_BYTES])
    return Segments(low, high - low, streams[piece], pools[piece], smalls[piece], np.ones(len(low), bool))


def _fill(segments: Segments, live: LiveBlocks) -> tuple[LiveBlocks, FreeBlocks]:
    """Put the blocks in their segments: their slack, and the free blocks between them."""
    if not len(segments):
        empty = np.zeros(0, np.int64)
        return live, FreeBlocks(empty, empty, empty)
    place = np.searchsorted(segments.address, live.address, side="right") - 1
    inside = (place >= 0) & (live.address < (segments.address + segments.size)[np.maximum(place, 0)])
    segment = np.where(inside, place, -1)
    at = np.flatnonzero(inside)
    owner, start = segment[at], live.address[at]
    limit = (segments.address + segments.size)[owner]
    following = np.append(start[1:], np.iinfo(np.int64).max)
    following = np.where(np.append(owner[1:] == owner[:-1], False), following, limit)
    gap = following - start - live.size[at]
    slack = (gap > 0) & (gap <= SMALL_BYTES) & ~(segments.small | segments.expandable)[owner]
    size = live.size.copy()
    size[at[slack]] += gap[slack]
    gap = np.where(slack, 0, gap)
    first = np.full(len(segments), -1, np.int64)
    first[owner[::-1]] = at[::-1]
    head = np.where(first >= 0, live.address[first] - segments.address, segments.size) if len(live) else segments.size
    behind, ahead = np.flatnonzero(gap > 0), np.flatnonzero(head > 0)
    address = np.concatenate([start[behind] + size[at[behind]], segments.address[ahead]])
    free = FreeBlocks(address, np.concatenate([gap[behind], head[ahead]]), np.concatenate([owner[behind], ahead]))
    filled = LiveBlocks(live.block, live.address, live.requested, size, segment)
    return filled, free
