"""Laws that every state of the allocator obeys; a file that breaks one was not written by it, or under other
settings.

Seen to hold in every real snapshot, of torch 2.0 to 2.11: segment sizes, the pool of each request, and how
much longer than its request a block can be.
"""

from __future__ import annotations

import numpy as np

from memtrace.allocator.blocks import NO_LIMIT
from memtrace.allocator.history import (
    ALLOC,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Bools,
    History,
    Int64s,
)
from memtrace.allocator.rules import Rules, round_sizes


def broken_laws(history: History, rules: Rules) -> list[str]:
    """Sentences on the laws that the state at the end breaks, with counts; none for a real file."""
    segments, blocks, settings = history.segments, history.blocks, history.settings
    plain = ~segments.expandable
    page = np.where(segments.small, rules.small_segment_bytes, settings.large_segment_bytes)
    own = (segments.size >= rules.own_segment_bytes) & (segments.size % rules.segment_round_bytes == 0)
    large_size = own | (segments.size == settings.large_segment_bytes)
    row = segments.containing(blocks.address)
    inside = row >= 0
    small = np.append(segments.small, False)[row]
    expandable = np.append(segments.expandable, False)[row]
    rounded = round_sizes(blocks.requested, settings, rules)
    slack = blocks.size - rounded
    known = inside & (blocks.size >= 0)
    roomy = ~small & ~expandable
    limit = settings.max_split_bytes or NO_LIMIT
    counts = {
        f"small segments are not of {rules.small_segment_bytes} bytes": plain
        & segments.small
        & (segments.size != page),
        "large segments have a size that is never asked for": plain & ~segments.small & ~large_size,
        "expandable segments are not made of whole pages": ~plain & (segments.size % page != 0),
        "live blocks lie in no segment": ~inside,
        "blocks are shorter than their request": known & (slack < 0),
        "blocks are longer than they can be": known
        & np.where(roomy, (slack > rules.min_large_remainder_bytes - 1) & (rounded < limit), slack > 0),
        "blocks lie in the pool of the other sizes": inside & (small != (rounded <= rules.small_limit_bytes)),
    }
    allocs = history.address[history.kind == ALLOC]
    counts[f"allocations lie at no multiple of {rules.round_bytes} bytes"] = allocs % rules.round_bytes != 0
    counts["allocations lie in no segment the file tells of"] = _outside(history, allocs)
    return [f"{int(broken.sum())} {what}" for what, broken in counts.items() if broken.any()]


def _outside(history: History, address: Int64s) -> Bools:
    """Whether each address lies in no segment held at the end, taken or given back in the history."""
    rows = np.isin(history.kind, (SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP))
    begin = np.concatenate([history.segments.address, history.address[rows]])
    end = begin + np.concatenate([history.segments.size, history.size[rows]])
    order = np.argsort(begin, kind="stable")
    reach = np.append(np.maximum.accumulate(end[order]), 0)
    return address >= reach[np.searchsorted(begin[order], address, side="right") - 1]
