"""Reads the final state of a CUDA snapshot (``segments``) into columns: the segments and their live blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from memtrace.readers.cuda_snapshot.entries import MAX_DEVICES, pool_numbers
from memtrace.readers.fields import addresses, integers, sizes
from memtrace.readers.rows import Coded, FieldError, Row, Rows, rows_of
from memtrace.readers.tables import Array

# PyTorch documents "active_awaiting_free" and writes "active_pending_free".
_STATES: Final = {"inactive": 0, "active_allocated": 1, "active_pending_free": 2, "active_awaiting_free": 2}


@dataclass(frozen=True)
class SnapshotSegments:
    """The segments; each array has one element per segment. Sizes are bytes, -1 where the file does not state them."""

    device: Array
    address: Array
    size: Array
    allocated: Array
    """Bytes of allocated blocks, including rounding."""
    active: Array
    """Bytes of allocated blocks and of blocks that wait for a stream, including rounding."""
    requested: Array
    """Bytes that the program requested for the active blocks."""
    stream: Array
    pool: Array
    """Number of the memory pool as in the schema."""
    small: Array
    """Whether the segment belongs to the small pool."""
    expandable: Array
    """1 for an expandable segment, 0 for others, -1 where it is unknown."""
    frames: Coded
    """Call stacks as the file contains them."""
    num_size_mismatches: int = 0
    """Number of segments whose blocks do not add up to the size of the segment; 0 in every valid snapshot."""

    def __len__(self) -> int:
        return len(self.size)


@dataclass(frozen=True)
class LiveBlocks:
    """The blocks that are allocated or wait for a stream when the snapshot is taken; one element per block."""

    device: Array
    address: Array
    size: Array
    """Bytes, including rounding."""
    requested: Array
    """Bytes that the program requested."""
    stream: Array
    pool: Array
    segment: Array
    """Row of ``SnapshotSegments``."""
    pending: Array
    """Whether the program freed the block and the block waits for a stream."""
    frames: Coded
    """Call stacks as the file contains them."""

    def __len__(self) -> int:
        return len(self.size)


def read_segments(value: object) -> tuple[SnapshotSegments, LiveBlocks]:
    """Read ``segments``.

    Raises:
        FieldError: the value is not a list of segments of an allocator.
    """
    rows = rows_of(value, "'segments'")
    blocks, num_blocks = rows.children("blocks", "segment {}", "the blocks of a segment")
    segments = _segments(rows)
    owner = np.repeat(np.arange(len(rows)), num_blocks)
    size = sizes(blocks.numbers("size"), "size", "block {}")
    live = _live_blocks(blocks, owner, size, segments)
    filled = np.bincount(owner, size, minlength=len(segments))
    return replace(segments, num_size_mismatches=int((filled != segments.size).sum())), live


def _segments(rows: Rows) -> SnapshotSegments:
    what = "segment {}"
    device = integers(rows.numbers("device"), "device", what)
    if len(device) and (device.min() < 0 or device.max() >= MAX_DEVICES):
        raise FieldError(f"a segment is on device {int(device[(device < 0) | (device >= MAX_DEVICES)][0])}")
    kinds, flags = rows.values("segment_type"), rows.values("is_expandable")
    return SnapshotSegments(
        device=device.astype(np.int16),
        address=addresses(rows.numbers("address"), "address", what),
        size=sizes(rows.numbers("total_size"), "total_size", what),
        allocated=sizes(rows.numbers("allocated_size"), "allocated_size", what),
        active=sizes(rows.numbers("active_size"), "active_size", what),
        requested=_optional_sizes(rows, "requested_size", what),
        stream=addresses([stream or 0 for stream in rows.values("stream")], "stream", what),
        pool=pool_numbers(rows.coded("segment_pool_id")),
        small=np.array([kind == "small" for kind in kinds], bool),
        expandable=np.array([-1 if flag is None else bool(flag) for flag in flags], np.int8),
        frames=rows.coded("frames"),
    )


def _optional_sizes(rows: Rows, key: str, what: str) -> Array:
    values = rows.numbers(key)
    return np.full(len(rows), -1, np.int64) if _is_incomplete(values) else sizes(values, key, what)


def _is_incomplete(values: Sequence[Any] | Array) -> bool:
    return not isinstance(values, np.ndarray) and any(value is None for value in values)


def _live_blocks(blocks: Rows, owner: Array, size: Array, segments: SnapshotSegments) -> LiveBlocks:
    """Return the blocks that are not inactive; ``owner`` is the segment of each block."""
    state = _states(blocks.coded("state"))
    address = _block_addresses(blocks, owner, size, segments)
    live = state > 0
    rows = blocks.take(live)
    owner = owner[live]
    requested = rows.numbers("requested_size")
    if _is_incomplete(requested):
        requested = [_requested(rows.row(number)) for number in range(len(rows))]
    frames = rows.coded("frames")
    if _is_incomplete(frames.values):
        frames = Coded([_frames(rows.row(number)) for number in range(len(rows))])
    return LiveBlocks(
        device=segments.device[owner],
        address=address[live],
        size=size[live],
        requested=sizes(requested, "requested_size", "block {}"),
        stream=segments.stream[owner],
        pool=segments.pool[owner],
        segment=owner,
        pending=state[live] == 2,
        frames=frames,
    )


def _states(states: Coded) -> Array:
    try:
        codes = np.array([_STATES.get(state, -1) for state in states.values], np.int8)
    except TypeError:
        raise FieldError("a block has a 'state' that is not a string") from None
    if (codes < 0).any():
        state = states.values[int(np.argmin(codes))]
        raise FieldError(f"a block has {f'the unknown state {ascii(state)[:40]}' if state is not None else 'no state'}")
    return states.spread(codes)


def _block_addresses(blocks: Rows, owner: Array, size: Array, segments: SnapshotSegments) -> Array:
    """Return the addresses in the file; torch 2.0 writes none, so they follow from the order of the blocks."""
    values = blocks.numbers("address")
    if not _is_incomplete(values):
        return addresses(values, "address", "block {}")
    before = np.cumsum(size) - size
    first = np.searchsorted(owner, np.arange(len(segments)))
    start = before[np.minimum(first, max(len(before) - 1, 0))] if len(before) else np.zeros(len(segments), np.int64)
    address: Array = segments.address[owner] + before - start[owner]
    return address


def _requested(row: Row) -> Any:
    """Return the requested size of a block; versions before torch 2.0 state it only in the history of the block."""
    if "requested_size" in row:
        return row["requested_size"]
    latest = _latest_allocation(row)
    return latest["real_size"] if latest is not None and "real_size" in latest else row["size"]


def _frames(row: Row) -> Any:
    if "frames" in row:
        return row["frames"]
    latest = _latest_allocation(row)
    return latest.get("frames") if latest is not None else None


def _latest_allocation(row: Row) -> Mapping[str, Any] | None:
    """Return the newest allocation in the history of a block, as torch 2.0 writes it."""
    history = row.get("history")
    if not isinstance(history, list | tuple) or not history or not isinstance(history[0], dict):
        return None
    return history[0]
