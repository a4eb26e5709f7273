"""Checks of what a Parquet part contains, so that everything behind the reader can rely on the schema.

A part of a trace can be damaged or made by somebody else. Types and names of columns, null values, vocabularies and
ranges of numbers are checked once, where the part is read. The bounds leave room for sums: sizes and times of many rows
add up within 64 bits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.errors import TraceError
from memtrace.format import arrays
from memtrace.format.schema import MAX_BYTES, MAX_NS, TABLES, Column, Stored

if TYPE_CHECKING:
    import pyarrow as pa

MAX_PART_ROWS: Final = 1 << 24
"""Most rows of a part; the writer begins a new part after some 65,000 events. Few bytes can declare any number."""
MAX_ID: Final = 1 << 62
SIZES: Final = ("size", "allocated_size")
"""Columns that ``check_sizes`` checks."""
MAX_DEVICES: Final = 100
_DEVICE: Final = re.compile(r"[A-Za-z_][\w.-]{0,63}(:\d{1,6})?", re.ASCII)
_INT_TYPES: Final = {"int64": "int64", "int32": "int32", "int16": "int16"}
# Two's complement of 64-bit words, and numbers that autograd hands out.
_ANY_INTEGER: Final = ("address", "stream", "pool", "sequence_nr")


def check_schema(table: str, schema: pa.Schema, num_rows: int) -> None:
    """Check the columns of a part by its footer.

    Raises:
        TraceError: a column is missing, occurs twice or has another type, or there are too many rows. The message
            follows the name of the file.
    """
    if num_rows > MAX_PART_ROWS:
        raise TraceError(f"declares {num_rows:,} rows, and a part has at most {MAX_PART_ROWS:,}")
    names = schema.names
    for column in TABLES[table]:
        if column.name in names:
            _check_type(column, schema)
        elif column.stored is not None and column.stored.name in names:
            _check_type(column.stored, schema)
        elif column.is_required:
            raise TraceError(f"lacks the column {column.name} of the table {table}")


def _check_type(column: Column | Stored, schema: pa.Schema) -> None:
    if schema.names.count(column.name) > 1:
        raise TraceError(f"has the column {column.name} {schema.names.count(column.name)} times")
    field_type = schema.field(column.name).type
    if not _has_type(column, field_type):
        expected = "string" if column.dtype == "text" else column.dtype
        raise TraceError(f"has the column {column.name} as {str(field_type)[:60]} instead of {expected}")


def _has_type(column: Column | Stored, kind: pa.DataType) -> bool:
    import pyarrow as pa

    if column.dtype in _INT_TYPES:
        return str(kind) == _INT_TYPES[column.dtype]
    if column.dtype == "bool":
        return bool(pa.types.is_boolean(kind))
    if column.dtype == "list<int32>":
        return bool(pa.types.is_list(kind) and pa.types.is_int32(kind.value_type))
    if column.dtype == "text" and pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind))


def check_column(column: Column, values: pa.ChunkedArray) -> None:
    """Check the values of a column.

    Raises:
        TraceError: a value is null that never is, is not in the column's vocabulary, or is out of range. The message
            follows the name of the file.
    """
    if column.null is None and values.null_count and column.dtype != "bool":
        raise TraceError(f"has no value in {values.null_count:,} rows of the column {column.name}")
    if column.dtype == "text":
        _check_texts(column, values)
    elif column.dtype in ("string", "list<int32>"):
        _check_layout(column, values)
    else:
        _check_numbers(column, values)


def _check_texts(column: Column, values: pa.ChunkedArray) -> None:
    _check_layout(column, values)
    texts = arrays.text_values([values])
    if column.vocabulary:
        code_of = arrays.vocabulary_coder(column.vocabulary, column.name)
        for text in sorted(texts):
            code_of(text)
        return
    if len(texts) > MAX_DEVICES:
        raise TraceError(f"names {len(texts):,} devices in the column {column.name}, more than a computer has")
    for text in sorted(texts):
        if not _DEVICE.fullmatch(text):
            raise TraceError(f"has {text[:40]!a} in the column {column.name}, which is not a device such as cuda:0")


def _check_layout(column: Column, values: pa.ChunkedArray) -> None:
    """Check offsets, and that text is UTF-8."""
    import pyarrow as pa

    try:
        values.validate(full=True)
        for chunk in values.chunks:
            if hasattr(chunk, "dictionary"):
                chunk.dictionary.validate(full=True)
    except pa.ArrowInvalid as error:
        raise TraceError(f"has invalid text or lists in the column {column.name}") from error


def _check_numbers(column: Column, values: pa.ChunkedArray) -> None:
    bounds = _bounds(column)
    if bounds is None:
        return
    low, high = bounds
    wrong = arrays.outlier(values, low, high)
    if wrong is not None:
        raise TraceError(f"has {wrong} in the column {column.name}, which must be from {low} to {high}")


def _bounds(column: Column) -> tuple[int, int] | None:
    """Return the smallest and the largest valid number of a column; None where every number is valid."""
    if column.dtype == "bool" or column.name.removeprefix("op_") in _ANY_INTEGER:
        return None
    if column.unit == "bytes":
        return 0, MAX_ID if column.name in SIZES else MAX_BYTES  # see check_sizes
    if column.unit == "ns":
        return (0 if "duration" in column.name else -MAX_NS), MAX_NS
    return 0, {"int16": 2**15 - 1, "int32": 2**31 - 1}.get(column.dtype, MAX_ID)


def check_sizes(sizes: pa.ChunkedArray, read_kinds: Callable[[], pa.ChunkedArray | None]) -> None:
    """Check that only failed requests are larger than ``MAX_BYTES``: a wrong shape asks for any size.

    Args:
        sizes: one of the columns ``SIZES`` of some rows.
        read_kinds: reads the column ``kind`` of these rows; None in a table without it.

    Raises:
        TraceError: another row is larger. The message follows the name of the file.
    """
    if arrays.outlier(sizes, 0, MAX_BYTES) is None:
        return
    kinds = read_kinds()
    rows = zip(sizes.to_pylist(), kinds.to_pylist() if kinds is not None else [""] * len(sizes), strict=True)
    wrong = [size for size, kind in rows if size is not None and size > MAX_BYTES and kind != "oom"]
    if wrong:
        raise TraceError(f"has {max(wrong)} as a size, which must be from 0 to {MAX_BYTES}")


def check_accessed_blocks(block_ids: pa.ChunkedArray, read_kinds: Callable[[], pa.ChunkedArray | None]) -> None:
    """Check that every access is an access to a block.

    Args:
        block_ids: the column ``block_id`` of some rows of ``events``.
        read_kinds: reads the column ``kind`` of these rows.

    Raises:
        TraceError: an access has no block. The message follows the name of the file.
    """
    if not block_ids.null_count:
        return
    kinds = read_kinds()
    if kinds is None:
        return
    is_access = arrays.codes([kinds], lambda kind: int(kind in ("read", "write"))) == 1
    num_accesses = int(np.count_nonzero(is_access & (arrays.integers([block_ids], np.int64) < 0)))
    if num_accesses:
        raise TraceError(f"has {num_accesses:,} accesses without a block_id")


def check_order(order_ns: int) -> int:
    """Return the largest time of all events before a part, as its keyframe has it; ValueError for an invalid time."""
    smallest = int(np.iinfo(np.int64).min)
    if order_ns != smallest and not -MAX_NS <= order_ns <= MAX_NS:
        raise ValueError("the time of the keyframe is out of range")
    return order_ns
