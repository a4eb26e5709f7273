"""Block lifetimes in rows of events, which step detection reads before blocks have categories."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.event_codes import KIND
from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True)
class RowLifetimes:
    """Size and lifetime of every block, indexed by block. ``memtrace.analysis.blocks`` needs steps; this does not."""

    size: Array
    """Requested bytes."""
    begin: Array
    """Row of events in which the block is allocated, or listed as older than the trace or its window."""
    end: Array
    """Row of events in which the block is freed; the number of events for blocks that are never freed."""
    is_allocated: Array
    """Whether the trace holds the allocation. False: the block is older than the trace or its window."""


def row_lifetimes(trace: Trace) -> RowLifetimes:
    """Return the lifetimes of the blocks of a single-rank trace."""
    events = trace.columns("events", "kind", "block_id", "size")
    kind, block, size = events["kind"], events["block_id"], events["size"]
    num_blocks, num_events = int(block.max(initial=-1)) + 1, len(kind)
    is_begin = (kind == KIND["alloc"]) | (kind == KIND["baseline"]) | (kind == KIND["live"])
    begins = np.flatnonzero(is_begin & (block >= 0))
    ends = np.flatnonzero((kind == KIND["free"]) & (block >= 0))
    sizes, begin = np.zeros(num_blocks, np.int64), np.zeros(num_blocks, np.int64)
    end, is_allocated = np.full(num_blocks, num_events, np.int64), np.zeros(num_blocks, bool)
    sizes[block[begins]], begin[block[begins]] = np.maximum(size[begins], 0), begins
    end[block[ends]] = ends
    is_allocated[block[begins]] = kind[begins] == KIND["alloc"]
    return RowLifetimes(sizes, begin, end, is_allocated)


def live_byte_changes(trace: Trace, lifetimes: RowLifetimes) -> Array:
    """Return the live bytes after each row of events, relative to the start of the trace."""
    events = trace.columns("events", "kind", "block_id")
    kind, block = events["kind"], events["block_id"]
    sign = np.where(kind == KIND["alloc"], 1, np.where(kind == KIND["free"], -1, 0))
    live: Array = np.cumsum(np.where(block >= 0, sign * lifetimes.size[block], 0))
    return live
