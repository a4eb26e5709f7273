"""Forward passes that ran out of memory: their blocks wait for a backward that did not run."""

from __future__ import annotations

import numpy as np

from memtrace.analysis.event_codes import KIND, PHASE
from memtrace.analysis.operators import op_column
from memtrace.format.arrays import Array
from memtrace.trace import Trace


def waits_for_backward(trace: Trace, op: Array, phase: Array, alloc_event: Array, free_event: Array) -> Array:
    """Return whether each block of a forward pass is live when an allocation fails before backward has begun.

    Autograd recorded the operator that allocated it. In a file without autograd's sequence numbers, a backward pass
    elsewhere shows that the program trains.

    Args:
        trace: the trace of one rank.
        op: the operator call that allocated each block; -1: unknown.
        phase: the phase of each allocation.
        alloc_event: row of each allocation; -1: before the trace.
        free_event: row of each free; -1: live at the end.
    """
    failures = np.flatnonzero(trace.columns("events", "kind")["kind"] == KIND["oom"])
    waits = np.zeros(len(op), bool)
    backward = _backward_rows(trace)
    candidates = np.flatnonzero((phase == PHASE["forward"]) & (alloc_event >= 0))
    if not len(failures) or not len(candidates):
        return waits
    if (trace.columns("ops", "sequence_nr")["sequence_nr"] >= 0).any():
        candidates = candidates[op_column(trace, op[candidates], "sequence_nr") >= 0]
    elif not len(backward):
        return waits
    end = np.iinfo(np.int64).max
    begun, freed = alloc_event[candidates], free_event[candidates]
    failure = np.append(failures, end)[np.searchsorted(failures, begun)]
    next_backward = np.append(backward, end)[np.searchsorted(backward, begun)]
    is_live = (freed < 0) | (freed > failure)
    waits[candidates] = (failure < end) & is_live & (next_backward > failure)
    return waits


def _backward_rows(trace: Trace) -> Array:
    events = trace.columns("events", "op_id")
    return np.flatnonzero(op_column(trace, events["op_id"], "phase") == PHASE["backward"])
