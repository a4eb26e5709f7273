"""Retained memory: the blocks that outlive steps, and the live bytes of each allocation site at the ends of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.attribution import SPAN, rows_at, step_rows
from memtrace.analysis.blocks import blocks
from memtrace.analysis.thresholds import WARM_UP_STEPS
from memtrace.format.arrays import Array
from memtrace.trace import Trace

GC_RANGE: Final = "gc"
"""Name of the ranges that a recording writes for the runs of Python's garbage collector that freed something."""


@dataclass(frozen=True)
class BlocksAtEnd:
    """Retained blocks that are live at the end of the last step."""

    stack: Array
    size: Array
    category: Array
    first: Array
    """First step end at which each is live."""


class RetainedMemory(Protocol):
    """The blocks that are live at two ends of steps or more, by allocation site. Warm-up steps are excluded."""

    @property
    def num_ends(self) -> int:
        """Number of step ends."""
        ...

    @property
    def numbers(self) -> Array:
        """Numbers of the steps that end there."""
        ...

    @property
    def sites(self) -> Sequence[str | None]:
        """Allocation sites of the blocks; None: no stack was recorded."""
        ...

    @property
    def gc_freed_bytes(self) -> int | None:
        """Bytes that the garbage collector freed; None where its runs were not recorded."""
        ...

    def of_site(self, number: int) -> tuple[Array, Array]:
        """Return the live bytes of a site at all step ends, and those without the newest step's blocks at all but the
        first."""
        ...

    def all_sites(self) -> tuple[Array, Array]:
        """Return the same for all sites together."""
        ...

    def at_end(self, number: int) -> BlocksAtEnd:
        """Return the blocks of a site that are live at the last step end."""
        ...

    def gc_freed_bytes_of(self, stacks: Array) -> int:
        """Return the bytes that the garbage collector freed of blocks with some call stacks."""
        ...


def retained_memory(trace: Trace) -> RetainedMemory:
    """Return the retained memory of a single-rank trace (cached)."""
    return trace.cached(_RetainedBlocks)


class _RetainedBlocks:
    """The retained blocks of a trace in memory."""

    def __init__(self, trace: Trace) -> None:
        table, ends = blocks(trace), step_rows(trace).end_row[WARM_UP_STEPS:]
        self._table = table
        self._gc_freed = _gc_freed_blocks(trace)
        self.num_ends = len(ends)
        self.numbers = step_rows(trace).number[WARM_UP_STEPS:]
        lifetimes = step_end_lifetimes(trace, ends)
        is_retained = (table.alloc_event >= 0) & (lifetimes.end > lifetimes.first) & (table.size > 0)
        self._blocks = np.flatnonzero(is_retained)
        self._first, self._end = lifetimes.first[self._blocks], lifetimes.end[self._blocks]
        # By site alone: a leaked block and the one still in use can differ in category.
        sites, self._group = allocation_sites(trace, table.stack[self._blocks])
        self.sites: Sequence[str | None] = sites
        self.gc_freed_bytes = None if self._gc_freed is None else int(table.size[self._gc_freed].sum())
        self._live, self._kept = self._series(self._group, len(sites))

    def _series(self, group: Array, num_groups: int) -> tuple[Array, Array]:
        arguments = (group, self._table.size[self._blocks], self._first, self._end, (num_groups, self.num_ends))
        return live_bytes_at_step_ends(*arguments), kept_bytes_at_step_ends(*arguments)

    def of_site(self, number: int) -> tuple[Array, Array]:
        """See ``RetainedMemory``."""
        return self._live[number], self._kept[number]

    def all_sites(self) -> tuple[Array, Array]:
        """See ``RetainedMemory``."""
        return self._live.sum(axis=0), self._kept.sum(axis=0)

    def at_end(self, number: int) -> BlocksAtEnd:
        """See ``RetainedMemory``."""
        chosen = np.flatnonzero((self._group == number) & (self._end == self.num_ends))
        members, table = self._blocks[chosen], self._table
        return BlocksAtEnd(table.stack[members], table.size[members], table.category[members], self._first[chosen])

    def gc_freed_bytes_of(self, stacks: Array) -> int:
        """See ``RetainedMemory``."""
        freed = self._gc_freed if self._gc_freed is not None else np.empty(0, np.int64)
        return int(self._table.size[freed[np.isin(self._table.stack[freed], stacks)]].sum())


@dataclass(frozen=True)
class StepEndLifetimes:
    """The step ends at which each block is live: ``first`` <= k < ``end``, indexed by block."""

    first: Array
    end: Array


def step_end_lifetimes(trace: Trace, ends: Array) -> StepEndLifetimes:
    """Return for each block the step ends at which it is live.

    Args:
        trace: a single-rank trace.
        ends: ascending rows of events at which steps end, each the first row of what follows. A block that is freed in
            that row has outlived the step.
    """
    table = blocks(trace)
    first = np.searchsorted(ends, np.maximum(table.alloc_event, 0), side="right")
    end = np.where(table.free_event >= 0, np.searchsorted(ends, table.free_event, side="right"), len(ends))
    return StepEndLifetimes(first, end)


def live_bytes_at_step_ends(group: Array, size: Array, first: Array, end: Array, shape: tuple[int, int]) -> Array:
    """Return the live bytes of each group (row) at the end of each step (column).

    Args:
        group: group of each block, from 0.
        size: bytes of each block.
        first: first step end at which each block is live.
        end: first later step end at which it is not.
        shape: number of groups and number of steps.
    """
    num_groups, num_steps = shape
    change = np.zeros((num_groups, num_steps + 1), np.int64)
    np.add.at(change, (group, first), size)
    np.add.at(change, (group, end), -size)
    live: Array = np.cumsum(change, axis=1)[:, :num_steps]
    return live


def kept_bytes_at_step_ends(group: Array, size: Array, first: Array, end: Array, shape: tuple[int, int]) -> Array:
    """Return the live bytes of each group at the end of each step but the first, without the blocks of the newest step.

    Those vary with the input of the step. The arguments are those of ``live_bytes_at_step_ends``.
    """
    return live_bytes_at_step_ends(group, size, np.minimum(first + 1, end), end, shape)[:, 1:]


def live_series(step: Array, num_bytes: Array, num_ends: int) -> Array:
    """Return live bytes at the ends of steps by their changes.

    Args:
        step: the first step end at which each change shows.
        num_bytes: the changes.
        num_ends: number of step ends.
    """
    change = np.zeros(num_ends + 1, np.int64)
    np.add.at(change, step, num_bytes)
    live: Array = np.cumsum(change)[:num_ends]
    return live


def _gc_freed_blocks(trace: Trace) -> Array | None:
    """Return the blocks that were freed during garbage collections; None where the trace holds no collections."""
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    ranges = np.flatnonzero(spans["kind"] == SPAN["range"])
    names = [name for name in np.unique(spans["name"][ranges]).tolist() if trace.name(name) == GC_RANGE]
    if not names:
        return None
    collections = ranges[np.isin(spans["name"][ranges], names)]
    collections = collections[np.argsort(spans["start_ns"][collections], kind="stable")]
    start = rows_at(trace, spans["start_ns"][collections])
    end = rows_at(trace, spans["start_ns"][collections] + spans["duration_ns"][collections])
    free = blocks(trace).free_event
    collection = np.searchsorted(start, free, side="right") - 1
    inside = (free >= 0) & (collection >= 0) & (free < end[np.maximum(collection, 0)])
    freed: Array = np.flatnonzero(inside)
    return freed
