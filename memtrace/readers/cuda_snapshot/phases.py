"""Finds the phases in the history of a snapshot by the call stacks of its allocations."""

from __future__ import annotations

from typing import Final

import numpy as np

from memtrace.format.arrays import distinct
from memtrace.format.schema import PHASES
from memtrace.frames import BACKWARD, FORWARD, OPTIMIZER
from memtrace.readers.annotations import Span
from memtrace.readers.tables import Array, Names

# A history with more spans than this does not show the phases of training.
_MAX_SPANS: Final = 100_000


def infer_backward(phase: Array, has_stack: Array) -> Array:
    """Return which allocations without a call stack are assigned to the backward pass.

    Autograd's threads run no Python, so their Python stacks are empty. An allocation without a stack belongs to the
    backward pass if the last allocation before it whose phase is known belongs to a forward or a backward pass.

    Args:
        phase: phase of each allocation in their order, -1 where it is unknown.
        has_stack: whether each allocation has a call stack.
    """
    known = phase >= 0
    last = np.maximum.accumulate(np.where(known, np.arange(len(phase)), -1))
    before = np.where(last >= 0, phase[last], -1) if len(phase) else phase
    is_backward: Array = ~has_stack & ~known & ((before == FORWARD) | (before == BACKWARD))
    return is_backward


def phase_spans(phase: Array, times: Array, names: Names) -> list[Span]:
    """Return a span for each period of one phase.

    A span lasts from the first allocation of a phase to the first allocation of the next one, or to the last allocation
    of its own phase if allocations of unknown phase follow it. Allocations of unknown phase do not interrupt a forward
    or a backward pass.

    Args:
        phase: phase of each allocation in their order, -1 where it is unknown.
        times: time of each allocation in nanoseconds.
        names: the table that receives the names of the phases.
    """
    rows = np.flatnonzero(phase >= 0)
    if not len(rows):
        return []
    follows = rows[1:] == rows[:-1] + 1
    bridged = phase[rows[1:]] != OPTIMIZER
    first = np.ones(len(rows), bool)
    first[1:] = (phase[rows[1:]] != phase[rows[:-1]]) | ~(follows | bridged)
    begins = np.flatnonzero(first)
    if len(begins) > _MAX_SPANS:
        return []
    lasts = np.append(begins[1:] - 1, len(rows) - 1)
    ends = times[rows[lasts]] + 1
    closed = np.append(follows[lasts[:-1]], False)
    ends[closed] = times[rows[begins[1:]]][closed[:-1]]
    starts = times[rows[begins]]
    codes = phase[rows[begins]]
    ids = {code: names.text("range", PHASES[code]) for code in distinct(codes).tolist()}
    return [
        Span("phase", ids[code], start, max(start, end), -1)
        for code, start, end in zip(codes.tolist(), starts.tolist(), ends.tolist(), strict=True)
    ]
