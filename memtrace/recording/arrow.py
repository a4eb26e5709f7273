"""Batches of an observer to numpy columns and to the Arrow tables of the trace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.format import schema
from memtrace.format.arrays import Array
from memtrace.format.encode import encode_codes, encode_lists, encode_numbers, encode_strings, encode_text
from memtrace.recording.observers import COLUMN_DTYPES, Batch

if TYPE_CHECKING:
    import pyarrow as pa

MAX_DEVICES: Final = 127
DEVICES: Final = ("cpu", *(f"cuda:{index}" for index in range(MAX_DEVICES)))
"""Text of the device codes of an observer."""
Columns = dict[str, dict[str, Array]]
"""Numpy columns by table and name, in the form that ``format.encode.encode_codes`` takes."""


def batch_columns(batch: Batch) -> Columns:
    """Return the columns of a drained batch; columns that it leaves out are null, ``allocated_size`` is ``size``."""
    columns: Columns = {}
    for table, dtypes in COLUMN_DTYPES.items():
        columns[table] = {
            name: np.frombuffer(batch[f"{table}.{name}"], dtype)
            for name, dtype in dtypes.items()
            if f"{table}.{name}" in batch
        }
    columns["events"].setdefault("allocated_size", columns["events"]["size"])
    if "recompute" in columns["ops"]:
        columns["ops"]["recompute"] = columns["ops"]["recompute"] != 0
    return columns


def encode_batch(columns: Columns, batch: Batch) -> dict[str, pa.Table]:
    """Return the tables of a drained batch, given its ``batch_columns``."""
    tables = {table: encode_codes(table, values, DEVICES) for table, values in columns.items()}
    return tables | {"names": _encode_names(batch["names"])}


def _encode_names(rows: list[tuple[int, int, str, list[int]]]) -> pa.Table:
    import pyarrow as pa

    stack = schema.NAME_KINDS.index("stack")
    target = schema.arrow_schema("names")
    columns = {
        "id": encode_numbers(np.array([row[0] for row in rows], np.int32), None, pa.int32()),
        "kind": encode_text(np.array([row[1] for row in rows], np.int8), schema.NAME_KINDS),
        "text": encode_strings([None if row[1] == stack else row[2] for row in rows]),
        "frames": encode_lists([row[3] if row[1] == stack else None for row in rows]),
    }
    return pa.Table.from_arrays([columns[name] for name in target.names], schema=target)
