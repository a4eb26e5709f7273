"""Damaged and hostile parts are refused with a sentence that names the file, before anything is computed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import memtrace
from memtrace.errors import TraceError
from memtrace.format.schema import MAX_BYTES, MAX_NS, TABLES
from memtrace.format.validation import MAX_PART_ROWS, check_sizes
from tests.format.random_traces import RandomTrace, on_disk

Change = Callable[[pa.Table], pa.Table]


def _set(name: str, value: object) -> Change:
    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(name)
        field = table.schema.field(index).with_nullable(True)
        text = pa.types.is_dictionary(field.type)
        values = pa.array([value] * table.num_rows, pa.string() if text else field.type)
        return table.set_column(index, field, values.dictionary_encode().cast(field.type) if text else values)

    return change


def _retype(name: str, kind: pa.DataType) -> Change:
    def change(table: pa.Table) -> pa.Table:
        index = table.schema.get_field_index(name)
        return table.set_column(index, pa.field(name, kind), pa.nulls(table.num_rows, kind))

    return change


def _invalid_utf8(table: pa.Table) -> pa.Table:
    raw = pa.array([b"\xff\xfe"] * table.num_rows, pa.binary())
    text = pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())
    return table.set_column(table.schema.get_field_index("text"), pa.field("text", pa.string()), text)


CASES: dict[str, tuple[str, Change, str]] = {
    "a size below zero": ("events", _set("size", -2), "has -2 in the column size, which must be from 0"),
    "a size that no device has": ("events", _set("size", MAX_BYTES + 1), "as a size"),
    "a time out of range": ("events", _set("elapsed_ns", MAX_NS + 1), "in the column time_ns"),
    "a duration below zero": ("ops", _set("duration_ns", -1), "has -1 in the column duration_ns"),
    "a block id below zero": ("events", _set("block_reference", 10**6), "in the column block_id, which must be from 0"),
    "accesses without a block": ("events", lambda t: _set("kind", "read")(_set("block_reference", None)(t)), "accesses without a block_id"),
    "an unknown event": ("events", _set("kind", "explode"), "has 'explode' in the column kind, which is not one of alloc"),
    "a device that is an escape sequence": ("events", _set("device", "\x1b[31m"), r"has '\x1b[31m' in the column device"),
    "no kind": ("events", _set("kind", None), "has no value in"),
    "text instead of numbers": ("events", _retype("size", pa.string()), "has the column size as string instead of int64"),
    "floating point numbers": ("ops", _retype("gap_ns", pa.float64()), "has the column gap_ns as double"),
    "a column twice": ("ops", lambda t: t.append_column("name", t.column("name")), "has the column name 2 times"),
    "invalid UTF-8": ("names", _invalid_utf8, "has invalid text"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_invalid_part_is_refused_and_named(case: str, tmp_path: Path) -> None:
    table, change, message = CASES[case]
    on_disk(RandomTrace(1).rows, tmp_path / "x", [0, 9])
    part = next((tmp_path / "x" / "rank=0").glob(f"{table}-*.parquet"))
    pq.write_table(change(pq.read_table(part)), part)
    trace = memtrace.load(tmp_path / "x")
    with pytest.raises(TraceError) as refusal:
        for name in TABLES["names"] if table == "names" else TABLES[table]:
            trace.columns(table, name.name) if table != "names" else trace.name(0)
    text = str(refusal.value)
    assert text.startswith(f"{part} ") and message in text and text.isprintable()


def test_a_part_that_declares_too_many_rows_is_refused_before_it_is_read(tmp_path: Path) -> None:
    on_disk(RandomTrace(1).rows, tmp_path / "x", [0])
    part = tmp_path / "x" / "rank=0" / "events-00000.parquet"
    rows = pq.read_table(part)
    schema = pa.schema([field.with_nullable(True) for field in rows.schema])
    empty = pa.table([pa.nulls(1 << 20, field.type) for field in schema], schema)
    with pq.ParquetWriter(part, schema) as writer:
        for _ in range(MAX_PART_ROWS // (1 << 20) + 1):
            writer.write_table(empty)
    assert part.stat().st_size < 1_000_000
    with pytest.raises(TraceError, match="declares 17,825,792 rows, and a part has at most 16,777,216"):
        memtrace.load(tmp_path / "x").columns("events", "size")


def test_a_column_without_its_rows_is_refused(tmp_path: Path) -> None:
    """One wrong byte in the footer makes Arrow skip the description of a column and read no rows of it."""
    on_disk(RandomTrace(1).rows, tmp_path / "x", [0])
    part = tmp_path / "x" / "rank=0" / "events-00000.parquet"
    content = bytearray(part.read_bytes())
    content[content.rindex(b"\x19\x18\x04kind") - 8] |= 0x80
    part.write_bytes(content)
    trace = memtrace.load(tmp_path / "x")
    assert len(trace.columns("events", "block_id")["block_id"]) > 0
    with pytest.raises(TraceError, match=f"{part} is damaged"):
        trace.columns("events", "kind")


@pytest.mark.parametrize("name", ["manifest.json", "events-00000.parquet"])
def test_a_pipe_in_place_of_a_file_is_refused_instead_of_waited_for(name: str, tmp_path: Path) -> None:
    on_disk(RandomTrace(1).rows, tmp_path / "x", [0])
    file = tmp_path / "x" / "rank=0" / name
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(TraceError, match="not a regular file"):
        memtrace.load(tmp_path / "x").columns("events", "size")


def test_names_have_no_unprintable_characters(tmp_path: Path) -> None:
    rows = RandomTrace(1).rows
    rows["names"] += [
        {"id": 90, "kind": "module", "text": "net\x1b[31m\u202e"},
        {"id": 91, "kind": "frame", "text": "a\nb.py\t3\tf\x07"},
        {"id": 92, "kind": "stack", "frames": [91]},
    ]
    trace = on_disk(rows, tmp_path / "x", [0])
    assert trace.name(90) == "net\ufffd[31m\ufffd"
    (frame,) = trace.frames(92)
    assert (frame.file, frame.line, frame.function) == ("a\ufffdb.py", 3, "f\ufffd")


def test_the_size_that_is_named_is_one_of_a_row_that_must_not_have_it() -> None:
    sizes, kinds = [-3, 2**62, MAX_BYTES + 1, None, MAX_BYTES], ["alloc", "oom", "alloc", "alloc", "free"]
    with pytest.raises(TraceError, match=f"has {MAX_BYTES + 1} as a size"):
        check_sizes(pa.chunked_array([sizes], pa.int64()), lambda: pa.chunked_array([kinds]))
    check_sizes(pa.chunked_array([sizes[:2]], pa.int64()), lambda: pa.chunked_array([kinds[:2]]))
