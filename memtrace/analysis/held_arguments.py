"""Calls that hold their arguments: until when a module's caller, autograd or the caller of backward holds a block."""

from __future__ import annotations

from typing import Final

import numpy as np

from memtrace.analysis.attribution import PHASE, SPAN, op_column, rows_at
from memtrace.analysis.block_accesses import group_accesses_by_block, last_accesses, operator_end_rows
from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.trace import Trace

_MAX_DEPTH: Final = 64
"""Most nested module calls that are followed outwards; bounds the run time on damaged traces."""
_ROOT_OPERATOR: Final = "aten::ones_like"
"""The operator that makes the gradient of a loss when backward begins."""


def find_release_rows(trace: Trace, block: Array, last_access: Array | None = None) -> Array:
    """Return for each block the row of events from which the program could drop it; every block must have an access.

    That is the end of the operator call that uses the block last. If this call is made by a module that began after the
    block was allocated, the block may be an argument of the module: the caller then holds it until the outermost such
    module returns. The loss is an argument of ``backward`` and is held until that returns; a node of the graph
    holds its saved tensors until its last operator ends.

    Args:
        trace: the trace of one rank.
        block: the blocks.
        last_access: the access of each block that counts as its last, a row of ``group_accesses_by_block``; by default
            the last one in the trace.
    """
    last_access = last_accesses(trace, block) if last_access is None else last_access
    last_row = operator_end_rows(trace, group_accesses_by_block(trace).event[last_access])
    row = _end_of_node(trace, _end_of_backward(trace, last_access, last_row))
    start, end, parent = trace.cached(_module_calls)
    if not len(start):
        return row
    allocated = blocks(trace).alloc_event[block]
    call = np.searchsorted(start, row, side="right") - 1
    for _ in range(_MAX_DEPTH):
        is_over = (call >= 0) & (end[call] <= row)
        if not is_over.any():
            break
        call = np.where(is_over, parent[call], call)
    for _ in range(_MAX_DEPTH):
        holds = (call >= 0) & (start[call] > allocated)
        if not holds.any():
            break
        row = np.where(holds, np.maximum(row, end[call] - 1), row)
        call = np.where(holds, parent[call], np.int64(-1))
    return row


def _end_of_node(trace: Trace, row: Array) -> Array:
    """Return the last row of the node of the graph that runs in each row, and ``row`` itself outside of backward."""
    rows, node, end = trace.cached(_node_runs)
    if not len(rows):
        return row
    place = np.minimum(np.searchsorted(rows, row), len(rows) - 1)
    return np.where((rows[place] == row) & (node[place] >= 0), end[place], row)


def _node_runs(trace: Trace) -> tuple[Array, Array, Array]:
    """Return the rows of operator calls, the node of backward that each belongs to (-1: none), and the node's end."""
    op = trace.columns("events", "op_id")["op_id"]
    rows = np.flatnonzero(op >= 0)
    in_backward = op_column(trace, op[rows], "phase") == PHASE["backward"]
    node = np.where(in_backward, op_column(trace, op[rows], "sequence_nr").astype(np.int64), -1)
    is_last = np.append(node[1:] != node[:-1], True)[: len(rows)]
    ends = np.flatnonzero(is_last)
    return rows, node, rows[ends[np.searchsorted(ends, np.arange(len(rows)))]]


def _end_of_backward(trace: Trace, last_access: Array, row: Array) -> Array:
    """Return the end of the next backward for blocks whose last access is its start, and ``row`` for all others."""
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    phases = np.flatnonzero(spans["kind"] == SPAN["phase"])
    names = [name for name in np.unique(spans["name"][phases]).tolist() if trace.name(name) == "backward"]
    backward = phases[np.isin(spans["name"][phases], names)]
    if not len(backward):
        return row
    ends = np.sort(rows_at(trace, spans["start_ns"][backward] + spans["duration_ns"][backward]))
    accesses = group_accesses_by_block(trace)
    last_op = op_column(trace, accesses.op[last_access], "name")
    root_names = [name for name in np.unique(last_op).tolist() if (trace.name(name) or "").startswith(_ROOT_OPERATOR)]
    next_end = np.searchsorted(ends, row, side="right")
    is_root = np.isin(last_op, root_names) & (next_end < len(ends))
    # The row at the end of the phase comes after the call has returned and the caller has dropped the loss.
    return np.where(is_root, ends[np.minimum(next_end, len(ends) - 1)], row)


def _module_calls(trace: Trace) -> tuple[Array, Array, Array]:
    """Return the first row of each module call, the row after its last one, and the call that encloses it (-1: none).

    The calls are in the order in which they begin.
    """
    spans = trace.columns("spans", "kind", "start_ns", "duration_ns")
    chosen = np.flatnonzero(spans["kind"] == SPAN["module"])
    begin_ns, duration_ns = spans["start_ns"][chosen], spans["duration_ns"][chosen]
    chosen_order = np.lexsort((-duration_ns, begin_ns))
    begin_ns, end_ns = begin_ns[chosen_order], (begin_ns + duration_ns)[chosen_order]
    parent = np.full(len(begin_ns), -1, np.int64)
    open_calls: list[int] = []
    for number, (begin, end) in enumerate(zip(begin_ns.tolist(), end_ns.tolist(), strict=True)):
        while open_calls and end_ns[open_calls[-1]] <= begin:
            open_calls.pop()
        if open_calls and end_ns[open_calls[-1]] >= end:
            parent[number] = open_calls[-1]
        open_calls.append(number)
    return rows_at(trace, begin_ns), rows_at(trace, end_ns), parent
