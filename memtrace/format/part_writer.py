"""Writes the tables of one rank as Parquet parts, each with the keyframe that it begins with.

A part is written under temporary names and renamed into place when it is whole: a killed process leaves a trace that
opens and lacks at most its last flush.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from memtrace.format.encode import encode_codes
from memtrace.format.keyframes import LiveSet, PartColumns
from memtrace.format.manifest import PartRanges, part_ranges
from memtrace.format.part_files import ORDER_KEY, part_name
from memtrace.format.schema import RANK_TABLES, TABLES, arrow_schema

logger = logging.getLogger("memtrace")

PART_ROWS: Final = 131_072
"""Events of a part. A window reads the parts at both of its ends whole, so parts are small against a window of 1 %."""
KEYFRAMED_TABLES: Final = tuple(name for name in TABLES if name not in RANK_TABLES)
"""Tables whose parts a ring deletes: the keyframe of the first part that stays replaces them."""
# Events come last: whoever reads while a part is written finds the names and operators they refer to.
_IN_ORDER: Final = (*(name for name in TABLES if name != "events"), "events")


def open_part(path: Path, table: str, metadata: Mapping[bytes, bytes] | None = None) -> pq.ParquetWriter:
    """Open a Parquet writer for one part of ``table``, with the encodings that the schema names."""
    columns = TABLES[table]
    return pq.ParquetWriter(
        path,
        arrow_schema(table).with_metadata(dict(metadata or {})),
        compression="zstd",
        write_statistics=[column.name for column in columns if column.is_searched] or False,
        use_dictionary=[column.name for column in columns if column.encoding == "dictionary"],
        column_encoding={column.name: "DELTA_BINARY_PACKED" for column in columns if column.encoding == "delta"},
    )


class PartWriter:
    """The parts of one rank: rows are appended as they come, ``flush`` makes them durable.

    Attributes:
        num_events: events appended so far.
        rows_in_part: events appended since the last flush.
        on_table_closed: called in ``flush`` with the name of a table and the temporary file, before it is renamed.
    """

    def __init__(self, folder: Path, devices: Sequence[str]) -> None:
        self.num_events = 0
        self.rows_in_part = 0
        self.on_table_closed: Callable[[str, Path], None] | None = None
        self._folder = folder
        self._devices = devices
        self._open: dict[str, pq.ParquetWriter] = {}
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

    def forget_parts(self, through: int) -> None:
        """Leave parts with numbers up to ``through`` out of ``parts``: a ring deleted them."""
        for table in KEYFRAMED_TABLES:
            if table in self._numbers:
                self._numbers[table] = [number for number in self._numbers[table] if number > through]

    def append(self, tables: Mapping[str, pa.Table], columns: PartColumns) -> None:
        """Add rows to the current part. Raises OSError when the disk does not take them.

        Args:
            tables: the rows as Arrow tables.
            columns: the same rows as numpy columns, for the keyframe of the next part.
        """
        if self.rows_in_part == 0 and "events" in tables and tables["events"].num_rows:
            self._write_keyframe()
        for name, rows in tables.items():
            if rows.num_rows == 0:
                continue
            if name not in self._open:
                self._open[name] = open_part(self._path(name, temporary=True), name)
            self._open[name].write_table(rows)
            if name == "events":
                self.num_events += rows.num_rows
                self.rows_in_part += rows.num_rows
        self._live.advance(columns)

    def flush(self) -> int | None:
        """End the current part and rename it into place; its number, None where there was nothing to write."""
        if not self._open:
            return None
        number = self._number
        for name in _IN_ORDER:
            if name in self._open:
                temporary = self._path(name, temporary=True)
                self._open[name].close()
                if self.on_table_closed is not None:
                    self.on_table_closed(name, temporary)
                temporary.replace(self._path(name, temporary=False))
                self._numbers.setdefault(name, []).append(number)
        self._open.clear()
        self.rows_in_part = 0
        self._number += 1
        return number

    def _write_keyframe(self) -> None:
        rows = encode_codes("live", self._live.keyframe(), self._devices)
        metadata = {ORDER_KEY: str(self._live.order_ns).encode()}
        self._open["live"] = open_part(self._path("live", temporary=True), "live", metadata)
        self._open["live"].write_table(rows)

    def abandon(self) -> None:
        """Remove the current part after an error."""
        for name, writer in self._open.items():
            try:
                writer.close()
            except (OSError, pa.ArrowException):
                logger.debug("closing a part that failed", exc_info=True)
            self._path(name, temporary=True).unlink(missing_ok=True)
        self._open.clear()

    def _path(self, table: str, *, temporary: bool) -> Path:
        name = part_name(table, self._number)
        return self._folder / (f".{name}.tmp" if temporary else name)
