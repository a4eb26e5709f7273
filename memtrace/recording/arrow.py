"""From the bytes an observer hands over to Arrow tables of the trace's schema."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from memtrace.format import schema
from memtrace.recording.observers import COLUMN_DTYPES, Batch

# Arrays are made from buffers throughout: pyarrow's own conversions import pandas, some 100 MB and half a second in a
# training process that may never have wanted it.
VOCABULARIES = {
    ("events", "kind"): schema.EVENT_KINDS,
    ("ops", "phase"): schema.PHASES,
    ("spans", "kind"): schema.SPAN_KINDS,
    ("labels", "category"): schema.CATEGORIES,
}
MAX_DEVICES = 127


def strings(values: Sequence[str | None]) -> pa.Array:
    """A string array; None becomes null."""
    encoded = [None if value is None else value.encode("utf-8", "replace") for value in values]
    offsets = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(value or b"") for value in encoded], out=offsets[1:])
    valid = np.array([value is not None for value in encoded], bool)
    buffers = [
        _bitmap(valid),
        pa.py_buffer(offsets),
        pa.py_buffer(b"".join(value or b"" for value in encoded)),
    ]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def _bitmap(valid: npt.NDArray[np.bool_]) -> pa.Buffer | None:
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def integers(values: npt.NDArray[np.signedinteger], type_: pa.DataType) -> pa.Array:
    """An integer array; -1 becomes null."""
    return pa.Array.from_buffers(
        type_, len(values), [_bitmap(values != -1), pa.py_buffer(np.ascontiguousarray(values))]
    )


def times(values: npt.NDArray[np.signedinteger], type_: pa.DataType) -> pa.Array:
    """An integer array without nulls: a time may be any number."""
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _lists(values: Sequence[Sequence[int] | None]) -> pa.Array:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value or ()) for value in values], out=offsets[1:])
    flat = np.array([item for value in values for item in value or ()], np.int32)
    valid = np.array([value is not None for value in values], bool)
    child = times(flat, pa.int32())
    buffers = [_bitmap(valid), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(pa.list_(pa.int32()), len(values), buffers, children=[child])


def device_names() -> list[str]:
    """Text of the device codes of an observer."""
    return ["cpu"] + [f"cuda:{index}" for index in range(MAX_DEVICES)]


def _text(codes: npt.NDArray[np.int8], vocabulary: Sequence[str]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(integers(codes, pa.int8()), strings(vocabulary))


def tables(batch: Batch) -> dict[str, pa.Table]:
    """The tables of a drained batch, in the schema of the trace."""
    return {name: _table(name, batch) for name in (*COLUMN_DTYPES, "names")}


def _table(name: str, batch: Batch) -> pa.Table:
    if name == "names":
        return _names(batch["names"])
    target = schema.arrow_schema(name)
    columns = {
        column: np.frombuffer(batch[f"{name}.{column}"], dtype)
        for column, dtype in COLUMN_DTYPES[name].items()
        if f"{name}.{column}" in batch
    }
    if name == "events":
        columns.setdefault("allocated_size", columns["size"])
    arrays = []
    num_rows = len(columns[target[0].name])
    for field in target:
        if field.name not in columns:
            arrays.append(pa.nulls(num_rows, field.type))
            continue
        values = columns[field.name]
        if field.name == "device":
            arrays.append(_text(values, device_names()[: int(values.max(initial=0)) + 1]))
        elif (name, field.name) in VOCABULARIES:
            arrays.append(_text(values, VOCABULARIES[name, field.name]))
        elif field.name == "recompute":
            bits = pa.py_buffer(np.packbits(values != 0, bitorder="little"))
            arrays.append(pa.Array.from_buffers(pa.bool_(), len(values), [None, bits]))
        elif field.name in ("time_ns", "start_ns", "duration_ns"):
            arrays.append(times(values, field.type))
        else:
            arrays.append(integers(values, field.type))
    return pa.Table.from_arrays(arrays, schema=target)


def _names(rows: list[tuple[int, int, str, list[int]]]) -> pa.Table:
    stack = schema.NAME_KINDS.index("stack")
    ids = np.array([row[0] for row in rows], np.int32)
    kinds = np.array([row[1] for row in rows], np.int8)
    return pa.Table.from_arrays(
        [
            times(ids, pa.int32()),
            _text(kinds, schema.NAME_KINDS),
            strings([None if row[1] == stack else row[2] for row in rows]),
            _lists([row[3] if row[1] == stack else None for row in rows]),
        ],
        schema=schema.arrow_schema("names"),
    )
