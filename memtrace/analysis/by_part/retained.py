"""Blocks of a run of parts that outlive steps: what they add to the live bytes at the ends of steps.

A block is retained when it is live at two ends of steps or more, the warm-up steps excluded. Bytes that one block takes
over from another of the same call stack cancel out, so what is kept does not grow with a trace that is steady.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.format.arrays import Array

_STEP_BITS = 40


@dataclass(frozen=True)
class Changes:
    """Changes of live bytes by call stack and step end; those of one stack and step end are one row."""

    stack: Array
    step: Array
    bytes: Array

    def joined(self, *others: Changes) -> Changes:
        """Return all changes together, without those that add up to zero."""
        everything = (self, *others)
        return net_changes(
            np.concatenate([changes.stack for changes in everything]),
            np.concatenate([changes.step for changes in everything]),
            np.concatenate([changes.bytes for changes in everything]),
        )


def net_changes(stack: Array, step: Array, num_bytes: Array) -> Changes:
    """Return changes with one row for each stack and step end, without those that add up to zero."""
    key = ((stack.astype(np.int64) + 1) << _STEP_BITS) + step
    keys, inverse = np.unique(key, return_inverse=True)
    total = np.zeros(len(keys), np.int64)
    np.add.at(total, inverse, num_bytes)
    kept = np.flatnonzero(total)
    return Changes((keys[kept] >> _STEP_BITS) - 1, keys[kept] & ((1 << _STEP_BITS) - 1), total[kept])


NO_CHANGES = Changes(*(np.empty(0, np.int64) for _ in range(3)))


@dataclass(frozen=True)
class OpenBlocks:
    """Blocks that are allocated in a run of parts, with the step ends at which they are live."""

    id: Array
    stack: Array
    size: Array
    first: Array
    """First step end at which the block is live."""
    part: Array
    """The part that allocates the block; of a freed block the one that frees it."""

    def take(self, chosen: Array) -> OpenBlocks:
        """Return some of the blocks."""
        return OpenBlocks(self.id[chosen], self.stack[chosen], self.size[chosen], self.first[chosen], self.part[chosen])

    def joined(self, later: OpenBlocks) -> OpenBlocks:
        """Return these blocks, then others."""
        pairs = ((getattr(self, name), getattr(later, name)) for name in ("id", "stack", "size", "first", "part"))
        return OpenBlocks(*(np.concatenate(pair) for pair in pairs))


NO_BLOCKS = OpenBlocks(*(np.empty(0, np.int64) for _ in range(5)))


@dataclass(frozen=True)
class RetainedFacts:
    """What the blocks of a run of parts add to the live bytes at step ends."""

    live: Changes
    """Changes of the live bytes of retained blocks."""
    kept: Changes
    """The same without the newest step of each block."""
    stacks: Array
    """All call stacks of retained blocks, ascending; -1: none."""
    at_end: OpenBlocks
    """Retained blocks that were freed after the last step end."""
    open: OpenBlocks
    """Blocks that are live at the end of the run."""
    older_freed: Array
    """Blocks that were live at the start of the run and freed in it: ids, the number of step ends up to then, parts."""


def close_blocks(blocks: OpenBlocks, end: Array, freed_part: Array, num_ends: int) -> RetainedFacts:
    """Return what freed blocks add to the live bytes at step ends.

    Args:
        blocks: the blocks.
        end: first step end at which each is no longer live.
        freed_part: the part that frees each.
        num_ends: number of step ends of the trace.
    """
    retained = np.flatnonzero((end > blocks.first) & (blocks.size > 0))
    blocks, end, freed_part = blocks.take(retained), end[retained], freed_part[retained]
    is_at_end = np.flatnonzero(end == num_ends)
    at_end = blocks.take(is_at_end)
    at_end = OpenBlocks(at_end.id, at_end.stack, at_end.size, at_end.first, freed_part[is_at_end])
    both = (blocks.stack, blocks.stack)
    live = net_changes(
        np.concatenate(both), np.concatenate([blocks.first, end]), np.concatenate([blocks.size, -blocks.size])
    )
    kept = net_changes(
        np.concatenate(both),
        np.concatenate([np.minimum(blocks.first + 1, end), end]),
        np.concatenate([blocks.size, -blocks.size]),
    )
    return RetainedFacts(live, kept, np.unique(blocks.stack), at_end, NO_BLOCKS, np.empty((3, 0), np.int64))


def join_retained(earlier: RetainedFacts, later: RetainedFacts, num_ends: int) -> RetainedFacts:
    """Return the facts of two runs that follow each other."""
    freed_id, end, freed_part = later.older_freed
    order = np.argsort(earlier.open.id, kind="stable")
    place = np.minimum(np.searchsorted(earlier.open.id[order], freed_id), max(len(order) - 1, 0))
    is_open = earlier.open.id[order][place] == freed_id if len(order) else np.zeros(len(freed_id), bool)
    closed = order[place[is_open]] if len(order) else place[is_open]
    between = close_blocks(earlier.open.take(closed), end[is_open], freed_part[is_open], num_ends)
    still_open = np.ones(len(earlier.open.id), bool)
    still_open[closed] = False
    return RetainedFacts(
        live=earlier.live.joined(between.live, later.live),
        kept=earlier.kept.joined(between.kept, later.kept),
        stacks=np.unique(np.concatenate([earlier.stacks, between.stacks, later.stacks])),
        at_end=earlier.at_end.joined(between.at_end).joined(later.at_end),
        open=earlier.open.take(np.flatnonzero(still_open)).joined(later.open),
        older_freed=np.concatenate([earlier.older_freed, later.older_freed[:, ~is_open]], axis=1),
    )
