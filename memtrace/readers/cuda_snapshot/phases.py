"""The phases of a snapshot's history, by the stacks of its allocations."""

from __future__ import annotations

from typing import Final

import numpy as np

from memtrace.readers.annotations import Span
from memtrace.readers.frames import BACKWARD, FORWARD
from memtrace.readers.tables import Array, Names
from memtrace.schema import PHASES

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
    """Spans from the phases of allocations at ``times``: each from the first allocation of a phase to the first of the
    next; one of unknown phase does not end it."""
    rows = np.flatnonzero(phase >= 0)
    if not len(rows):
        return []
    first = np.ones(len(rows), bool)
    first[1:] = phase[rows[1:]] != phase[rows[:-1]]
    begins = rows[first]
    if len(begins) > _MAX_SPANS:
        return []
    ends = np.append(times[begins[1:]], times[rows[-1]] + 1)
    starts = times[begins]
    ids = {code: names.text("range", PHASES[code]) for code in np.unique(phase[begins]).tolist()}
    return [
        Span("phase", ids[code], start, max(start, end), -1)
        for code, start, end in zip(phase[begins].tolist(), starts.tolist(), ends.tolist(), strict=True)
    ]
