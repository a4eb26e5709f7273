"""Batches of an observer to numpy columns and to the Arrow tables of the trace."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.format import schema
from memtrace.format.arrays import Array
from memtrace.format.encode import (
    encode_codes,
    encode_lists,
    encode_numbers,
    encode_strings,
    encode_text,
    encode_vocabulary,
)
from memtrace.format.keyframes import Level, PartColumns
from memtrace.recording.observers import CHANGES_DTYPES, COLUMN_DTYPES, Batch

if TYPE_CHECKING:
    import pyarrow as pa

MAX_DEVICES: Final = 127
DEVICES: Final = ("cpu", *(f"cuda:{index}" for index in range(MAX_DEVICES)))
"""Text of the device codes of an observer."""
_COMPLETE_TABLES: Final = ("spans", "labels")
"""Tables whose numpy columns are all there; they have few rows."""
Columns = dict[str, dict[str, Array]]
"""Numpy columns by table and name, in the form that ``format.encode.encode_codes`` takes."""


def batch_columns(batch: Batch) -> Columns:
    """Return the columns of a drained batch; columns that it leaves out are null, ``allocated_size`` is ``size``."""
    columns: Columns = {}
    for table, dtypes in COLUMN_DTYPES.items():
        present = {
            name: np.frombuffer(batch[f"{table}.{name}"], dtype)
            for name, dtype in dtypes.items()
            if f"{table}.{name}" in batch
        }
        num_rows = len(next(iter(present.values()), ()))
        absent = {
            name: np.full(num_rows, -1, dtype)
            for name, dtype in dtypes.items()
            if name not in present and (table in _COMPLETE_TABLES or schema.find_column(table, name).is_required)
        }
        columns[table] = present | absent
    columns["events"].setdefault("allocated_size", columns["events"]["size"])
    if "recompute" in columns["ops"]:
        columns["ops"]["recompute"] = columns["ops"]["recompute"].view(np.bool_)
    return columns


def device_codes(device: Array) -> list[int]:
    """Return the codes that occur. np.unique imports numpy.ma, and takes long with the GIL, which the program needs."""
    codes: list[int] = np.flatnonzero(np.bincount(device)).tolist()
    return codes


def part_columns(columns: Columns, batch: Batch, phase_of_name: Mapping[int, int]) -> PartColumns:
    """Return what a drained batch changes in the live set, given its ``batch_columns``: the rows that still matter
    after the batch, if the observer has found them, otherwise all rows.
    """
    events, ops, labels, spans = (columns[name] for name in ("events", "ops", "labels", "spans"))
    if "changes.event_rows" not in batch:
        return PartColumns(events, ops, labels, spans, phase_of_name)
    found = {name: np.frombuffer(batch[f"changes.{name}"], dtype) for name, dtype in CHANGES_DTYPES.items()}
    kept = {name: values[found["event_rows"]] for name, values in events.items()}
    kept["order_ns"] = found["event_order_ns"]
    level_device = found["level_device"]
    levels = {
        code: Level(found["level_time_ns"][level_device == code], found["level_bytes"][level_device == code])
        for code in device_codes(level_device)
    }
    kept_ops = {name: values[found["op_rows"]] for name, values in ops.items()}
    return PartColumns(kept, kept_ops, labels, spans, phase_of_name, levels)


def encode_batch(columns: Columns, batch: Batch) -> dict[str, pa.Table]:
    """Return the tables of a drained batch, given its ``batch_columns``."""
    has_bitmaps = any(name.endswith((".valid", ".bits")) for name in batch)
    encode = partial(_wrap, batch) if has_bitmaps else partial(encode_codes, devices=DEVICES)
    tables = {table: encode(table, values) for table, values in columns.items() if len(next(iter(values.values())))}
    return tables | {"names": _encode_names(batch["names"])}


def _wrap(batch: Batch, table: str, columns: Mapping[str, Array]) -> pa.Table:
    """Return a table of columns whose buffers the observer has prepared, without columns that are null throughout."""
    import pyarrow as pa

    names = [name for name in columns if f"{table}.{name}" in batch or (table, name) in schema.COPIES]
    arrays = [_wrap_column(batch, schema.find_column(table, name), f"{table}.{name}", columns[name]) for name in names]
    return pa.Table.from_arrays(arrays, schema=schema.stored_schema(table, names))


def _wrap_column(batch: Batch, column: schema.Column, key: str, values: Array) -> pa.Array:
    import pyarrow as pa

    if key not in batch:
        key = "events.size"  # of allocated_size
    kind = schema.batch_type(column)
    validity, data = batch.get(f"{key}.valid"), batch.get(f"{key}.bits", batch[key])
    buffers = [None if validity is None else pa.py_buffer(validity), pa.py_buffer(data)]
    codes = pa.Array.from_buffers(kind, len(values), buffers)
    if column.dtype != "text":
        return codes
    vocabulary = column.vocabulary or DEVICES[: int(values.max(initial=0)) + 1]
    return pa.DictionaryArray.from_arrays(codes, encode_vocabulary(vocabulary))


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
