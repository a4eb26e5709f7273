"""Steps that ran out of memory: what their blocks would have been used for is not in the trace."""

from __future__ import annotations

import numpy as np

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.event_codes import KIND, PHASE
from memtrace.analysis.operators import op_column
from memtrace.format.arrays import Array
from memtrace.trace import Trace

_STATE_OPERATORS = ("zeros", "zeros_like", "empty", "empty_like", "full", "full_like", "ones", "ones_like", "clone")
"""Operators with which optimizers create state; what other operators allocate during an update is temporary."""


def waits_for_backward(trace: Trace, op: Array, phase: Array, alloc_event: Array, free_event: Array) -> Array:
    """Return whether each block of a forward pass is live when an allocation fails before backward has ended.

    Autograd recorded the operator that allocated it. In a file without autograd's sequence numbers, a backward pass
    elsewhere shows that the program trains.

    Args:
        trace: the trace of one rank.
        op: the operator call that allocated each block; -1: unknown.
        phase: the phase of each allocation.
        alloc_event: row of each allocation; -1: before the trace.
        free_event: row of each free; -1: live at the end.
    """
    failures = _failures(trace)
    waits = np.zeros(len(op), bool)
    candidates = np.flatnonzero((phase == PHASE["forward"]) & (alloc_event >= 0))
    if not len(failures) or not len(candidates):
        return waits
    phases = op_column(trace, trace.columns("events", "op_id")["op_id"], "phase")
    backward = np.flatnonzero(phases == PHASE["backward"])
    if (trace.columns("ops", "sequence_nr")["sequence_nr"] >= 0).any():
        candidates = candidates[op_column(trace, op[candidates], "sequence_nr") >= 0]
    elif not len(backward):
        return waits
    end = np.iinfo(np.int64).max
    begun, freed = alloc_event[candidates], free_event[candidates]
    place = np.searchsorted(failures, begun)
    failure = np.append(failures, end)[place]
    # A backward pass that an allocation interrupts has not ended: what it has not read still waits.
    interrupted = np.append([_start_of_backward(phases, row) for row in failures.tolist()], end)[place]
    next_backward = np.append(backward, end)[np.searchsorted(backward, begun)]
    is_live = (freed < 0) | (freed > failure)
    waits[candidates] = (failure < end) & is_live & (next_backward >= interrupted)
    return waits & ~_is_read_before(trace, phases, np.append(failures, -1)[np.searchsorted(failures, alloc_event)])


def _is_read_before(trace: Trace, phases: Array, limit: Array) -> Array:
    """Return which blocks a backward pass reads before a row of events, one limit per block."""
    events, is_read = trace.columns("events", "kind", "block_id"), np.zeros(len(limit), bool)
    rows = np.flatnonzero((events["kind"] == KIND["read"]) & (phases == PHASE["backward"]) & (events["block_id"] >= 0))
    block = events["block_id"][rows]
    is_read[block[rows < limit[block]]] = True
    return is_read


def optimizer_state_in_creation(trace: Trace, op: Array, phase: Array, alloc_event: Array, free_event: Array) -> Array:
    """Return whether each block is state that an optimizer created in a call that ran out of memory.

    Recordings label state when the call returns. See ``waits_for_backward`` for the arguments.
    """
    failures = _failures(trace)
    is_state = np.zeros(len(op), bool)
    made = np.flatnonzero((phase == PHASE["optimizer"]) & (alloc_event >= 0))
    if not len(failures) or not len(made):
        return is_state
    failure = np.append(failures, -1)[np.searchsorted(failures, alloc_event[made])]
    made = made[(failure >= 0) & ((free_event[made] < 0) | (free_event[made] > failure))]
    names, index = np.unique(op_column(trace, op[made], "name"), return_inverse=True)
    texts = [(trace.name(number) or "").partition(".")[0].rpartition("::")[2] for number in names.tolist()]
    is_state[made] = np.array([text in _STATE_OPERATORS for text in texts], bool)[index]
    return is_state


def is_cut_short(trace: Trace, alloc_event: Array, free_event: Array) -> Array:
    """Return whether each block is of a step that ran out of memory, and live then: its later uses are unknown.

    Args:
        trace: the trace of one rank.
        alloc_event: row of each allocation; -1: before the trace.
        free_event: row of each free; -1: live at the end.
    """
    steps, cut = step_rows(trace), np.zeros(len(alloc_event), bool)
    limits = np.sort(np.concatenate([[0], steps.first_row, steps.end_row]))
    for failure in _failures(trace).tolist():
        begin = limits[np.searchsorted(limits, failure, side="right") - 1]
        is_live = (alloc_event < failure) & ((free_event < 0) | (free_event > failure))
        cut |= is_live & (alloc_event >= begin)
    return cut


def _failures(trace: Trace) -> Array:
    return np.flatnonzero(trace.columns("events", "kind")["kind"] == KIND["oom"])


def _start_of_backward(phases: Array, failure: int) -> int:
    """Return the first row of the backward pass that an allocation interrupts; the allocation's row outside of one."""
    known = np.flatnonzero(phases[: failure + 1] >= 0)
    if not len(known) or phases[known[-1]] != PHASE["backward"]:
        return failure
    # Other threads may do other work, such as loading data, while backward runs.
    others = np.flatnonzero(np.isin(phases[:failure], [PHASE["forward"], PHASE["optimizer"]]))
    return int(others[-1]) + 1 if len(others) else 0
