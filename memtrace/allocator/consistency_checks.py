"""Invariants of the caching allocator. A file that violates one was edited or recorded with unknown settings.

The invariants held in all 32,230 segments of 82 public snapshots, recorded by torch 2.0 to 2.11: the sizes of segments,
the pool of each request, and the most by which a block exceeds its request.
"""

from __future__ import annotations

import numpy as np

from memtrace.allocator.history import (
    ALLOC,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    AllocatorHistory,
    Bools,
    Int64s,
)
from memtrace.allocator.rules import MAX_SLACK_BYTES, NO_LIMIT, Rules
from memtrace.units import format_bytes


def find_violations(history: AllocatorHistory, rules: Rules) -> list[str]:
    """Return a clause with a count for each invariant that the history violates; an empty list for an intact file."""
    segments, blocks, settings = history.segments, history.blocks, history.settings
    ordinary = ~segments.expandable
    page = np.where(segments.small, rules.small_segment_bytes, settings.large_segment_bytes)
    own_size = (segments.size >= rules.min_large_alloc_bytes) & (segments.size % rules.round_large_bytes == 0)
    is_large_size = own_size | (segments.size == settings.large_segment_bytes)
    row = segments.containing(blocks.address)
    inside = row >= 0
    small = np.append(segments.small, False)[row]
    expandable = np.append(segments.expandable, False)[row]
    rounded = settings.round_sizes(blocks.requested, rules)
    slack = blocks.size - rounded
    known = inside & (blocks.size >= 0)
    may_have_slack = ~small & ~expandable
    limit = settings.max_split_bytes or NO_LIMIT
    too_long = np.where(may_have_slack, (slack > MAX_SLACK_BYTES) & (rounded < limit), slack > 0)
    allocs = history.address[history.kind == ALLOC]
    small_segment = format_bytes(rules.small_segment_bytes)
    violations = {
        f"small segments are not {small_segment} in size": ordinary & segments.small & (segments.size != page),
        "large segments have a size that the allocator never requests": ordinary & ~segments.small & ~is_large_size,
        "expandable segments are not a multiple of the page size": ~ordinary & (segments.size % page != 0),
        "live blocks are outside every segment": ~inside,
        "blocks are smaller than their request": known & (slack < 0),
        "blocks exceed their request by more than the allocator allows": known & too_long,
        "blocks are in the wrong pool for their size": inside & (small != (rounded <= rules.small_request_bytes)),
        f"allocations are not aligned to {rules.min_block_bytes} bytes": allocs % rules.min_block_bytes != 0,
        "allocations are outside every segment in the file": _outside_segments(history, allocs),
    }
    return [f"{int(violated.sum()):,} {what}" for what, violated in violations.items() if violated.any()]


def _outside_segments(history: AllocatorHistory, address: Int64s) -> Bools:
    """Return whether each address is outside all segments that the history mentions."""
    rows = np.isin(history.kind, (SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP))
    start = np.concatenate([history.segments.address, history.address[rows]])
    end = start + np.concatenate([history.segments.size, history.size[rows]])
    order = np.argsort(start, kind="stable")
    furthest_end = np.append(np.maximum.accumulate(end[order]), 0)
    return address >= furthest_end[np.searchsorted(start[order], address, side="right") - 1]
