"""Reads and writes of each block in order of time, and the operator calls that made them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import KIND
from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True)
class BlockAccesses:
    """Every read and write of a trace, sorted by block and by time within a block.

    The accesses of block ``b`` are the rows ``offset[b]`` to ``offset[b + 1]``.
    """

    block: Array
    """The block that is accessed."""
    event: Array
    """The row of the table events."""
    op: Array
    """The operator call (``op_id``) that accesses the block; -1: unknown."""
    is_read: Array
    offset: Array
    """The first access of each block; one element longer than the number of blocks."""

    def num_accesses(self, block: Array) -> Array:
        """Return the number of accesses of each block in ``block``."""
        count: Array = self.offset[block + 1] - self.offset[block]
        return count


def group_accesses_by_block(trace: Trace) -> BlockAccesses:
    """Return the accesses of a single-rank trace, grouped by block."""
    return trace.cached(_group_accesses_by_block)


def _group_accesses_by_block(trace: Trace) -> BlockAccesses:
    events = trace.columns("events", "kind", "block_id", "op_id")
    rows = np.flatnonzero((events["kind"] == KIND["read"]) | (events["kind"] == KIND["write"]))
    rows = rows[np.argsort(events["block_id"][rows], kind="stable")]
    block = events["block_id"][rows]
    offset = np.searchsorted(block, np.arange(len(blocks(trace)) + 1))
    return BlockAccesses(block, rows, events["op_id"][rows], events["kind"][rows] == KIND["read"], offset)


def has_accesses(trace: Trace) -> bool:
    """Return whether the trace records reads and writes; a CUDA snapshot, for example, does not."""
    return len(group_accesses_by_block(trace).event) > 0


def find_initial_fills(trace: Trace) -> Array:
    """Return for each access of ``group_accesses_by_block`` whether it fills a new block without reading anything.

    Operators such as ``zeros`` and ``randn`` allocate a block and fill it, but read no tensor. The fill can move
    together with the allocation, so it does not count as the first use of the block.
    """
    return trace.cached(_find_initial_fills)


def _find_initial_fills(trace: Trace) -> Array:
    accesses, alloc_event = group_accesses_by_block(trace), blocks(trace).alloc_event
    op = trace.columns("events", "op_id")["op_id"]
    allocating_op = np.where(alloc_event >= 0, op[alloc_event], -1)[accesses.block]
    op_reads = np.zeros(int(op.max(initial=-1)) + 2, bool)
    op_reads[accesses.op[accesses.is_read]] = True
    is_fill: Array = (allocating_op >= 0) & (accesses.op == allocating_op) & ~op_reads[allocating_op]
    return is_fill


@dataclass(frozen=True)
class OperatorRows:
    """The first and the last row of events of each operator call, indexed by ``op_id``; -1: the call has no events."""

    first: Array
    last: Array


def find_operator_rows(trace: Trace) -> OperatorRows:
    """Return the rows of events that each operator call spans."""
    return trace.cached(_find_operator_rows)


def _find_operator_rows(trace: Trace) -> OperatorRows:
    op = trace.columns("events", "op_id")["op_id"]
    rows = np.flatnonzero(op >= 0)
    first, last = (np.full(int(op.max(initial=-1)) + 1, -1, np.int64) for _ in range(2))
    # Where an index repeats, NumPy keeps the value that is assigned last.
    last[op[rows]] = rows
    first[op[rows[::-1]]] = rows[::-1]
    return OperatorRows(first, last)


def operator_start_rows(trace: Trace, op: Array, event: Array) -> Array:
    """Return the first row of each operator call; where the call is unknown (-1), the row of ``event``."""
    first = find_operator_rows(trace).first
    return np.where(op >= 0, first[np.maximum(op, 0)], event) if len(first) else event


def operator_end_rows(trace: Trace, op: Array, event: Array) -> Array:
    """Return the last row of each operator call; where the call is unknown (-1), the row of ``event``.

    An operator needs its inputs until its last row, whatever it allocates in between.
    """
    last = find_operator_rows(trace).last
    return np.where(op >= 0, last[np.maximum(op, 0)], event) if len(last) else event


def last_needed_rows(trace: Trace, block: Array, *, allow_in_place: bool = False) -> Array:
    """Return for each block the last row of events that needs it; every block must have an access.

    Args:
        trace: the trace of one rank.
        block: the blocks in question.
        allow_in_place: take the last access itself, as if the operator could write its result over its input;
            by default the end of the operator call that makes the last access.
    """
    accesses = group_accesses_by_block(trace)
    last = accesses.offset[block + 1] - 1
    last_event: Array = accesses.event[last]
    return last_event if allow_in_place else operator_end_rows(trace, accesses.op[last], last_event)


def compute_peak_lower_bound(trace: Trace, device: str) -> int | None:
    """Return the most bytes that a single operator call touches on a device, its own allocations included.

    No order of the operators and no earlier free can bring the peak below this. None if the trace records no accesses.
    Source: DrGPUM (ASPLOS 2023), the "optimal peak" of its artifact.
    """
    if not has_accesses(trace):
        return None
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    # The accesses of a block by one call are neighbours: each call counts the block once.
    is_repeat = np.zeros(len(accesses.event), bool)
    is_repeat[1:] = (accesses.block[1:] == accesses.block[:-1]) & (accesses.op[1:] == accesses.op[:-1])
    allocated = np.flatnonzero(columns.alloc_event >= 0)
    allocating_op = trace.columns("events", "op_id")["op_id"][columns.alloc_event[allocated]]
    first_op = accesses.op[np.minimum(accesses.offset[allocated], len(accesses.op) - 1)]
    only_allocates = (accesses.num_accesses(allocated) == 0) | (first_op != allocating_op)
    op = np.concatenate([accesses.op[~is_repeat], allocating_op[only_allocates]])
    block = np.concatenate([accesses.block[~is_repeat], allocated[only_allocates]])
    counted = (op >= 0) & (columns.device[block] == trace.devices.index(device))
    return int(np.bincount(op[counted], weights=columns.size[block[counted]]).max(initial=0))
