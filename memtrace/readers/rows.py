"""Rows of a file as columns, whether they are Python dicts or were scanned by native code.

A reader takes all it needs of a list of dicts through ``Rows``, so that the same code checks and converts what either
of them read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import contains, itemgetter
from typing import Any, Final

import numpy as np

from memtrace.readers.tables import Array

_CHUNK_ROWS: Final = 256
Row = Mapping[str, Any]


class FieldError(Exception):
    """A field is missing or has a wrong value. The message names the field but not the file."""


@dataclass(frozen=True, eq=False)
class Coded:
    """A column whose values can repeat."""

    values: Sequence[Any]
    """The values that occur, in the order of their first row; some of them may be equal."""
    codes: Array | None = None
    """For each row the index of its value; None: each row has its own element of ``values``."""

    def __len__(self) -> int:
        return len(self.values) if self.codes is None else len(self.codes)

    def rows(self) -> Sequence[Any]:
        """Return the value of each row."""
        return self.values if self.codes is None else [self.values[code] for code in self.codes.tolist()]

    def value(self, row: int) -> Any:
        """Return the value of one row."""
        return self.values[row if self.codes is None else self.codes[row]]

    def spread(self, per_value: Array) -> Array:
        """Return an array with an element per row from one with an element per value; it may not be written to."""
        if self.codes is not None and len(per_value) == 1:
            return np.broadcast_to(per_value, len(self.codes))  # takes no memory
        return per_value if self.codes is None else per_value[self.codes]

    def take(self, selected: Array) -> Coded:
        """Return the rows that a mask or an array of row numbers selects."""
        if self.codes is None:
            if selected.dtype == np.bool_:
                return Coded(list(compress(self.values, selected.tolist())))
            return Coded([self.values[row] for row in selected.tolist()])
        codes = self.codes[selected]
        if len(self.values) == 1:
            return Coded(self.values if len(codes) else [], codes)
        return _in_order(self.values, codes)

    def numbered(self) -> Coded:
        """Return the same column with codes, in which no two values are equal; they must be hashable."""
        index: dict[Hashable, int] = {}
        numbers = np.array([index.setdefault(value, len(index)) for value in self.values], np.int64)
        return Coded(list(index), self.spread(numbers))

    @classmethod
    def joined(cls, parts: Sequence[Coded]) -> Coded:
        """Return the rows of several columns, one after another."""
        values = list(chain.from_iterable(part.values for part in parts))
        if all(part.codes is None for part in parts):
            return cls(values)
        starts = np.cumsum([0, *(len(part.values) for part in parts)])
        codes = [
            start + (np.arange(len(part)) if part.codes is None else part.codes)
            for start, part in zip(starts.tolist(), parts, strict=False)
        ]
        return cls(values, np.concatenate(codes))


def _in_order(values: Sequence[Any], codes: Array) -> Coded:
    """Return a column without the values that no row has, and with the others in the order of their first row."""
    first = np.full(len(values), len(codes), np.int64)
    first[codes[::-1]] = np.arange(len(codes) - 1, -1, -1)  # of rows with the same value, the first one is written last
    order = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(codes))]
    new = np.zeros(len(values), codes.dtype)
    new[order] = np.arange(len(order))
    return Coded([values[index] for index in order.tolist()], new[codes])


class Rows(ABC):
    """A list of dicts."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def values(self, key: str) -> Sequence[Any]:
        """Return the value of each row; None for a row without the key."""

    @abstractmethod
    def numbers(self, key: str) -> Sequence[Any] | Array:
        """Return the same, or an array of int64 where that is known to hold the same values."""

    @abstractmethod
    def coded(self, key: str) -> Coded:
        """Return the same as a column whose values can repeat."""

    @abstractmethod
    def row(self, number: int) -> Row:
        """Return one row as a dict."""

    @abstractmethod
    def take(self, selected: Array) -> Rows:
        """Return the rows that a mask selects."""

    @abstractmethod
    def children(self, key: str, row: str, what: str) -> tuple[Rows, Array]:
        """Return the rows of the lists under a key, one list after another, and the length of each list.

        Args:
            key: the key.
            row: names a row in messages: "segment {}".
            what: names the value of the key in messages: "the blocks of a segment".

        Raises:
            FieldError: a row does not have the key, or its value is not a list of dicts.
        """

    @abstractmethod
    def close(self) -> None:
        """Give back memory early where that is possible; the rows cannot be read any more then."""


