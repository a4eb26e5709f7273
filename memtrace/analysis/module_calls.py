"""Module calls: until when a caller holds the blocks that it passes to a module."""

from __future__ import annotations

from typing import Final

import numpy as np

from memtrace.analysis.attribution import SPAN, rows_at
from memtrace.analysis.block_accesses import last_needed_rows
from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.trace import Trace

_MAX_DEPTH: Final = 64
"""Most nested module calls that are followed outwards; bounds the run time on damaged traces."""


def find_release_rows(trace: Trace, block: Array) -> Array:
    """Return for each block the row of events from which the program could drop it; every block must have an access.

    That is the end of the operator call that uses the block last. If this call is made by a module that began after the
    block was allocated, the block may be an argument of the module: the caller then holds it until the outermost such
    module returns.
    """
    row = last_needed_rows(trace, block)
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
