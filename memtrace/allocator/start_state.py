"""The state of the allocator before the first entry, found by walking back from the state at the end.

Undoing an allocation drops a live block, undoing a free brings it back, undoing a segment's entries takes it
away or back. What cannot be read off is how much longer than its request a block was that is older than the
history and freed in it: the gap behind it tells where it is at most 1 MiB (free blocks of the large pool are
always longer), else the first block put behind it during its life, else it is taken to be none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memtrace.allocator.blocks import NO_LIMIT
from memtrace.allocator.history import (
    ALLOC,
    FREE,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    History,
    Int64s,
    Segments,
    concatenate,
    resolve_pools,
)
from memtrace.allocator.pairing import Pairing, pair
from memtrace.allocator.ranges import Key, expandable_at_start
from memtrace.allocator.rules import Rules, round_sizes

MAX_SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StartState:
    """What the allocator held before the first entry. Bytes; blocks in address order."""

    segments: Segments
    address: Int64s
    size: Int64s
    """True length, slack included."""
    requested: Int64s
    freed_by: Int64s
    """The entry that frees the block; -1: it outlives the history."""
    pairing: Pairing
    """Of the blocks' entries, in rows of the whole history."""
    created: Int64s
    """Rows of `segments` in the order they were taken from the device, as far as known; else by address."""
    bases: dict[Key, int]
    """Lowest address seen of the virtual range of each stream and pool, where it began before the history."""
    num_contradictions: int
    """Entries and final segments that exclude each other."""
    num_misplaced: int
    """Blocks outside every segment or over the next block, segments over the next: no state of an allocator."""


def rebuild(history: History, rules: Rules) -> StartState:
    """Walk back from the end of a history to its start."""
    pairing = _pair_blocks(history)
    final = history.blocks
    taken = history.address[pairing.held_after]
    survivor = ~np.isin(final.address, taken)
    freed = pairing.held_before
    missing = int((~np.isin(taken, final.address)).sum())
    revived = int(np.isin(history.address[freed], final.address[survivor]).sum())
    segments, contradictions = _segments_at_start(history, rules)
    pools = replace(history, pool=resolve_pools(history))
    ranges, bases, broken = expandable_at_start(pools, rules)
    segments = concatenate(segments, ranges)
    address = np.concatenate([final.address[survivor], history.address[freed]])
    requested = np.concatenate([final.requested[survivor], history.size[freed]])
    size = np.concatenate([final.size[survivor], np.full(len(freed), -1, np.int64)])
    freed_by = np.concatenate([np.full(int(survivor.sum()), -1, np.int64), freed])
    order = np.argsort(address, kind="stable")
    total = pairing.num_conflicts + missing + revived + contradictions + broken
    by_address = np.argsort(segments.address, kind="stable")
    state = StartState(
        segments,
        address[order],
        size[order],
        requested[order],
        freed_by[order],
        pairing,
        by_address,
        bases,
        total,
        0,
    )
    size, misplaced = _true_sizes(history, state, rules)
    return replace(state, size=size, num_misplaced=misplaced)


def _pair_blocks(history: History) -> Pairing:
    rows = np.flatnonzero((history.kind == ALLOC) | (history.kind == FREE))
    local = pair(history.address[rows], history.kind[rows] == ALLOC)
    partner = np.full(len(history), -1, np.int64)
    partner[rows] = np.where(local.partner >= 0, rows[local.partner], -1)
    return Pairing(partner, rows[local.held_before], rows[local.held_after], local.num_conflicts)


def _segments_at_start(history: History, rules: Rules) -> tuple[Segments, int]:
    """Ordinary segments at the start, and how many entries contradict those at the end."""
    rows = np.flatnonzero((history.kind == SEGMENT_ALLOC) | (history.kind == SEGMENT_FREE))
    local = pair(history.address[rows], history.kind[rows] == SEGMENT_ALLOC)
    final = history.segments.take(~history.segments.expandable)
    taken = history.address[rows[local.held_after]]
    kept = final.take(~np.isin(final.address, taken))
    freed = rows[local.held_before]
    missing = int((~np.isin(taken, final.address)).sum())
    revived = np.isin(history.address[freed], kept.address)
    gone = Segments(
        address=history.address[freed],
        size=history.size[freed],
        stream=history.stream[freed],
        pool=np.maximum(history.pool[freed], 0),
        small=history.size[freed] == rules.small_segment_bytes,
        expandable=np.zeros(len(freed), np.bool_),
    )
    contradictions = local.num_conflicts + missing + int(revived.sum())
    return concatenate(kept, gone.take(~revived)), contradictions


def _true_sizes(history: History, state: StartState, rules: Rules) -> tuple[Int64s, int]:
    """Length of every block, and how many lie outside all segments or over their neighbour."""
    segments = state.segments
    row = segments.containing(state.address)
    end = np.append(segments.address + segments.size, 0)[row]
    following = np.append(state.address[1:], NO_LIMIT) if len(row) else state.address
    room = np.minimum(end, following) - state.address
    rounded = round_sizes(state.requested, history.settings, rules)
    size = np.where(state.size >= 0, state.size, rounded)
    if rules.start_slack:
        large = ~np.append(segments.small | segments.expandable, True)[row]
        unknown = (state.size < 0) & large
        gap = room - rounded
        size = np.where(unknown & (gap > 0) & (gap <= MAX_SLACK_BYTES), room, size)
        limit = history.settings.max_split_bytes or NO_LIMIT
        size = np.where(unknown & (rounded >= limit) & (room > 0), room, size)
        for i in np.flatnonzero(unknown & (gap > MAX_SLACK_BYTES) & (rounded < limit)):
            size[i] += _slack_seen(history, int(state.address[i] + rounded[i]), int(state.freed_by[i]))
    wrong = (row < 0) | (size > room)
    begin = np.sort(segments.address)
    overlapping = (segments.address + segments.size)[np.argsort(segments.address)][:-1] > begin[1:]
    return size, int(wrong.sum()) + int(overlapping.sum())


def _slack_seen(history: History, end: int, freed_by: int) -> int:
    """Distance from the end of a block to the first one put within 1 MiB behind it while it lives; 0: none
    was."""
    address = history.address[:freed_by]
    behind = (history.kind[:freed_by] == ALLOC) & (address >= end) & (address <= end + MAX_SLACK_BYTES)
    first = np.flatnonzero(behind)
    return int(address[first[0]]) - end if len(first) else 0
