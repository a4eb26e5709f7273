"""Columns out of lists of dicts, as pickles and JSON hold them, checked on the way and without a loop a row.

``what`` names a row in errors, ``{}`` standing for its number: "entry {} of device 0".
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from operator import contains, itemgetter
from typing import Any, Final

import numpy as np

from memtrace.readers.tables import Array

# No machine has more; and sums of a million such sizes still fit 64 bits.
MAX_BYTES: Final = 1 << 48
_STRETCH: Final = 256
_WORD: Final = 1 << 64
_INT64_MAX: Final = (1 << 63) - 1
Row = Mapping[str, Any]


class FieldError(Exception):
    """A field is absent or of the wrong kind. The message says which, without the name of the file."""


def rows_of(value: object, what: str) -> Sequence[Row]:
    """``value`` as a list of dicts; FieldError where it is anything else."""
    if not isinstance(value, list | tuple):
        raise FieldError(f"{what} is no list but of type {type(value).__name__}")
    kinds = set(map(type, value))
    if kinds - {dict}:
        other = next(kind.__name__ for kind in kinds if kind is not dict)
        raise FieldError(f"an entry of {what} is no record but of type {other}")
    return value


def columns(rows: Sequence[Row], keys: Sequence[str], what: str) -> dict[str, list[Any]]:
    """The values under each of ``keys``, None for a row that lacks it. ``what`` names the rows: "the history".

    A stretch of rows is asked for every key before the next, while it is in the processor's cache: that takes two
    thirds of the time of a pass over a million rows for each key. FieldError where a row is no dict.
    """
    found: dict[str, list[Any]] = {key: [] for key in keys}
    asked = [(key, itemgetter(key), values) for key, values in found.items()]
    for start in range(0, len(rows), _STRETCH):
        stretch = rows[start : start + _STRETCH]
        if set(map(type, stretch)) != {dict}:
            rows_of(rows, what)
        for key, get, values in asked:
            values += _under(key, get, stretch)
    return found


def _under(key: str, get: Callable[[Row], Any], rows: Sequence[Row]) -> list[Any]:
    try:
        return list(map(get, rows))
    except KeyError:
        pass
    if any(map(contains, rows, repeat(key))):
        return [row.get(key) for row in rows]
    return [None] * len(rows)


def column(rows: Sequence[Row], key: str, what: str) -> list[Any]:
    """The values under ``key``; FieldError where a row lacks it."""
    try:
        return list(map(itemgetter(key), rows))
    except KeyError:
        lacking = next(place for place, row in enumerate(rows) if key not in row)
        raise FieldError(f"{what.format(lacking)} has no {key!r}") from None


def optional(rows: Sequence[Row], key: str) -> list[Any] | None:
    """The values under ``key``, None where a row lacks it; None where no row has it."""
    if rows and key in rows[0]:
        try:
            return list(map(itemgetter(key), rows))
        except KeyError:
            pass
    elif not any(map(contains, rows, repeat(key))):
        return None
    return [row.get(key) for row in rows]


def integers(values: Sequence[Any], key: str, what: str) -> Array:
    """The values as int64; FieldError for what is no whole number that fits."""
    try:
        # Unlike numpy it takes no float, and it looks at each value once.
        return np.frombuffer(array("q", values), np.int64)
    except TypeError:
        raise _not_a_number(values, key, what, lambda value: isinstance(value, int)) from None
    except OverflowError:
        raise _not_a_number(values, key, what, lambda value: -_INT64_MAX <= value <= _INT64_MAX) from None


def sizes(values: Sequence[Any], key: str, what: str) -> Array:
    """The values as bytes; FieldError for negative and for absurd ones."""
    column = integers(values, key, what)
    if len(column) and (column.min() < 0 or column.max() > MAX_BYTES):
        raise _not_a_number(values, key, what, lambda value: 0 <= value <= MAX_BYTES)
    return column


def addresses(values: Sequence[Any], key: str, what: str) -> Array:
    """The values as 64-bit words: 2**63 and above (some accelerators map there) as two's complement."""
    try:
        return integers(values, key, what)
    except FieldError:
        if not all(map(_is_word, values)):
            raise _not_a_number(values, key, what, _is_word, "which is no address") from None
        return np.fromiter((value % _WORD for value in values), np.uint64, len(values)).view(np.int64)


def _is_word(value: object) -> bool:
    return isinstance(value, int) and -_WORD // 2 <= value < _WORD


def _not_a_number(
    values: Sequence[Any], key: str, what: str, fits: Callable[[Any], bool], why: str = "which no allocator writes"
) -> FieldError:
    wrong = next(place for place, value in enumerate(values) if value is None or not fits(value))
    if values[wrong] is None:
        return FieldError(f"{what.format(wrong)} has no {key!r}")
    return FieldError(f"{what.format(wrong)} has {key} {_spell(values[wrong])}, {why}")


def _spell(value: object) -> str:
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 80 else f"of {value.bit_length()} bits"
    if isinstance(value, float | str):
        return ascii(value)[:40]
    return f"of type {type(value).__name__}"
