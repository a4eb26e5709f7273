"""Columns from lists of dicts, as pickles and JSON contain them, checked without a Python loop over rows.

The argument ``what`` names a row in error messages; ``{}`` is replaced by the number of the row, as in "entry {} of
device 0".
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import contains, itemgetter
from typing import Any, Final

import numpy as np

from memtrace.format.schema import MAX_BYTES
from memtrace.readers.tables import Array

_CHUNK_ROWS: Final = 256
_WORD_RANGE: Final = 1 << 64
_INT64_MAX: Final = (1 << 63) - 1
_IMPOSSIBLE: Final = "which an allocator never writes"
Row = Mapping[str, Any]


class FieldError(Exception):
    """A field is missing or has a wrong value. The message names the field but not the file."""


def rows_of(value: object, what: str) -> Sequence[Row]:
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
    getters = [(key, itemgetter(key), values) for key, values in result.items()]
    for start in range(0, len(rows), _CHUNK_ROWS):
        chunk = rows[start : start + _CHUNK_ROWS]
        if set(map(type, chunk)) != {dict}:
            rows_of(rows, what)
        for key, get, values in getters:
            values += _values_of(key, get, chunk)
    return result


def _values_of(key: str, get: Callable[[Row], Any], rows: Sequence[Row]) -> list[Any]:
    try:
        return list(map(get, rows))
    except KeyError:
        pass
    if any(map(contains, rows, repeat(key))):
        return [row.get(key) for row in rows]
    return [None] * len(rows)


def column(rows: Sequence[Row], key: str, what: str) -> list[Any]:
    """Return the values of ``key``; raise FieldError if a row does not have it."""
    try:
        return list(map(itemgetter(key), rows))
    except KeyError:
        row_number = next(number for number, row in enumerate(rows) if key not in row)
        raise FieldError(f"{what.format(row_number)} has no {key!r}") from None


def optional(rows: Sequence[Row], key: str) -> list[Any] | None:
    """Return the values of ``key``, None for a row without it; None if no row has it."""
    if rows and key in rows[0]:
        try:
            return list(map(itemgetter(key), rows))
        except KeyError:
            pass
    elif not any(map(contains, rows, repeat(key))):
        return None
    return [row.get(key) for row in rows]


def integers(values: Sequence[Any], key: str, what: str) -> Array:
    """Return the values as int64; raise FieldError for values that are not integers of 64 bits."""
    try:
        # Unlike numpy, array rejects floats, and it reads each value once.
        return np.frombuffer(array("q", values), np.int64)
    except TypeError:
        raise _number_error(values, key, what, lambda value: isinstance(value, int)) from None
    except OverflowError:
        raise _number_error(values, key, what, lambda value: -_INT64_MAX <= value <= _INT64_MAX) from None


def sizes(values: Sequence[Any], key: str, what: str, *, is_failed_request: Array | None = None) -> Array:
    """Return the values as sizes in bytes.

    Args:
        values: the values.
        key: their key.
        what: names a row.
        is_failed_request: rows whose size is not limited: a program with a wrong shape asks for any size.

    Raises:
        FieldError: a size is negative, or above ``MAX_BYTES`` in a row with a limit.
    """
    column = integers(values, key, what)
    if len(column) and (column.min() < 0 or column.max() > MAX_BYTES):
        limit: Any = MAX_BYTES if is_failed_request is None else np.where(is_failed_request, _INT64_MAX, MAX_BYTES)
        for row_number in np.flatnonzero((column < 0) | (column > limit)).tolist():
            raise FieldError(f"{what.format(row_number)} has {key} {column[row_number]}, {_IMPOSSIBLE}")
    return column


def addresses(values: Sequence[Any], key: str, what: str) -> Array:
    """Return the values as 64-bit words, with 2**63 and above (used by some accelerators) in two's complement."""
    try:
        return integers(values, key, what)
    except FieldError:
        if not all(map(_is_word, values)):
            raise _number_error(values, key, what, _is_word, "which is not an address") from None
        return np.fromiter((value % _WORD_RANGE for value in values), np.uint64, len(values)).view(np.int64)


def _is_word(value: object) -> bool:
    return isinstance(value, int) and -_WORD_RANGE // 2 <= value < _WORD_RANGE


def _number_error(
    values: Sequence[Any],
    key: str,
    what: str,
    is_valid: Callable[[Any], bool],
    problem: str = _IMPOSSIBLE,
) -> FieldError:
    row_number = next(number for number, value in enumerate(values) if value is None or not is_valid(value))
    if values[row_number] is None:
        return FieldError(f"{what.format(row_number)} has no {key!r}")
    return FieldError(f"{what.format(row_number)} has {key} {_format_value(values[row_number])}, {problem}")


def _format_value(value: object) -> str:
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 80 else f"of {value.bit_length()} bits"
    if isinstance(value, float | str):
        return ascii(value)[:40]
    return f"of type {type(value).__name__}"
