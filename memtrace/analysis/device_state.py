"""The state of a CUDA device's caching allocator at one moment: its segments, live blocks and free blocks.

The final segments are walked back to the moment; live blocks come from the events. The allocator always merges free
neighbours, so segments and live blocks determine every free block. In the pool for large blocks a gap of at most 1 MiB
is not a free block: it belongs to the block in front of it (`memtrace.allocator.rules.MAX_SLACK_BYTES`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.allocator.rules import MAX_SLACK_BYTES, SMALL_SEGMENT_BYTES
from memtrace.allocator.settings import AllocatorSettings, SettingError
from memtrace.analysis.attribution import KIND
from memtrace.analysis.blocks import allocated_sizes, blocks
from memtrace.analysis.peak import live_after
from memtrace.format.arrays import Array
from memtrace.trace import Trace

_SEGMENT_KINDS: Final = [KIND[kind] for kind in ("segment_alloc", "segment_free", "segment_map", "segment_unmap")]


@dataclass(frozen=True)
class DeviceSegments:
    """Segments at one moment, by address. Sizes in bytes."""

    address: Array
    size: Array
    stream: Array
    pool: Array
    """0 for the default pool, and where the pool is unknown."""
    small: Array
    expandable: Array

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True)
class DeviceBlocks:
    """Live blocks at one moment, by address. Sizes in bytes."""

    block: Array
    """Number of each block (`block_id`)."""
    address: Array
    requested: Array
    size: Array
    """Size of each block, rounding and slack included."""
    segment: Array
    """Row of the segments; -1: outside every segment, which happens only in damaged files."""

    def __len__(self) -> int:
        return len(self.block)


@dataclass(frozen=True)
class FreeBlocks:
    """Free blocks at one moment. Sizes in bytes."""

    address: Array
    size: Array
    segment: Array
    """Row of the segments."""


@dataclass(frozen=True)
class DeviceState:
    """A device after one event.

    Attributes:
        device: code into `Trace.devices`.
        row: row of the event; -1: before the first.
    """

    device: int
    row: int
    segments: DeviceSegments
    live: DeviceBlocks
    free: FreeBlocks


def has_segments(trace: Trace, device: int) -> bool:
    """Return whether the trace has segments of a device (a code into `trace.devices`)."""
    events = trace.columns("events", "kind", "device")
    return bool(
        (trace.columns("segments", "device")["device"] == device).any()
        or ((events["device"] == device) & np.isin(events["kind"], _SEGMENT_KINDS)).any()
    )


def recorded_settings(trace: Trace) -> AllocatorSettings:
    """Return the allocator settings of a recording; the defaults where it has none or they cannot be parsed."""
    try:
        return AllocatorSettings.from_snapshot(trace.manifest.allocator_settings)
    except SettingError:
        return AllocatorSettings()


def device_state_at(trace: Trace, device: int, row: int) -> DeviceState:
    """Return the state of a device after an event.

    Args:
        trace: a trace of one rank.
        device: code into `trace.devices`.
        row: row of `events`; -1: before the first event.
    """
    segments = _segments_at(trace, device, row)
    live, free = _locate_blocks(segments, _live_blocks_at(trace, device, row))
    return DeviceState(device, row, segments, live, free)


def _live_blocks_at(trace: Trace, device: int, row: int) -> DeviceBlocks:
    """Return the live blocks, not located in segments yet; a block of unknown size gets its rounded request."""
    table = blocks(trace)
    live = live_after(table, device, row)
    live = live[np.argsort(table.address[live], kind="stable")]
    requested, allocated = table.size[live], allocated_sizes(trace)[live]
    rounded = recorded_settings(trace).round_sizes(requested)
    size = np.where(allocated >= 0, allocated, rounded)
    return DeviceBlocks(live, table.address[live], requested, size, np.full(len(live), -1, np.int64))


@dataclass(frozen=True)
class _SegmentEvents:
    """Segment events of a device, in order. Sizes in bytes."""

    kind: Array
    address: Array
    size: Array
    stream: Array
    pool: Array

    def take(self, rows: Array) -> _SegmentEvents:
        return _SegmentEvents(self.kind[rows], self.address[rows], self.size[rows], self.stream[rows], self.pool[rows])


def _segments_at(trace: Trace, device: int, row: int) -> DeviceSegments:
    columns = trace.columns("events", "kind", "device", "address", "size", "stream", "pool")
    rows = np.flatnonzero((columns["device"] == device) & np.isin(columns["kind"], _SEGMENT_KINDS))
    events = _SegmentEvents(*(columns[name][rows] for name in ("kind", "address", "size", "stream", "pool")))
    table = trace.columns("segments", "device", "address", "size", "stream", "pool", "small", "expandable")
    on_device = table["device"] == device
    names = ("address", "size", "stream", "pool", "small", "expandable")
    final = DeviceSegments(*(table[name][on_device] for name in names))
    is_ordinary = np.isin(events.kind, [KIND["segment_alloc"], KIND["segment_free"]])
    is_later = rows > row
    ordinary = _ordinary_segments(final, events.take(is_ordinary), is_later[is_ordinary])
    expandable = _mapped_parts(final, events.take(~is_ordinary & is_later))
    address = np.concatenate([ordinary.address, expandable.address])
    order = np.argsort(address, kind="stable")
    merged = {name: np.concatenate([getattr(ordinary, name), getattr(expandable, name)])[order] for name in names}
    merged["pool"] = np.maximum(merged["pool"], 0)
    return DeviceSegments(**merged)


def _ordinary_segments(final: DeviceSegments, events: _SegmentEvents, is_later: Array) -> DeviceSegments:
    """Return the segments that are not expandable.

    At each address the last event before the moment decides, or the first after it where there is none before.
    """
    order = np.argsort(events.address, kind="stable")
    distinct, first = np.unique(events.address[order], return_index=True)
    alive_rows = np.zeros(0, np.int64)
    if len(order):
        # Rows of one address are ordered by time: those before the moment come first.
        num_before = np.add.reduceat((~is_later[order]).astype(np.int64), first)
        decisive = order[np.where(num_before > 0, first + num_before - 1, first)]
        is_alive = events.kind[decisive] == np.where(num_before > 0, KIND["segment_alloc"], KIND["segment_free"])
        alive_rows = decisive[is_alive]
    untouched = ~final.expandable & ~np.isin(final.address, distinct)
    small = np.concatenate([events.size[alive_rows] <= SMALL_SEGMENT_BYTES, final.small[untouched]])
    return DeviceSegments(
        address=np.concatenate([events.address[alive_rows], final.address[untouched]]),
        size=np.concatenate([events.size[alive_rows], final.size[untouched]]),
        stream=np.concatenate([events.stream[alive_rows], final.stream[untouched]]),
        pool=np.concatenate([events.pool[alive_rows], final.pool[untouched]]),
        small=small,
        expandable=np.zeros(len(small), bool),
    )


def _mapped_parts(final: DeviceSegments, later: _SegmentEvents) -> DeviceSegments:
    """Return the mapped parts of expandable segments: the final ones, less later mappings, plus later unmappings."""
    expandable = final.expandable
    start = np.concatenate([final.address[expandable], later.address])
    length = np.concatenate([final.size[expandable], later.size])
    change = np.where(later.kind == KIND["segment_map"], -1, 1)
    weight = np.concatenate([np.ones(int(expandable.sum()), np.int64), change])
    edges = np.concatenate([start, start + length])
    order = np.argsort(edges, kind="stable")
    coverage = np.cumsum(np.concatenate([weight, -weight])[order])
    edge = edges[order]
    is_last = np.ones(len(edge), bool)
    is_last[:-1] = edge[1:] != edge[:-1]
    edge, mapped = edge[is_last], coverage[is_last] > 0
    mapped_before = np.concatenate([[False], mapped[:-1]]) if len(mapped) else mapped
    low, high = edge[mapped & ~mapped_before], edge[~mapped & mapped_before]
    # Stream, pool and size class of a part are those of any mapping that starts where the part starts.
    by_start = np.argsort(start, kind="stable")
    source = by_start
    if len(start):
        source = by_start[np.minimum(np.searchsorted(start[by_start], low), len(start) - 1)]
    return DeviceSegments(
        address=low,
        size=high - low,
        stream=np.concatenate([final.stream[expandable], later.stream])[source],
        pool=np.concatenate([final.pool[expandable], later.pool])[source],
        small=np.concatenate([final.small[expandable], later.size <= SMALL_SEGMENT_BYTES])[source],
        expandable=np.ones(len(low), bool),
    )


def _locate_blocks(segments: DeviceSegments, live: DeviceBlocks) -> tuple[DeviceBlocks, FreeBlocks]:
    """Return the blocks with their segments and slack, and the free blocks between them."""
    if not len(segments):
        empty = np.zeros(0, np.int64)
        return live, FreeBlocks(empty, empty, empty)
    segment_end = segments.address + segments.size
    place = np.searchsorted(segments.address, live.address, side="right") - 1
    is_inside = (place >= 0) & (live.address < segment_end[np.maximum(place, 0)])
    segment = np.where(is_inside, place, -1)
    rows = np.flatnonzero(is_inside)
    owner, start = segment[rows], live.address[rows]
    following = np.append(start[1:], np.iinfo(np.int64).max)
    following = np.where(np.append(owner[1:] == owner[:-1], False), following, segment_end[owner])
    gap = following - start - live.size[rows]
    is_slack = (gap > 0) & (gap <= MAX_SLACK_BYTES) & ~(segments.small | segments.expandable)[owner]
    size = live.size.copy()
    size[rows[is_slack]] += gap[is_slack]
    gap = np.where(is_slack, 0, gap)
    first = np.full(len(segments), -1, np.int64)
    first[owner[::-1]] = rows[::-1]
    free_in_front = segments.size
    if len(live):
        free_in_front = np.where(first >= 0, live.address[first] - segments.address, segments.size)
    behind, in_front = np.flatnonzero(gap > 0), np.flatnonzero(free_in_front > 0)
    free = FreeBlocks(
        address=np.concatenate([start[behind] + size[rows[behind]], segments.address[in_front]]),
        size=np.concatenate([gap[behind], free_in_front[in_front]]),
        segment=np.concatenate([owner[behind], in_front]),
    )
    return DeviceBlocks(live.block, live.address, live.requested, size, segment), free
