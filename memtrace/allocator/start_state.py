"""Reconstructs the state of the allocator before the first entry of a history, from the state at its end.

Undoing an allocation removes a live block, undoing a free restores it, and undoing a segment event removes or restores
a segment. The entries do not say by how much a block exceeded its request if it is older than the history and was freed
in it. That slack is the gap behind the block where the gap is at most 1 MiB, because free blocks of the large pool are
always larger. Otherwise it ends at the first block placed behind it during its lifetime, or is taken to be 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memtrace.allocator.alloc_free_pairs import AllocFreePairs, pair_by_address
from memtrace.allocator.history import (
    ALLOC,
    FREE,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    AllocatorHistory,
    Bools,
    Int64s,
    RecordedSegments,
    concatenate_segments,
    resolve_pools,
)
from memtrace.allocator.rules import MAX_SLACK_BYTES, NO_LIMIT, Rules
from memtrace.allocator.start_mappings import mappings_at_start
from memtrace.allocator.virtual_ranges import RangeKey


@dataclass(frozen=True, slots=True, kw_only=True)
class StartState:
    """What the allocator held before the first entry. Sizes in bytes; blocks by address."""

    segments: RecordedSegments
    address: Int64s
    """Address of each live block."""
    size: Int64s
    """Size of each live block, rounding and slack included; -1: not computed yet."""
    is_size_certain: Bools
    """Whether no other size of the block is compatible with the history."""
    requested: Int64s
    freed_by: Int64s
    """Entry that frees each block; -1: it outlives the history."""
    pairs: AllocFreePairs
    """Allocations and frees of blocks, as rows of the history."""
    segment_order: Int64s
    """Rows of `segments`, oldest first where the history reveals their age, otherwise by address."""
    range_starts: dict[RangeKey, tuple[int, ...]]
    """Lowest address seen in each virtual range that existed before the history, in rising order."""
    num_contradictions: int
    """Entries that contradict the final segments or blocks."""
    num_misplaced: int
    """Blocks outside every segment or overlapping the next block, and segments overlapping the next: must be 0."""


def reconstruct_start(history: AllocatorHistory, rules: Rules) -> StartState:
    """Return the state before the first entry of a history."""
    pairs = _pair_blocks(history)
    final = history.blocks
    held = history.address[pairs.held_after]
    is_older = ~np.isin(final.address, held)
    freed = pairs.held_before
    num_missing = int((~np.isin(held, final.address)).sum())
    num_revived = int(np.isin(history.address[freed], final.address[is_older]).sum())
    segments, num_segment_contradictions = _segments_at_start(history, rules)
    mappings = mappings_at_start(replace(history, pool=resolve_pools(history)), rules)
    segments = concatenate_segments(segments, mappings.segments)
    address = np.concatenate([final.address[is_older], history.address[freed]])
    requested = np.concatenate([final.requested[is_older], history.size[freed]])
    size = np.concatenate([final.size[is_older], np.full(len(freed), -1, np.int64)])
    freed_by = np.concatenate([np.full(int(is_older.sum()), -1, np.int64), freed])
    order = np.argsort(address, kind="stable")
    state = StartState(
        segments=segments,
        address=address[order],
        size=size[order],
        is_size_certain=np.zeros(len(order), np.bool_),
        requested=requested[order],
        freed_by=freed_by[order],
        pairs=pairs,
        segment_order=np.argsort(segments.address, kind="stable"),
        range_starts=mappings.range_starts,
        num_contradictions=pairs.num_conflicts
        + num_missing
        + num_revived
        + num_segment_contradictions
        + mappings.num_contradictions,
        num_misplaced=0,
    )
    size, is_certain = _block_sizes(history, state, rules)
    return replace(state, size=size, is_size_certain=is_certain, num_misplaced=_count_misplaced(state, size))


def _pair_blocks(history: AllocatorHistory) -> AllocFreePairs:
    rows = np.flatnonzero((history.kind == ALLOC) | (history.kind == FREE))
    local = pair_by_address(history.address[rows], history.kind[rows] == ALLOC)
    partner = np.full(len(history), -1, np.int64)
    partner[rows] = np.where(local.partner >= 0, rows[local.partner], -1)
    return AllocFreePairs(partner, rows[local.held_before], rows[local.held_after], local.num_conflicts)


def _segments_at_start(history: AllocatorHistory, rules: Rules) -> tuple[RecordedSegments, int]:
    """Return the ordinary segments at the start and the number of entries that contradict the final segments."""
    rows = np.flatnonzero((history.kind == SEGMENT_ALLOC) | (history.kind == SEGMENT_FREE))
    local = pair_by_address(history.address[rows], history.kind[rows] == SEGMENT_ALLOC)
    final = history.segments.take(~history.segments.expandable)
    held = history.address[rows[local.held_after]]
    older = final.take(~np.isin(final.address, held))
    freed = rows[local.held_before]
    num_missing = int((~np.isin(held, final.address)).sum())
    revived = np.isin(history.address[freed], older.address)
    released = RecordedSegments(
        address=history.address[freed],
        size=history.size[freed],
        stream=history.stream[freed],
        pool=np.maximum(history.pool[freed], 0),
        small=history.size[freed] == rules.small_segment_bytes,
        expandable=np.zeros(len(freed), np.bool_),
    )
    num_contradictions = local.num_conflicts + num_missing + int(revived.sum())
    return concatenate_segments(older, released.take(~revived)), num_contradictions


def _segment_rows_and_room(state: StartState) -> tuple[Int64s, Int64s]:
    """Return the segment of each block (-1: none), and the bytes up to the next block or the segment's end."""
    segments = state.segments
    row = segments.containing(state.address)
    end = np.append(segments.address + segments.size, 0)[row]
    following = np.append(state.address[1:], NO_LIMIT) if len(row) else state.address
    return row, np.minimum(end, following) - state.address


