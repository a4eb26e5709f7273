"""Numpy columns to the Arrow tables of a trace.

Arrays are built from buffers throughout because pyarrow's own conversions import pandas: some 100 MB and half a second
in a training process that may never need it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrace.format.arrays import Array
from memtrace.format.schema import TABLES, Column, arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class Text:
    """A column of a small vocabulary: ``codes`` into ``vocabulary``, -1 for null."""

    codes: Array
    vocabulary: Sequence[str]


@dataclass(frozen=True)
class Known:
    """A column of numbers with nulls: ``values`` where ``known``."""

    values: Array
    known: Array


def make_table(name: str, num_rows: int, columns: Mapping[str, Array | Text | Known]) -> pa.Table:
    """Return the table ``name`` of the schema; a column that is not given is null in every row.

    Raises:
        ValueError: the schema's table has no column of a given name.
    """
    import pyarrow as pa

    schema = arrow_schema(name)
    unknown = set(columns) - set(schema.names)
    if unknown:
        raise ValueError(f"not columns of {name}: {', '.join(sorted(unknown))}")
    arrays = []
    for field in schema:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(num_rows, field.type))
        elif isinstance(values, Text):
            arrays.append(encode_text(values.codes, values.vocabulary))
        elif isinstance(values, Known):
            arrays.append(encode_numbers(values.values, values.known, field.type))
        else:
            arrays.append(encode_numbers(values, None, field.type))
    return pa.Table.from_arrays(arrays, schema=schema)


def empty_tables() -> dict[str, pa.Table]:
    """Return every table of a trace without rows, except ``live``."""
    return {name: make_table(name, 0, {}) for name in TABLES if name != "live"}


def encode_codes(table: str, columns: Mapping[str, Array], devices: Sequence[str]) -> pa.Table:
    """Return a table from columns in the form that the analysis uses, the inverse of ``Trace.columns``.

    Args:
        table: one of TABLES.
        columns: numbers with -1 for null, codes with -1 for null, booleans. Columns that are absent become null.
        devices: the text of the codes of the column ``device``.
    """
    num_rows = len(next(iter(columns.values())))
    encoded: dict[str, Array | Text | Known] = {}
    for column in TABLES[table]:
        if column.name in columns:
            encoded[column.name] = _from_codes(column, columns[column.name], devices)
    return make_table(table, num_rows, encoded)


def _from_codes(column: Column, values: Array, devices: Sequence[str]) -> Array | Text | Known:
    if column.dtype == "text":
        codes = values.astype(np.int8, copy=False)
        vocabulary = column.vocabulary or devices[: int(codes.max(initial=0)) + 1]
        return Text(codes, vocabulary)
    if column.null is None or column.dtype == "bool":
        return values  # a time can be any number, -1 included
    return Known(values, values != -1)


def encode_text(codes: Array, vocabulary: Sequence[str]) -> pa.Array:
    """Return dictionary-encoded strings from int8 codes into ``vocabulary``; -1 becomes null."""
    import pyarrow as pa

    return pa.DictionaryArray.from_arrays(
        encode_numbers(codes.astype(np.int8, copy=False), codes >= 0, pa.int8()), encode_vocabulary(tuple(vocabulary))
    )


@functools.lru_cache(maxsize=64)
def encode_vocabulary(vocabulary: tuple[str, ...]) -> pa.Array:
    """Return a small vocabulary as a string array; the same ones are needed for every part of a trace."""
    return encode_strings(vocabulary)


def encode_numbers(values: Array, known: Array | None, kind: pa.DataType) -> pa.Array:
    """Return integers or booleans as an Arrow array; ``known`` is False where a value is null."""
    import pyarrow as pa

    if pa.types.is_boolean(kind):
        data = np.packbits(values.astype(bool, copy=False), bitorder="little")
    else:
        data = np.ascontiguousarray(values, kind.to_pandas_dtype())
    return pa.Array.from_buffers(kind, len(values), [_validity(known), pa.py_buffer(data)])


def encode_strings(texts: Sequence[str | None]) -> pa.Array:
    """Return a string array; None becomes null."""
    import pyarrow as pa

    encoded = [b"" if text is None else text.encode("utf-8", "replace") for text in texts]
    buffers = [_validity(_present(texts)), _offsets(encoded), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def encode_lists(lists: Sequence[Sequence[int] | None]) -> pa.Array:
    """Return an array of lists of int32; None becomes null."""
    import pyarrow as pa

    present = [() if item is None else item for item in lists]
    values = np.fromiter(chain.from_iterable(present), np.int32)
    buffers = [_validity(_present(lists)), _offsets(present)]
    children = [encode_numbers(values, None, pa.int32())]
    return pa.Array.from_buffers(pa.list_(pa.int32()), len(lists), buffers, children=children)


def select_rows(table: pa.Table, selected: Array) -> pa.Table:
    """Return the rows of a table that a boolean mask selects, or those with the given numbers in their order."""
    import pyarrow as pa

    # Table.filter imports pyarrow.compute, which takes a tenth of a second: it makes hundreds of Python functions.
    from pyarrow._compute import call_function

    if selected.dtype == bool:
        return call_function("filter", [table, encode_numbers(selected, None, pa.bool_())])
    return call_function("take", [table, encode_numbers(selected, None, pa.int64())])


def _validity(known: Array | None) -> pa.Buffer | None:
    import pyarrow as pa

    if known is None or bool(known.all()):
        return None
    return pa.py_buffer(np.packbits(known, bitorder="little"))


def _present(items: Sequence[object]) -> Array:
    return np.fromiter((item is not None for item in items), bool, len(items))


def _offsets(items: Sequence[Sequence[Any] | bytes]) -> pa.Buffer:
    import pyarrow as pa

    offsets = np.zeros(len(items) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, items), np.int64, len(items)), out=offsets[1:])
    if offsets[-1] >= 2**31:
        raise MemoryError("more names than a trace can hold")
    return pa.py_buffer(offsets.astype(np.int32))
