"""Operator calls: the columns of the table ``ops`` for the operator calls that events name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True)
class OperatorIndex:
    """The row of the table ``ops`` of each operator call, by its identifier."""

    first_id: int
    row: Array
    """Row of call ``first_id`` + k; -1 for calls that were never written (a killed process)."""

    def rows(self, op_ids: Array) -> Array:
        """Return the row of ``ops`` of each operator call; -1 where the call is unknown."""
        if not len(self.row):
            return np.full(len(op_ids), -1, np.int32)
        place = op_ids - self.first_id
        known = (op_ids >= 0) & (place >= 0) & (place < len(self.row))
        return np.where(known, self.row[np.where(known, place, 0)], np.int32(-1))


def operator_index(trace: Trace) -> OperatorIndex:
    """Return the index of the operator calls of a single-rank trace."""
    return trace.cached(_operator_index)


def _operator_index(trace: Trace) -> OperatorIndex:
    op_id = trace.columns("ops", "op_id")["op_id"]
    if not len(op_id):
        return OperatorIndex(0, np.empty(0, np.int32))
    first, last = int(op_id.min()), int(op_id.max())
    row = np.full(last - first + 1, -1, np.int32)
    row[op_id - first] = np.arange(len(op_id), dtype=np.int32)
    return OperatorIndex(first, row)


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
