"""Columns in a shorter form: a part reads back exactly as it was written, whatever its numbers are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import memtrace
from memtrace.errors import TraceError
from memtrace.format.schema import TABLES, arrow_schema, stored_columns
from memtrace.format.stored import StoredRows, shorten
from tests.format.random_traces import RandomTrace, in_memory, on_disk

BLOCKS = st.one_of(st.none(), st.integers(0, 6), st.integers(0, 2**60), st.integers(2**31 - 3, 2**31 + 3))
SMALL = st.one_of(st.none(), st.integers(-2, 2))
EVENT = st.fixed_dictionaries(
    {
        "time_ns": st.integers(-(2**55), 2**55),
        "kind": st.sampled_from(("alloc", "free", "read", "baseline", "oom")),
        "device": st.just("cpu"),
        "block_id": BLOCKS,
        "size": SMALL,
        "allocated_size": SMALL,
        "address": SMALL,
    }
)
CALL = st.fixed_dictionaries(
    {
        "op_id": st.integers(0, 9),
        "start_ns": st.one_of(st.none(), st.integers(-(2**55), 2**55)),
        "duration_ns": st.one_of(st.none(), st.integers(0, 2**50)),
    }
)


def table_of(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    schema = arrow_schema(name)
    return pa.Table.from_pylist([{column: row.get(column) for column in schema.names} for row in rows], schema=schema)


def read_back(name: str, rows: pa.Table, newest_block: int, keyframe: dict[int, int]) -> tuple[pa.Table, set[str]]:
    """Return the rows after they were stored and read, and the names of the columns that were stored."""
    columns = {"block_id": np.array(list(keyframe), np.int64), "address": np.array(list(keyframe.values()), np.int64)}
    stored, metadata = shorten(name, rows, newest_block, columns)
    restoring = StoredRows(name, stored, metadata, lambda names: pa.table({key: columns[key] for key in names}))
    arrays = []
    for field in rows.schema:
        values = restoring.column(field.name)
        arrays.append(pa.nulls(rows.num_rows, field.type) if values is None else values)
    return pa.Table.from_arrays(arrays, names=rows.column_names), set(stored.column_names)


@settings(deadline=None)
@given(
    st.lists(EVENT, min_size=1, max_size=20), st.integers(-1, 4),
    st.dictionaries(st.integers(0, 6), st.integers(-2, 2), max_size=4),
)  # fmt: skip
def test_any_events_survive(rows: list[dict[str, Any]], newest_block: int, keyframe: dict[int, int]) -> None:
    events = table_of("events", rows)
    restored, _ = read_back("events", events, newest_block, keyframe)
    assert restored.to_pylist() == events.to_pylist()


@settings(deadline=None)
@given(st.lists(CALL, min_size=1, max_size=10))
def test_any_operator_calls_survive(rows: list[dict[str, Any]]) -> None:
    ops = table_of("ops", rows)
    restored, stored = read_back("ops", ops, -1, {})
    assert restored.to_pylist() == ops.to_pylist()
    assert ("gap_ns" in stored) == all(row["start_ns"] is not None and row["duration_ns"] is not None for row in rows)


def test_a_recorded_step_is_stored_in_the_short_forms() -> None:
    """Blocks are numbered as they begin, are freed where they were allocated, and have the size that was requested."""
    rows = [("alloc", 4, 64, 5), ("read", 1, None, None), ("free", 4, 64, 5), ("free", 1, 32, 7), ("alloc", 5, 64, 5)]
    events = table_of(
        "events",
        [
            {"time_ns": 10 * i, "kind": kind, "device": "cpu", "block_id": block, "size": size, "allocated_size": size,
             "address": address} for i, (kind, block, size, address) in enumerate(rows)
        ],
    )  # fmt: skip
    restored, stored = read_back("events", events, 3, {1: 7})
    assert stored == {"elapsed_ns", "kind", "device", "block_reference", "size", "first_address"}
    assert restored.to_pylist() == events.to_pylist()
    table, _ = shorten("events", events, 3, {"block_id": np.array([1]), "address": np.array([7])})
    assert table.column("block_reference").to_pylist() == [0, -2, 1, -2, 0]
    assert table.column("first_address").to_pylist() == [5, None, None, None, 5]
    assert table.column("elapsed_ns").to_pylist() == [0, 10, 10, 10, 10]


@pytest.mark.parametrize("starts", [[0], [0, 7, 30]])
def test_parts_on_disk_agree_with_the_rows_in_memory(starts: list[int], tmp_path: Path) -> None:
    rows = RandomTrace(5).rows
    for number, row in enumerate(rows["events"]):
        row["address"] = 64 * row["block_id"] if row["kind"] in ("alloc", "free") else row.get("address")
        row["allocated_size"] = row["size"] if number % 2 else None
    whole, parts = in_memory(rows), on_disk(rows, tmp_path / "x", starts)
    for number in range(len(starts)):
        names = pq.read_schema(tmp_path / "x" / "rank=0" / f"events-{number:05d}.parquet").names
        assert {"elapsed_ns", "block_reference", "first_address"} <= set(names) <= set(stored_columns("events"))
    for table in ("events", "ops", "spans", "labels"):
        for column in TABLES[table]:
            expected = whole.columns(table, column.name)[column.name].tolist()
            assert parts.columns(table, column.name)[column.name].tolist() == expected, (table, column.name)


@pytest.mark.parametrize("number", [b"", b"x", b"9" * 40, None])
def test_metadata_that_blocks_cannot_be_restored_with_is_refused(number: bytes | None, tmp_path: Path) -> None:
    on_disk(RandomTrace(1).rows, tmp_path / "x", [0])
    part = tmp_path / "x" / "rank=0" / "events-00000.parquet"
    rows = pq.read_table(part)
    metadata = {} if number is None else {b"memtrace.newest_block": number}
    pq.write_table(rows.replace_schema_metadata(metadata), part)
    with pytest.raises(TraceError, match=r"events-00000\.parquet is damaged"):
        memtrace.load(tmp_path / "x").columns("events", "block_id")
