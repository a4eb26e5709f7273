"""What was done to each block, in order: its accesses, and which operator calls made them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import KIND
from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True)
class Uses:
    """Every access, block by block and in order of time within a block. ``row`` is the row of events, ``op`` the call.

    The accesses of block b are ``first[b]`` to ``first[b + 1]``.
    """

    block: Array
    row: Array
    op: Array
    is_read: Array
    first: Array

    def num_of(self, block: Array) -> Array:
        """How many accesses each block has."""
        number: Array = self.first[block + 1] - self.first[block]
        return number


def uses(trace: Trace) -> Uses:
    """The accesses of a single-rank trace, worked out once."""
    return trace.cached(_compute)


def _compute(trace: Trace) -> Uses:
    events = trace.columns("events", "kind", "block_id", "op_id")
    rows = np.flatnonzero((events["kind"] == KIND["read"]) | (events["kind"] == KIND["write"]))
    block = events["block_id"][rows]
    order = np.argsort(block, kind="stable")
    rows, block = rows[order], block[order]
    first = np.searchsorted(block, np.arange(len(blocks(trace)) + 1))
    return Uses(block, rows, events["op_id"][rows], events["kind"][rows] == KIND["read"], first)


def filled_from_nothing(trace: Trace) -> Array:
    """For each access of ``uses`` whether it is the write of a block by the operator that made it and read nothing:
    zeros, random numbers, a table."""
    return trace.cached(_filled_from_nothing)


def _filled_from_nothing(trace: Trace) -> Array:
    used, made = uses(trace), blocks(trace).alloc_event
    op = trace.columns("events", "op_id")["op_id"]
    maker = np.where(made >= 0, op[made], -1)[used.block]
    reads = np.zeros(int(op.max(initial=-1)) + 2, bool)
    reads[used.op[used.is_read]] = True
    filled: Array = (maker >= 0) & (used.op == maker) & ~reads[maker]
    return filled


@dataclass(frozen=True)
class OpRows:
    """The rows of events of each operator call: the first and the last, by number of the call; -1 for none."""

    first: Array
    last: Array


def op_rows(trace: Trace) -> OpRows:
    """The rows of each operator call. What a call reads it needs until its last row, whatever it allocates between."""
    return trace.cached(_op_rows)


def _op_rows(trace: Trace) -> OpRows:
    op = trace.columns("events", "op_id")["op_id"]
    rows = np.flatnonzero(op >= 0)
    first, last = (np.full(int(op.max(initial=-1)) + 1, -1, np.int64) for _ in range(2))
    # Fancy assignment keeps the last value.
    last[op[rows]] = rows
    first[op[rows[::-1]]] = rows[::-1]
    return OpRows(first, last)


def tells_accesses(trace: Trace) -> bool:
    """Whether the trace says what was read and written: a CUDA snapshot does not."""
    return len(uses(trace).row) > 0


def most_bytes_of_an_operator(trace: Trace, device: str) -> int | None:
    """The most bytes that one operator call touches on a device, its own allocations included: no order of the calls
    and no earlier free can bring the peak below it. None where accesses are not told. Source: DrGPUM, "optimal peak".
    """
    if not tells_accesses(trace):
        return None
    found, used = blocks(trace), uses(trace)
    # Of a block the accesses by one call are neighbours: each call counts it once.
    again = np.zeros(len(used.row), bool)
    again[1:] = (used.block[1:] == used.block[:-1]) & (used.op[1:] == used.op[:-1])
    made = np.flatnonzero(found.alloc_event >= 0)
    maker = trace.columns("events", "op_id")["op_id"][found.alloc_event[made]]
    first = used.op[np.minimum(used.first[made], len(used.op) - 1)]
    alone = (used.num_of(made) == 0) | (first != maker)
    op, block = np.concatenate([used.op[~again], maker[alone]]), np.concatenate([used.block[~again], made[alone]])
    here = (op >= 0) & (found.device[block] == trace.devices.index(device))
    return int(np.bincount(op[here], weights=found.size[block[here]]).max(initial=0))
