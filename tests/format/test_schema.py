"""Everything that is derived from the schema agrees with it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memtrace.format.decode import decode_columns
from memtrace.format.encode import encode_codes, make_table
from memtrace.format.part_writer import open_part
from memtrace.format.schema import OBSERVED_TABLES, TABLE_MEANINGS, TABLES, Column, arrow_schema, find_column
from memtrace.recording.observers import COLUMN_DTYPES
from memtrace.recording.observers.columns_header import columns_header

DEVICES = ("cpu", "cuda:0")


def find_column_or_none(table: str, name: str) -> Column | None:
    return next((column for column in TABLES[table] if column.name == name), None)


def test_every_table_is_described_and_every_vocabulary_fits_int8() -> None:
    assert set(TABLE_MEANINGS) == set(TABLES)
    for table, columns in TABLES.items():
        assert len({column.name for column in columns}) == len(columns)
        for column in columns:
            assert column.meaning and len(column.vocabulary or ()) < 128
            assert column.stored is None or find_column_or_none(table, column.stored.name) is None
            assert (column.dtype == "text") == (column.vocabulary is not None or column.name == "device")


@pytest.mark.parametrize("table", [name for name in TABLES if name != "names"])
def test_columns_survive_encoding_and_decoding(table: str) -> None:
    columns = {}
    for column in TABLES[table]:
        if column.dtype == "bool":
            columns[column.name] = np.array([True, False, True])
        elif column.dtype == "text":
            columns[column.name] = np.array([0, 1, 0 if column.null is None else -1], np.int8)
        else:
            columns[column.name] = np.array([5, 7, 6 if column.null is None else -1])
    encoded = encode_codes(table, columns, DEVICES)
    assert encoded.schema == arrow_schema(table)
    for column in TABLES[table]:
        nulls = 0 if column.null is None or column.dtype == "bool" else 1
        assert encoded[column.name].null_count == nulls
    decoded = decode_columns(table, [encoded, encoded], list(columns), DEVICES)
    for name, values in columns.items():
        assert decoded[name].tolist() == [*values.tolist(), *values.tolist()]


@pytest.mark.parametrize("table", TABLES)
def test_parquet_files_have_the_encodings_and_statistics_of_the_schema(table: str, tmp_path: Path) -> None:
    with open_part(tmp_path / "part.parquet", table) as writer:
        writer.write_table(make_table(table, 3, {}))
    group = pq.read_metadata(tmp_path / "part.parquet").row_group(0)
    for place in range(group.num_columns):
        chunk = group.column(place)
        column = find_column(table, chunk.path_in_schema.partition(".")[0])
        assert ("DELTA_BINARY_PACKED" in chunk.encodings) == (column.encoding == "delta"), column.name
        assert ("RLE_DICTIONARY" in chunk.encodings) == (column.encoding == "dictionary"), column.name
        assert chunk.is_stats_set == column.is_searched, column.name


def test_observers_and_the_native_structs_have_the_columns_of_the_schema() -> None:
    for table in OBSERVED_TABLES:
        names = [column.name for column in TABLES[table]]
        assert list(COLUMN_DTYPES[table]) == names
        struct = columns_header().partition(f"struct {table}_columns")[2].partition("};")[0]
        assert re.findall(r"> (\w+);", struct) == names


def test_a_table_refuses_columns_that_it_does_not_have() -> None:
    with pytest.raises(ValueError, match="not columns of spans: nonsense"):
        make_table("spans", 1, {"nonsense": np.zeros(1)})
    assert make_table("spans", 2, {})["index"].null_count == 2
    assert isinstance(make_table("names", 0, {}), pa.Table)
