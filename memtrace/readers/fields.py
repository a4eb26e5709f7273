"""Numbers of columns, checked without a Python loop over rows.

The argument ``what`` names a row in error messages; ``{}`` is replaced by the number of the row, as in "entry {} of
device 0".
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from memtrace.format.schema import MAX_BYTES
from memtrace.readers.rows import FieldError
from memtrace.readers.tables import Array

_WORD_RANGE: Final = 1 << 64
_INT64_MAX: Final = (1 << 63) - 1
_IMPOSSIBLE: Final = "which an allocator never writes"


def integers(values: Sequence[Any] | Array, key: str, what: str) -> Array:
    """Return the values as int64; raise FieldError for values that are not integers of 64 bits."""
    if isinstance(values, np.ndarray):
        return values
    try:
        # Unlike numpy, array rejects floats, and it reads each value once.
        return np.frombuffer(array("q", values), np.int64)
    except TypeError:
        raise _number_error(values, key, what, lambda value: isinstance(value, int)) from None
    except OverflowError:
        raise _number_error(values, key, what, lambda value: -_INT64_MAX <= value <= _INT64_MAX) from None


def sizes(values: Sequence[Any] | Array, key: str, what: str, *, is_failed_request: Array | None = None) -> Array:
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


def addresses(values: Sequence[Any] | Array, key: str, what: str) -> Array:
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
    values: Sequence[Any] | Array,
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
