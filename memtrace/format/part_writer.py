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

from memtrace.format.encode import encode_codes
from memtrace.format.files import replace_file
from memtrace.format.keyframes import LiveSet, PartColumns
from memtrace.format.manifest import PartRanges, part_ranges
from memtrace.format.part_files import ORDER_KEY, part_name
from memtrace.format.schema import RANK_TABLES, TABLES, arrow_schema

PART_ROWS: Final = 131_072
"""Events of a part. A window reads the parts at both of its ends whole, so parts are small against a window of 1 %."""
KEYFRAMED_TABLES: Final = tuple(name for name in TABLES if name not in RANK_TABLES)
"""Tables whose parts a ring deletes: the keyframe of the first part that stays replaces them."""
# Events come last: whoever reads while a part is written finds the names and operators they refer to.
_IN_ORDER: Final = (*(name for name in TABLES if name != "events"), "events")


def open_part(target: Any, table: str, metadata: Mapping[bytes, bytes] | None = None) -> pq.ParquetWriter:
    """Open a Parquet writer for one part of ``table``, with the encodings that the schema names.

    Args:
        target: a path, or an output stream of pyarrow.
        table: name of the table.
        metadata: metadata of the file.
    """
    columns = TABLES[table]
    return pq.ParquetWriter(
        target,
        arrow_schema(table).with_metadata(dict(metadata or {})),
        compression="zstd",
        write_statistics=[column.name for column in columns if column.is_searched] or False,
        use_dictionary=[column.name for column in columns if column.encoding == "dictionary"],
        column_encoding={column.name: "DELTA_BINARY_PACKED" for column in columns if column.encoding == "delta"},
    )


@dataclass
class _OpenTable:
    """The file of one table in the current part, in memory."""

    content: pa.BufferOutputStream
    writer: pq.ParquetWriter


class PartWriter:
    """The parts of one rank: rows are appended as they come, ``flush`` makes them durable.

    Attributes:
        num_events: events appended so far.
        rows_in_part: events appended since the last flush.
        on_table_written: called in ``flush`` with the name of a table and its temporary file, before it is renamed.
    """

    def __init__(self, folder: Path, devices: Sequence[str]) -> None:
        self.num_events = 0
        self.rows_in_part = 0
        self.on_table_written: Callable[[str, Path], None] | None = None
        self._folder = folder
        self._devices = devices
        self._open: dict[str, _OpenTable] = {}
        self._number = 0
        self._numbers: dict[str, list[int]] = {}
        self._live = LiveSet()

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
        self._write_keyframe()
        for name in ("events", "names"):
            self._open_table(name)
        for rows in names:
            self._open["names"].writer.write_table(rows)

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
        if "live" not in self._open and "events" in tables and tables["events"].num_rows:
            self._write_keyframe()
        for name, rows in tables.items():
            if rows.num_rows == 0:
                continue
            if name not in self._open:
                self._open_table(name)
            self._open[name].writer.write_table(rows)
            if name == "events":
                self.num_events += rows.num_rows
                self.rows_in_part += rows.num_rows
        self._live.advance(columns)

    def flush(self) -> int | None:
        """Write the current part; return its number, None where there was nothing to write.

        Raises:
            OSError: the disk does not take it.
        """
        if not self._open:
            return None
        number = self._number
        for name in _IN_ORDER:
            if name in self._open:
                table = self._open[name]
                table.writer.close()
                content = memoryview(table.content.getvalue())
                written = None if self.on_table_written is None else partial(self.on_table_written, name)
                replace_file(self._folder / part_name(name, number), content, written)
                self._numbers.setdefault(name, []).append(number)
        self._open.clear()
        self.rows_in_part = 0
        self._number += 1
        return number

    def _write_keyframe(self) -> None:
        rows = encode_codes("live", self._live.keyframe(), self._devices)
        metadata = {ORDER_KEY: str(self._live.order_ns).encode()}
        self._open_table("live", metadata)
        self._open["live"].writer.write_table(rows)

    def _open_table(self, name: str, metadata: Mapping[bytes, bytes] | None = None) -> None:
        content = pa.BufferOutputStream()
        self._open[name] = _OpenTable(content, open_part(content, name, metadata))

    def abandon(self) -> None:
        """Drop the current part after an error, with those of its files that are written already."""
        self._open.clear()
        for name, numbers in self._numbers.items():
            if numbers and numbers[-1] == self._number:
                numbers.pop()
                with suppress(OSError):  # without its events, readers ignore the rest of the part
                    (self._folder / part_name(name, self._number)).unlink(missing_ok=True)
