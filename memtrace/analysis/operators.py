"""Operator calls: the columns of the table ``ops`` for the operator calls that events name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.format.arrays import Array
from memtrace.format.keyframes import find_sorted
from memtrace.trace import Trace


@dataclass(frozen=True)
class OperatorIndex:
    """The row of the table ``ops`` of each operator call, by the id of the call."""

    first: int
    row_of: Array
    """Row of call ``first`` + k; -1 for calls that were never written (a killed process)."""
    far_ids: Array
    """Ids far below ``first``, ascending: a window has calls from long before it, which allocated blocks that live."""
    far_rows: Array

    def rows(self, ops: Array) -> Array:
        """Return the row of ``ops`` for each operator call, -1 where there is none."""
        if not len(self.row_of):
            return np.full(len(ops), -1, np.int32)
        offset = ops - np.int64(self.first)
        is_near = (offset >= 0) & (offset < len(self.row_of))
        rows = np.where(is_near, self.row_of[np.where(is_near, offset, 0)], np.int32(-1))
        if len(self.far_ids):
            far = np.flatnonzero(~is_near & (ops >= 0))
            positions, is_known = find_sorted(self.far_ids, ops[far])
            rows[far[is_known]] = self.far_rows[positions[is_known]]
        return rows


def operator_index(trace: Trace) -> OperatorIndex:
    """Return the index of the operator calls of a single-rank trace."""
    return trace.cached(_operator_index)


def _operator_index(trace: Trace) -> OperatorIndex:
    ids = trace.columns("ops", "op_id")["op_id"]
    rows = np.arange(len(ids), dtype=np.int32)
    # A table over the range of ids is quickest, but must not be larger than the trace.
    last = int(ids.max(initial=-1))
    is_near = ids > last - 4 * len(ids) - 1024
    far = rows[~is_near][np.argsort(ids[~is_near], kind="stable")]
    first = int(ids[is_near].min()) if len(ids) else 0
    row_of = np.full(last - first + 1 if len(ids) else 0, -1, np.int32)
    row_of[ids[is_near] - first] = rows[is_near]
    return OperatorIndex(first, row_of, ids[far], far)


def op_column(trace: Trace, op_ids: Array, name: str) -> Array:
    """Return a column of the table ``ops`` for each operator call; -1 (False) where the call is unknown.

    Args:
        trace: a single-rank trace.
        op_ids: identifiers of operator calls, -1 for none.
        name: name of the column.
    """
    column = trace.columns("ops", name)[name]
    missing = column.dtype.type(False) if column.dtype == bool else column.dtype.type(-1)
    if not len(column):
        return np.full(len(op_ids), missing, column.dtype)
    rows = operator_index(trace).rows(op_ids)
    return np.where(rows >= 0, column[rows], missing)
