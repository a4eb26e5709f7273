"""Which operator calls of a step allocate, read and write which blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.event_codes import KIND
from memtrace.format.arrays import Array
from memtrace.planning.recorded_step import RecordedStep
from memtrace.trace import Trace


@dataclass(frozen=True)
class StepAccesses:
    """Allocations, reads and writes of a step that belong to operator calls, one element each, in the order of events."""

    row: Array
    """Row of events."""
    block: Array
    call: Array
    """The operator call, numbered densely from 0 in the order of the first event of each."""
    is_read: Array
    is_alloc: Array
    op_id: Array
    """For each call its ``op_id``; this column has one element per call."""

    @property
    def op(self) -> Array:
        """The ``op_id`` of each access."""
        ids: Array = self.op_id[self.call]
        return ids


def step_accesses(trace: Trace, step: RecordedStep) -> StepAccesses:
    """Return the accesses and allocations of a step that belong to operator calls."""
    events = trace.columns("events", "kind", "block_id", "op_id")
    rows = slice(step.first_row, step.end_row)
    kind, block, op = events["kind"][rows], events["block_id"][rows], events["op_id"][rows]
    of_call = np.flatnonzero(np.isin(kind, [KIND["alloc"], KIND["read"], KIND["write"]]) & (block >= 0) & (op >= 0))
    kind, block, op = kind[of_call], block[of_call], op[of_call]
    distinct, first, number = np.unique(op, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return StepAccesses(
        row=of_call + step.first_row,
        block=block,
        call=rank[number],
        is_read=kind == KIND["read"],
        is_alloc=kind == KIND["alloc"],
        op_id=distinct[order],
    )
