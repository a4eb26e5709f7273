"""Arrow columns of a trace to numpy columns in the form that the analysis uses.

Integers: null becomes -1. Text of a vocabulary: int8 codes, -1 for null. Booleans: null becomes False.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memtrace.format import arrays
from memtrace.format.arrays import Array
from memtrace.format.schema import arrow_schema, find_column

if TYPE_CHECKING:
    import pyarrow as pa

_DTYPES: dict[str, type[np.signedinteger[Any]]] = {"int64": np.int64, "int32": np.int32, "int16": np.int16}


def decode_column(table: str, name: str, chunks: Sequence[pa.ChunkedArray], devices: Sequence[str]) -> Array:
    """Return the chunks of a column of ``table``, joined.

    Args:
        table: one of TABLES.
        name: the column; the columns of ``names`` that are strings or lists cannot be decoded so.
        chunks: the column in the parts of the table, in order.
        devices: the text of the codes of the column ``device``.

    Raises:
        TraceError: a text is not in the column's vocabulary.
    """
    column = find_column(table, name)
    if column.dtype == "text":
        vocabulary = column.vocabulary or tuple(devices)
        return arrays.codes(chunks, arrays.vocabulary_coder(vocabulary, f"{table}.{name}"))
    if column.dtype == "bool":
        return arrays.booleans(chunks)
    dtype = arrays.narrowest(chunks) if column.is_identity else _DTYPES[column.dtype]
    return arrays.integers(chunks, dtype)


def decode_columns(
    table: str, parts: Sequence[pa.Table], names: Sequence[str], devices: Sequence[str]
) -> dict[str, Array]:
    """Return columns of ``table`` over all of its parts; a column that a part lacks is null in every row of it."""
    import pyarrow as pa

    schema = arrow_schema(table)

    def chunks(name: str) -> list[pa.ChunkedArray]:
        return [
            part.column(name)
            if name in part.column_names
            else pa.chunked_array([pa.nulls(part.num_rows, schema.field(name).type)])
            for part in parts
        ]

    return {name: decode_column(table, name, chunks(name), devices) for name in names}


def device_names(parts: Sequence[pa.Table]) -> tuple[str, ...]:
    """Return the devices in the column ``device`` of some tables: cpu first, then by name and number."""
    texts = arrays.text_values([part.column("device") for part in parts if "device" in part.column_names])
    return sort_devices(texts)


def sort_devices(names: Iterable[str]) -> tuple[str, ...]:
    """Return names of devices in the order of ``Trace.devices``: cpu first, then by name and number."""
    return tuple(sorted(names, key=_natural_order))


def _natural_order(device: str) -> tuple[bool, list[tuple[int, str]]]:
    """Sort key: cpu before all others, cuda:2 before cuda:10."""
    import re

    pieces = re.findall(r"\d+|\D+", device)
    return device != "cpu", [(int(piece) if piece.isdigit() else -1, piece) for piece in pieces]
