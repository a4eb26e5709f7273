"""Reads and writes of each block in order of time, and the operator calls that made them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.attribution import KIND
from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.format.schema import NAME_KINDS
from memtrace.trace import Trace

_INDUCTOR_PATHS: Final = ("/torch/_inductor/", "/torchinductor_")
"""Parts of the paths of torch.compile's own code, and of the code that it generates."""


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


def runs_unseen_kernels(trace: Trace) -> bool:
    """Return whether kernels that torch.compile generated ran and used memory without that being recorded."""
    return trace.cached(_runs_unseen_kernels)


def _runs_unseen_kernels(trace: Trace) -> bool:
    if trace.manifest.source.kind == "recording":
        return "compiled" in trace.manifest.coverage.unseen_accesses
    kinds = trace.columns("names", "kind", "id")
    frames = kinds["id"][kinds["kind"] == NAME_KINDS.index("frame")].tolist()
    return any(part in (trace.name(frame) or "") for frame in frames for part in _INDUCTOR_PATHS)


def seen_access_share(trace: Trace) -> float | None:
    """Return the share of the bytes accessed by operators and compiled code whose reads and writes are in the trace.

    Every access counts with the size of its block. Compiled code that could not be observed counts with its arguments
    and results, which is the least that it accesses. None: unknown.
    """
    coverage = trace.manifest.coverage
    if coverage.opaque_bytes == 0:
        return seen_share_by_manifest(trace)
    has_other_unseen = any(source != "compiled" for source in coverage.unseen_accesses)
    if coverage.opaque_bytes is None or has_other_unseen or not has_accesses(trace) or trace.surroundings is not None:
        return None  # in a window: the opaque code may have run outside it
    total_bytes = int(blocks(trace).size[group_accesses_by_block(trace).block].sum())
    return max(0.0, 1 - coverage.opaque_bytes / total_bytes) if total_bytes else None


def seen_share_by_manifest(trace: Trace) -> float | None:
    """Return ``seen_access_share`` where the manifest alone decides it: 1.0, or None where it is unknown or depends."""
    coverage = trace.manifest.coverage
    is_all_seen = coverage.opaque_bytes == 0 and not coverage.unseen_accesses and bool(coverage.has_accesses)
    return 1.0 if is_all_seen else None


def find_initial_fills(trace: Trace) -> Array:
    """Return for each access of ``group_accesses_by_block`` whether it fills a new block without reading anything.

    Operators such as ``zeros`` and ``randn`` allocate a block and fill it, but read no tensor. The fill can move
    together with the allocation, so it does not count as the first use of the block.
    """
    return trace.cached(_find_initial_fills)


def _find_initial_fills(trace: Trace) -> Array:
    accesses, alloc_event = group_accesses_by_block(trace), blocks(trace).alloc_event
    calls = number_operator_calls(trace)
    call = calls.number[accesses.event]
    allocating_call = np.where(alloc_event >= 0, calls.number[alloc_event], -1)[accesses.block]
    # One element more, for the index -1.
    call_reads = np.zeros(len(calls.first) + 1, bool)
    call_reads[call[accesses.is_read]] = True
    is_fill: Array = (allocating_call >= 0) & (call == allocating_call) & ~call_reads[allocating_call]
    return is_fill


@dataclass(frozen=True)
class OperatorCalls:
    """The operator calls that have events, numbered densely: in a window of a long trace the ids are large."""

    number: Array
    """The number of the call of each row of events; -1: no call."""
    first: Array
    """The first row of events of each call; -1: no call has this number."""
    last: Array
    """The last row of events of each call."""


def number_operator_calls(trace: Trace) -> OperatorCalls:
    """Return the operator calls of a trace and the rows of events that each of them spans."""
    return trace.cached(_number_operator_calls)


def _number_operator_calls(trace: Trace) -> OperatorCalls:
    op = trace.columns("events", "op_id")["op_id"]
    rows = np.flatnonzero(op >= 0)
    number = np.full(len(op), -1, np.int32)
    if len(rows):
        known = op[rows]
        lowest, span = int(known.min()), int(known.max()) - int(known.min()) + 1
        # Sorting takes longer than counting from the lowest id, which may leave numbers unused.
        is_dense = span <= 4 * len(rows) + 1024
        number[rows] = known - lowest if is_dense else np.unique(known, return_inverse=True)[1]
    first, last = (np.full(int(number.max(initial=-1)) + 1, -1, np.int64) for _ in range(2))
    # Where an index repeats, NumPy keeps the value that is assigned last.
    last[number[rows]] = rows
    first[number[rows[::-1]]] = rows[::-1]
    return OperatorCalls(number, first, last)


def operator_start_rows(trace: Trace, event: Array) -> Array:
    """Return the first row of the operator call that each row of events belongs to; the row itself if to none."""
    calls = number_operator_calls(trace)
    number = calls.number[event]
    return np.where(number >= 0, calls.first[number], event) if len(calls.first) else event


def operator_end_rows(trace: Trace, event: Array) -> Array:
    """Return the last row of the operator call that each row of events belongs to; the row itself if to none.

    An operator needs its inputs until its last row, whatever it allocates in between.
    """
    calls = number_operator_calls(trace)
    number = calls.number[event]
    return np.where(number >= 0, calls.last[number], event) if len(calls.last) else event


def last_accesses(trace: Trace, block: Array) -> Array:
    """Return the last access of each block, as a row of ``group_accesses_by_block``; every block must have one."""
    last: Array = group_accesses_by_block(trace).offset[block + 1] - 1
    return last


def last_needed_rows(trace: Trace, block: Array, *, allow_in_place: bool = False) -> Array:
    """Return for each block the last row of events that needs it; every block must have an access.

    Args:
        trace: the trace of one rank.
        block: the blocks in question.
        allow_in_place: take the last access itself, as if the operator could write its result over its input;
            by default the end of the operator call that makes the last access.
    """
    accesses = group_accesses_by_block(trace)
    last_event: Array = accesses.event[accesses.offset[block + 1] - 1]
    return last_event if allow_in_place else operator_end_rows(trace, last_event)
