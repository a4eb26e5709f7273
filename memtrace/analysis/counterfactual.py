"""The peak memory that would result if blocks were not allocated during parts of their lifetimes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.block_accesses import group_accesses_by_block, has_accesses, number_operator_calls
from memtrace.analysis.blocks import Blocks, blocks
from memtrace.analysis.peak import requested_bytes
from memtrace.format.arrays import Array
from memtrace.trace import Trace

END_OF_TRACE: Final = 1 << 40
"""A row after all rows of events: the end of an interval whose block is never freed or used again."""


@dataclass(frozen=True)
class IdleIntervals:
    """Intervals in which blocks could be absent from memory, one per element; limits are rows of the table events."""

    block: Array
    begin: Array
    """The allocation of the block, or the last row before the interval that needs it; -1: the start of the trace."""
    end: Array
    """The free of the block, or the next row that needs it; ``END_OF_TRACE``: neither follows."""

    def __len__(self) -> int:
        return len(self.block)

    def select(self, index: Array) -> IdleIntervals:
        """Return the intervals at ``index``, which may be positions or a mask."""
        return IdleIntervals(self.block[index], self.begin[index], self.end[index])

    @classmethod
    def concatenate(cls, parts: Sequence[IdleIntervals]) -> IdleIntervals:
        """Return the intervals of all ``parts``; no intervals if there are no parts."""
        empty = np.zeros(0, np.int64)
        columns = ([empty, *(getattr(part, name) for part in parts)] for name in ("block", "begin", "end"))
        return cls(*(np.concatenate(column) for column in columns))


def free_rows(columns: Blocks, block: Array) -> Array:
    """Return the row of events at which each block is freed, ``END_OF_TRACE`` if it is live at the end."""
    return np.where(columns.free_event[block] >= 0, columns.free_event[block], END_OF_TRACE)


def merge_intervals(intervals: IdleIntervals) -> IdleIntervals:
    """Return the same intervals without overlaps, so that no byte is removed twice."""
    ordered = intervals.select(np.lexsort((intervals.begin, intervals.block)))
    if not len(ordered):
        return ordered
    # An interval starts a new run if no earlier interval of its block reaches it. Offsets set the blocks so far apart
    # that the running maximum of the ends never mixes two blocks.
    offset = np.unique(ordered.block, return_inverse=True)[1] * (2 * END_OF_TRACE)
    reached = np.maximum.accumulate(ordered.end + offset)
    starts_run = np.ones(len(ordered), bool)
    starts_run[1:] = ordered.begin[1:] + offset[1:] > reached[:-1]
    first = np.flatnonzero(starts_run)
    end = np.maximum.reduceat(ordered.end + offset, first) - offset[first]
    return IdleIntervals(ordered.block[first], ordered.begin[first], end)


def peak_without_intervals(trace: Trace, device: str, intervals: IdleIntervals) -> int:
    """Return the peak requested bytes of a device if its blocks were absent during ``intervals``."""
    live = requested_bytes(trace, device)
    removed = removed_bytes(trace, device, intervals)
    return int((np.concatenate([[live.start], live.bytes]) - removed).max())


def removed_bytes(trace: Trace, device: str, intervals: IdleIntervals) -> Array:
    """Return how many bytes ``intervals`` remove at the start, and after each row of ``requested_bytes``."""
    columns, rows = blocks(trace), requested_bytes(trace, device).rows
    on_device = columns.device[intervals.block] == trace.devices.index(device)
    merged = merge_intervals(intervals.select(on_device))
    size = columns.size[merged.block]
    # Level k lasts from change k - 1 to change k. A block is removed from the levels that lie wholly in its interval.
    begin = np.where(merged.begin < 0, 0, np.searchsorted(rows, merged.begin, side="left") + 1)
    end = np.where(merged.end >= END_OF_TRACE, len(rows) + 1, np.searchsorted(rows, merged.end, side="right"))
    covers_level = begin < end
    change = np.zeros(len(rows) + 2, np.int64)
    np.add.at(change, begin[covers_level], size[covers_level])
    np.add.at(change, end[covers_level], -size[covers_level])
    return np.cumsum(change)[: len(rows) + 1]


def max_simultaneous_bytes(intervals: IdleIntervals, size: Array) -> int:
    """Return the most bytes that are idle at the same time.

    Args:
        intervals: the intervals; those of one block must not overlap.
        size: the bytes of each interval.
    """
    row = np.concatenate([intervals.begin, intervals.end])
    change = np.concatenate([size, -size])
    # Where one interval ends as another begins, the end comes first.
    order = np.lexsort((change, row))
    return int(np.cumsum(change[order]).max(initial=0))


def compute_peak_lower_bound(trace: Trace, device: str, removable: IdleIntervals) -> int | None:
    """Return the most bytes of a device that a single operator call needs at the same time.

    These are the blocks that the call allocates or accesses, as far as they are live at the same moment. No order of
    the operators and no earlier free can bring the peak below this. None if the trace records no accesses.
    Source: DrGPUM (ASPLOS 2023), the "optimal peak" of its artifact.

    Args:
        trace: the trace of one rank.
        device: the device.
        removable: intervals that a fix removes from memory. A block is not counted in a call during which it could be
            absent, so that the bound is at most the peak after any of these fixes.
    """
    if not has_accesses(trace):
        return None
    columns, accesses, calls = blocks(trace), group_accesses_by_block(trace), number_operator_calls(trace)
    allocated = np.flatnonzero(columns.alloc_event >= 0)
    call = np.concatenate([calls.number[accesses.event], calls.number[columns.alloc_event[allocated]]])
    block = np.concatenate([accesses.block, allocated])
    counted = (call >= 0) & (columns.device[block] == trace.devices.index(device))
    call, block = np.unique(np.stack([call[counted], block[counted]]), axis=1)
    begin = np.maximum(columns.alloc_event[block], calls.first[call])
    end = np.minimum(free_rows(columns, block), np.maximum(calls.last[call], calls.first[call] + 1))
    is_needed = (end > begin) & ~_overlap(merge_intervals(removable), block, calls.first[call], end)
    call, size = call[is_needed], columns.size[block[is_needed]]
    row = np.concatenate([begin[is_needed], end[is_needed]])
    change = np.concatenate([size, -size])
    # The changes of a call add up to 0, so that one running sum serves all calls.
    order = np.lexsort((change, row, np.concatenate([call, call])))
    return int(np.cumsum(change[order]).max(initial=0))


def _overlap(intervals: IdleIntervals, block: Array, begin: Array, end: Array) -> Array:
    """Return whether any of ``intervals`` (merged) lies partly between the rows ``begin`` and ``end`` of a block."""
    if not len(intervals):
        return np.zeros(len(block), bool)
    distinct, number = np.unique(intervals.block, return_inverse=True)
    place = np.minimum(np.searchsorted(distinct, block), len(distinct) - 1)
    # The last interval that begins before ``end`` is the one that ends last, because none overlap.
    position = np.searchsorted(number * (2 * END_OF_TRACE) + intervals.begin, place * (2 * END_OF_TRACE) + end) - 1
    is_inside = (position >= 0) & (intervals.block[position] == block) & (intervals.end[position] > begin)
    return np.asarray(is_inside)