def _block_sizes(history: AllocatorHistory, state: StartState, rules: Rules) -> tuple[Int64s, Bools]:
    """Return the size of every block, slack included, and whether it is certain."""
    segments = state.segments
    row, room = _segment_rows_and_room(state)
    rounded = history.settings.round_sizes(state.requested, rules)
    size = np.where(state.size >= 0, state.size, rounded)
    is_certain: Bools = np.ones(len(size), np.bool_)
    if rules.infers_slack:
        can_have_slack = ~np.append(segments.small | segments.expandable, True)[row]
        unknown = (state.size < 0) & can_have_slack
        gap = room - rounded
        size = np.where(unknown & (gap > 0) & (gap <= MAX_SLACK_BYTES), room, size)
        limit = history.settings.max_split_bytes or NO_LIMIT
        size = np.where(unknown & (rounded >= limit) & (room > 0), room, size)
        for i in np.flatnonzero(unknown & (gap > MAX_SLACK_BYTES) & (rounded < limit)):
            slack = _observed_slack(history, int(state.address[i] + rounded[i]), int(state.freed_by[i]))
            is_certain[i] = slack is not None
            size[i] += slack or 0
    return size, is_certain


def _count_misplaced(state: StartState, size: Int64s) -> int:
    row, room = _segment_rows_and_room(state)
    segments = state.segments
    start = np.sort(segments.address)
    overlapping = (segments.address + segments.size)[np.argsort(segments.address)][:-1] > start[1:]
    return int(((row < 0) | (size > room)).sum()) + int(overlapping.sum())


def _observed_slack(history: AllocatorHistory, end: int, freed_by: int) -> int | None:
    """Return the distance from `end` to the first block placed within 1 MiB of it before entry `freed_by`, if any."""
    address = history.address[:freed_by]
    behind = (history.kind[:freed_by] == ALLOC) & (address >= end) & (address <= end + MAX_SLACK_BYTES)
    rows = np.flatnonzero(behind)
    return int(address[rows[0]]) - end if len(rows) else None