class DictRows(Rows):
    """Rows that are Python dicts.

    Args:
        rows: the dicts.
        known: columns that were read already.
    """

    def __init__(self, rows: Sequence[Row], known: Mapping[str, list[Any]] | None = None) -> None:
        self._rows = rows
        self._known = dict(known or {})

    def __len__(self) -> int:
        return len(self._rows)

    def values(self, key: str) -> list[Any]:
        """Return the value of each row; None for a row without the key."""
        if key not in self._known:
            self._known[key] = _values_of(key, self._rows)
        return self._known[key]

    def numbers(self, key: str) -> Sequence[Any] | Array:
        """Return the value of each row."""
        return self.values(key)

    def coded(self, key: str) -> Coded:
        """Return a column in which each row has its own value."""
        return Coded(self.values(key))

    def row(self, number: int) -> Row:
        """Return one row."""
        return self._rows[number]

    def take(self, selected: Array) -> DictRows:
        """Return the rows that a mask selects."""
        if selected.all():
            return self
        chosen = selected.tolist()
        known = {key: list(compress(values, chosen)) for key, values in self._known.items()}
        return DictRows(list(compress(self._rows, chosen)), known)

    def children(self, key: str, row: str, what: str) -> tuple[Rows, Array]:
        """Return the rows of the lists under a key; see ``Rows.children``."""
        for number in range(len(self._rows)):
            if key not in self._rows[number]:
                raise FieldError(f"{row.format(number)} has no {key!r}")
        lists = [dicts_of(value, what) for value in self.values(key)]
        return DictRows(list(chain.from_iterable(lists))), np.array(list(map(len, lists)), np.int64)

    def close(self) -> None:
        """Do nothing: Python keeps the dicts for as long as they are needed."""


def rows_of(value: object, what: str, keys: Sequence[str] = ()) -> Rows:
    """Return the rows of a list of dicts; rows that were scanned are returned as they are.

    Args:
        value: the list.
        what: names the list in messages: "the history of device 0".
        keys: keys that will be read of all rows.

    Raises:
        FieldError: the value is not a list of dicts.
    """
    if isinstance(value, Rows):
        return value
    if not keys or not isinstance(value, list | tuple):
        return DictRows(dicts_of(value, what))
    return DictRows(value, columns(value, keys, what))


def dicts_of(value: object, what: str) -> Sequence[Row]:
    """Return ``value`` if it is a list of dicts; raise FieldError otherwise."""
    if not isinstance(value, list | tuple):
        raise FieldError(f"{what} has type {type(value).__name__} instead of list")
    types = set(map(type, value))
    if types - {dict}:
        wrong_type = next(item.__name__ for item in types if item is not dict)
        raise FieldError(f"an element of {what} has type {wrong_type} instead of dict")
    return value


def columns(rows: Sequence[Row], keys: Sequence[str], what: str) -> dict[str, list[Any]]:
    """Return the values of each of ``keys``, None for a row without the key.

    All keys are read from one chunk of rows before the next, while the chunk is in the processor's cache. That takes
    two thirds of the time of a separate pass over a million rows for each key.

    Args:
        rows: the rows.
        keys: the keys to read.
        what: names the rows as a whole: "the history of device 0".

    Raises:
        FieldError: a row is not a dict.
    """
    result: dict[str, list[Any]] = {key: [] for key in keys}
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS]
        if set(map(type, chunk)) != {dict}:
            dicts_of(rows, what)
        for key, values in result.items():
            values += _values_of(key, chunk)
    return result


def _values_of(key: str, rows: Sequence[Row]) -> list[Any]:
    try:
        return list(map(itemgetter(key), rows))
    except KeyError:
        pass
    if any(map(contains, rows, repeat(key))):
        return [row.get(key) for row in rows]
    return [None] * len(rows)
