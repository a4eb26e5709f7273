"""The phases of a snapshot's history, by the stacks of its allocations."""

from __future__ import annotations

from typing import Final

import numpy as np

from memtrace.format.schema import PHASES
from memtrace.readers.annotations import Span
from memtrace.readers.frames import BACKWARD, FORWARD, OPTIMIZER
from memtrace.readers.tables import Array, Names

# More changes of phase than that are no phases of training.
_MAX_SPANS: Final = 100_000


def without_stack(phase: Array, has_stack: Array) -> Array:
    """Which allocations, in their order, are taken for the backward's because they have no stack.

    Autograd's threads run no Python, so with Python stacks theirs are empty. An allocation without a stack belongs to
    a backward when the last one before it whose phase is known was of a forward or a backward.
    """
    known = phase >= 0
    last = np.maximum.accumulate(np.where(known, np.arange(len(phase)), -1))
    before = np.where(last >= 0, phase[last], -1) if len(phase) else phase
    taken: Array = ~has_stack & ~known & ((before == FORWARD) | (before == BACKWARD))
    return taken


def phase_spans(phase: Array, times: Array, names: Names) -> list[Span]:
    """Spans from the phases of allocations at ``times``, in their order.

    A span lasts from the first allocation of a phase to the first of the next one; to the last of its own where
    allocations of unknown phase come before that. Within a forward or a backward unknown ones do not end it.
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
    ids = {code: names.text("range", PHASES[code]) for code in np.unique(codes).tolist()}
    return [
        Span("phase", ids[code], start, max(start, end), -1)
        for code, start, end in zip(codes.tolist(), starts.tolist(), ends.tolist(), strict=True)
    ]
