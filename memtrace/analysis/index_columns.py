"""Columns of an index that grow a part at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from memtrace.format.arrays import Array


class ColumnChunks:
    """Integer columns to which rows are added at the end; they are joined when they are asked for."""

    def __init__(self, names: Sequence[str]) -> None:
        self._chunks: list[dict[str, Array]] = [{name: np.empty(0, np.int64) for name in names}]
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    @property
    def columns(self) -> dict[str, Array]:
        """All rows."""
        if len(self._chunks) > 1:
            names = self._chunks[0]
            self._chunks = [{name: np.concatenate([chunk[name] for chunk in self._chunks]) for name in names}]
        return self._chunks[0]

    def append(self, rows: dict[str, Array]) -> None:
        """Add rows, given all columns."""
        num_rows = len(next(iter(rows.values())))
        if num_rows:
            self._chunks.append(rows)
            self._num_rows += num_rows

    def replace(self, rows: dict[str, Array]) -> None:
        """Replace all rows."""
        self._chunks = [rows]
        self._num_rows = len(next(iter(rows.values())))


CHANGE_COLUMNS: Final = ("level", "first", "end", "change")


class LevelChanges:
    """Bytes to add to levels of a curve between two rows each: what becomes known after the levels were computed.

    The position of a row is twice its number. The level at the start of a part, which follows the row before the part
    and yet is computed from the part, has the odd position between the two.
    """

    def __init__(self) -> None:
        self._rows = ColumnChunks(CHANGE_COLUMNS)
        self._sums: dict[int, tuple[Array, Array, Array, Array]] = {}

    @property
    def columns(self) -> dict[str, Array]:
        """One row per change: level, first and end (positions, end excluded) and change."""
        return self._rows.columns

    def restore(self, columns: dict[str, Array]) -> None:
        """Take over the columns of another object."""
        self._rows.replace(columns)
        self._sums.clear()

    def add(self, level: int, first_row: Array, end_row: int, change: Array) -> None:
        """Add ``change`` to a level in the rows from each ``first_row`` up to ``end_row``."""
        self._rows.append(
            {
                "level": np.full(len(change), level),
                "first": 2 * first_row.astype(np.int64),
                "end": np.full(len(change), 2 * end_row - 1),
                "change": change.astype(np.int64),
            }
        )
        self._sums.clear()

    def at(self, level: int, positions: Array) -> Array:
        """Return the sum of the changes of a level at each position."""
        if level not in self._sums:
            columns = self._rows.columns
            chosen = columns["level"] == level
            self._sums[level] = (
                *_running_sum(columns["first"][chosen], columns["change"][chosen]),
                *_running_sum(columns["end"][chosen], columns["change"][chosen]),
            )
        begin, begun, end, ended = self._sums[level]
        num_begun = np.searchsorted(begin, positions, side="right")
        result: Array = begun[num_begun] - ended[np.searchsorted(end, positions, side="right")]
        return result


def _running_sum(position: Array, change: Array) -> tuple[Array, Array]:
    """Return the positions in order, and the sum of the changes of the first 0, 1, 2, ... of them."""
    order = np.argsort(position, kind="stable")
    return position[order], np.concatenate([[0], np.cumsum(change[order])])
