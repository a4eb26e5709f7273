"""Writes the tables of one rank as Parquet parts, each with the keyframe that it begins with.

A part is assembled in memory, compressed, and then written under temporary names and renamed into place: a killed
process leaves a trace that opens and lacks at most its last flush. A process that forks in between shares no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from memtrace.format import arrays
from memtrace.format.arrays import Array
from memtrace.format.encode import encode_codes
from memtrace.format.files import replace_file
from memtrace.format.keyframes import LiveSet, PartColumns
from memtrace.format.manifest import PartRanges, part_ranges
from memtrace.format.part_files import ORDER_KEY, part_name
from memtrace.format.schema import RANK_TABLES, TABLES, arrow_schema, stored_columns, stored_schema
from memtrace.format.stored import FindEventForms, shorten

PART_ROWS: Final = 131_072
"""Events of a part. A window reads the parts at both of its ends whole, so parts are small against a window of 1 %; but
a recorded program waits for some milliseconds whenever a part is written, so they are not smaller than that."""
LARGEST_PART_ROWS: Final = 3 * PART_ROWS
"""Events at which a recording writes a part although the last one was written within a second."""
KEYFRAMED_TABLES: Final = tuple(name for name in TABLES if name not in RANK_TABLES)
"""Tables whose parts a ring deletes: the keyframe of the first part that stays replaces them."""
_PARQUET_ENCODINGS: Final = {"delta": "DELTA_BINARY_PACKED", "byte_stream_split": "BYTE_STREAM_SPLIT"}
# Events come last: whoever reads while a part is written finds the names and operators they refer to.
_IN_ORDER: Final = (*(name for name in TABLES if name != "events"), "events")


def open_part(target: Any, table: str, schema: pa.Schema | None = None) -> pq.ParquetWriter:
    """Open a Parquet writer for one part of ``table``, with the encodings that the schema names.

    Args:
        target: a path, or an output stream of pyarrow.
        table: name of the table.
        schema: the columns of the part and the metadata of its file; None: all columns of the table.
    """
    schema = arrow_schema(table) if schema is None else schema
    columns = stored_columns(table)
    encodings = {name: columns[name].encoding for name in schema.names}
    return pq.ParquetWriter(
        target,
        schema,
        compression="zstd",
        write_statistics=[column.name for column in TABLES[table] if column.is_searched] or False,
        use_dictionary=[name for name, encoding in encodings.items() if encoding == "dictionary"],
        column_encoding={name: _PARQUET_ENCODINGS[encoding] for name, encoding in encodings.items()
                         if encoding in _PARQUET_ENCODINGS},
    )  # fmt: skip


class PartWriter:
    """The parts of one rank: rows are appended as they come, ``flush`` makes them durable.

    Attributes:
        num_events: events appended so far.
        rows_in_part: events appended since the last flush.
        write_file: writes a file; see ``replace_file``.
        find_event_forms: see ``stored.shorten``.
        on_table_written: called in ``flush`` with the name of a table and its temporary file, before it is renamed.
    """

    def __init__(self, folder: Path, devices: Sequence[str]) -> None:
        self.num_events = 0
        self.rows_in_part = 0
        self.write_file: Callable[[Path, memoryview, Callable[[Path], object] | None], None] = replace_file
        self.find_event_forms: FindEventForms | None = None
        self.on_table_written: Callable[[str, Path], None] | None = None
        self._folder = folder
        self._devices = devices
        self._rows: dict[str, list[pa.Table]] = {}
        self._keyframe: _Keyframe | None = None
        self._number = 0
        self._numbers: dict[str, list[int]] = {}
        self._live = LiveSet()
        self._newest_block = -1

    @property
    def parts(self) -> dict[str, PartRanges]:
        """The numbers of the parts written so far, by table; a table without rows in a part has no such file."""
        return {table: part_ranges(numbers) for table, numbers in self._numbers.items()}

    @property
    def order_ns(self) -> int:
        """Largest time of all events so far."""
        return self._live.order_ns

    @property
    def live_set(self) -> LiveSet:
        """The live set after all rows appended so far."""
        return self._live

    def begin_with(self, live: LiveSet, names: Sequence[pa.Table]) -> None:
        """Begin the first part with a live set, and with names that its rows refer to; it is written even if empty."""
        self._live = live
        self._begin_part()
        self._newest_block = int(self._live.keyframe()["block_id"].max(initial=-1))
        self._rows["events"] = [arrow_schema("events").empty_table()]
        self._rows["names"] = [arrow_schema("names").empty_table(), *names]

    def forget_parts(self, through: int) -> None:
        """Leave parts with numbers up to ``through`` out of ``parts``: a ring deleted them."""
        for table in KEYFRAMED_TABLES:
            if table in self._numbers:
                self._numbers[table] = [number for number in self._numbers[table] if number > through]

    def append(self, tables: Mapping[str, pa.Table], columns: PartColumns) -> None:
        """Add rows to the current part.

        Args:
            tables: the rows as Arrow tables.
            columns: the same rows as numpy columns, for the keyframe of the next part.
        """
        if self._keyframe is None and "events" in tables and tables["events"].num_rows:
            self._begin_part()
        for name, rows in tables.items():
            if rows.num_rows == 0:
                continue
            self._rows.setdefault(name, []).append(rows)
            if name == "events":
                self.num_events += rows.num_rows
                self.rows_in_part += rows.num_rows
        self._live.advance(columns)

    def flush(self) -> int | None:
        """Write the current part; return its number, None where there was nothing to write.

        Raises:
            OSError: the disk does not take it.
        """
        if not self._rows:
            return None
        number = self._number
        for name in _IN_ORDER:
            content = self._encode(name)
            if content is not None:
                written = None if self.on_table_written is None else partial(self.on_table_written, name)
                self.write_file(self._folder / part_name(name, number), memoryview(content), written)
                self._numbers.setdefault(name, []).append(number)
        self._begin_nothing()
        pa.default_memory_pool().release_unused()  # Arrow keeps some 20 MiB of what encoding took otherwise
        self._number += 1
        return number

    def _begin_part(self) -> None:
        self._keyframe = _Keyframe(self._live.keyframe(), self._live.order_ns)

    def _begin_nothing(self) -> None:
        self._rows.clear()
        self._keyframe = None
        self.rows_in_part = 0

    def _encode(self, table: str) -> pa.Buffer | None:
        """Return the file of a table in the current part; None where it has no rows there."""
        if table == "live":
            if self._keyframe is None:
                return None
            rows = [encode_codes("live", self._keyframe.columns, self._devices)]
            metadata = {ORDER_KEY: str(self._keyframe.order_ns).encode()}
        elif (appended := self._rows.pop(table, None)) is None:
            return None
        else:
            rows, metadata = appended, {}
        whole = pa.concat_tables(rows, promote_options="default").unify_dictionaries() if len(rows) > 1 else rows[0]
        columns = {} if self._keyframe is None else self._keyframe.columns
        newest_block = self._newest_block
        if table == "events":
            self._newest_block = max(self._newest_block, _largest_block(whole))
        return encode_part(table, whole, newest_block, columns, metadata, self.find_event_forms)

    def abandon(self) -> None:
        """Drop the current part after an error, with those of its files that are written already."""
        self._begin_nothing()
        for name, numbers in self._numbers.items():
            if numbers and numbers[-1] == self._number:
                numbers.pop()
                with suppress(OSError):  # without its events, readers ignore the rest of the part
                    (self._folder / part_name(name, self._number)).unlink(missing_ok=True)


def encode_part(
    table: str,
    rows: pa.Table,
    newest_block: int,
    keyframe: Mapping[str, Array],
    metadata: Mapping[bytes, bytes],
    find_event_forms: FindEventForms | None = None,
) -> pa.Buffer:
    """Return the file of one table of a part.

    All rows are one row group: fewer calls of Arrow, and what is alike in many steps is compressed once.

    Args:
        table: name of the table.
        rows: its rows in the part.
        newest_block: largest block_id of all rows before the part, -1 where there is none.
        keyframe: columns of the keyframe of the part.
        metadata: metadata of the file.
        find_event_forms: see ``shorten``.
    """
    stored, restoring = shorten(table, rows, newest_block, keyframe, find_event_forms)
    column_of = dict(zip(stored.column_names, stored.columns, strict=True))
    names = [name for name in stored_columns(table) if name in column_of]
    nullable = [name for name in names if column_of[name].null_count]
    schema = stored_schema(table, names, nullable).with_metadata({**metadata, **restoring})
    columns = pa.Table.from_arrays([column_of[name] for name in names], schema=schema)
    content = pa.BufferOutputStream()
    with open_part(content, table, schema) as writer:
        writer.write_table(columns, row_group_size=max(stored.num_rows, 1))
    return content.getvalue()


@dataclass(frozen=True)
class _Keyframe:
    """The live set at the beginning of the current part."""

    columns: dict[str, Array]
    order_ns: int


def _largest_block(events: pa.Table) -> int:
    return max(
        (int(arrays.known_numbers(chunk).max(initial=-1)) for chunk in events.column("block_id").chunks), default=-1
    )
