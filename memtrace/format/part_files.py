"""The files in the folder of one rank: which parts there are, their footers, and their rows.

Nothing is read before it is asked for, and then only the columns that are asked for. Every error names the file, what
is wrong with it, and what to do.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrace.errors import TraceError
from memtrace.format.live_status import LIVE_STATUS_TEMPORARY
from memtrace.format.manifest import missing_parts, read_manifest
from memtrace.format.regular_file import require_regular_file
from memtrace.format.schema import MANIFEST_NAME, RANK_TABLES, TABLES, arrow_schema, find_column
from memtrace.format.validation import (
    SIZES,
    check_accessed_blocks,
    check_column,
    check_order,
    check_schema,
    check_sizes,
)

if TYPE_CHECKING:
    import pyarrow as pa

ORDER_KEY = b"memtrace.order_ns"
"""Key in the metadata of a file of the table ``live``: the largest time_ns of all events before the part."""
_PART = re.compile(r"(?P<table>[a-z_]+)-(?P<number>\d{5,9})\.parquet", re.ASCII)


def part_name(table: str, number: int) -> str:
    """Return the file name of a part of a table."""
    return f"{table}-{number:05d}.parquet"


class PartFiles:
    """The manifest and the Parquet files ``<table>-<5 digits>.parquet`` in the folder of one rank.

    Attributes:
        path: the folder.
        manifest: its manifest.
        leftovers: files that were being written when the process died.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path / MANIFEST_NAME)
        self.leftovers: list[str] = []
        self._files: dict[str, dict[int, Path]] = {table: {} for table in TABLES}
        for name in sorted(os.listdir(path)):  # noqa: PTH208 (sorting names is quicker than sorting paths)
            match = _PART.fullmatch(name)
            if match and match["table"] in TABLES:
                self._files[match["table"]][int(match["number"])] = path / name
            elif name.endswith(".tmp") and name != LIVE_STATUS_TEMPORARY:
                self.leftovers.append(name)
        if not self.manifest.finished:
            self._drop_unfinished_part()
        self._footers: dict[Path, Any] = {}
        self._checked: dict[str, list[int]] = {}
        options = self.manifest.options
        was_ring_killed = not self.manifest.finished and options is not None and options.last_steps is not None
        # The last manifest of a killed ring can list parts that it has deleted since, their keyframe first.
        self._first = min(self._files["live"], default=0) if was_ring_killed else 0

    def _drop_unfinished_part(self) -> None:
        """Leave out a last part whose events, which are written last, are missing because writing it was cut short."""
        number = max(self._files["live"], default=-1)
        if number in self._files["events"] or self._is_listed("events", number):
            return
        for table, files in self._files.items():
            if number in files and not self._is_listed(table, number):
                self.leftovers.append(files.pop(number).name)

    def _is_listed(self, table: str, number: int) -> bool:
        return any(low <= number <= high for low, high in (self.manifest.parts or {}).get(table, ()))

    def numbers(self, table: str) -> list[int]:
        """Return the numbers of the parts of a table, in order. TraceError where one is missing."""
        if table not in self._checked:
            first = 0 if table in RANK_TABLES else self._first
            present = sorted(number for number in self._files[table] if number >= first)
            self._check(table, present, first)
            self._checked[table] = present
        return self._checked[table]

    def _check(self, table: str, present: list[int], first: int) -> None:
        ranges = (self.manifest.parts or {}).get(table, ())
        num_missing, number = missing_parts(ranges, present, first)
        if table == "events" and num_missing == 0 and present != (keyframes := self.numbers("live")):
            differing = min(set(present) ^ set(keyframes))
            name = part_name("live" if differing in present else "events", differing)
            num_missing, number = 1, differing
            table = name.partition("-")[0]
        if num_missing and number is not None:
            raise TraceError(
                f"{self.path / part_name(table, number)} is missing ({num_missing} part(s) of the table {table} in "
                "all). Copy the whole trace again from where it was recorded."
            )

    def num_rows(self, table: str, number: int) -> int:
        """Return the rows of one part, from its footer."""
        return int(self._footer(table, number).num_rows)

    def order_ns(self, number: int) -> int:
        """Return the largest time of all events before a part, from the footer of its keyframe."""
        metadata = self._footer("live", number).metadata or {}
        try:
            return check_order(int(metadata[ORDER_KEY]))
        except (KeyError, ValueError) as error:
            raise self._damaged(self._files["live"][number], error) from error

    def value_range(self, table: str, number: int, column: str) -> tuple[int, int] | None:
        """Return the smallest and the largest value of a column in one part, from the statistics in its footer.

        None where every value is null, or the part lacks the column.
        """
        footer = self._footer(table, number)
        if column not in footer.schema.names:
            return None
        place = footer.schema.names.index(column)
        lows, highs = [], []
        for group in range(footer.num_row_groups):
            statistics = footer.row_group(group).column(place).statistics
            if statistics is not None and statistics.has_min_max:
                lows.append(int(statistics.min))
                highs.append(int(statistics.max))
        return (min(lows), max(highs)) if lows else None

    def read(self, table: str, number: int, columns: tuple[str, ...]) -> pa.Table:
        """Return columns of a part; one that the part lacks is null in every row."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = self._files[table][number]
        footer = self._footer(table, number)
        present = set(footer.schema.to_arrow_schema().names)

        def read(names: list[str]) -> pa.Table:
            try:
                with pq.ParquetFile(file, metadata=footer) as part:
                    rows = part.read(columns=names, use_threads=False)
                if names and rows.num_rows != footer.num_rows:
                    raise ValueError(f"it has {rows.num_rows:,} rows instead of {footer.num_rows:,}")
                return rows
            except Exception as error:
                raise self._damaged(file, error) from error

        def read_kinds() -> pa.ChunkedArray | None:
            return read(["kind"])["kind"] if "kind" in present else None

        rows = read([name for name in columns if name in present])
        try:
            for name in rows.column_names:
                check_column(find_column(table, name), rows.column(name))
            for name in present.intersection(columns, SIZES):
                check_sizes(rows[name], read_kinds)
            if table == "events" and "block_id" in rows.column_names:
                check_accessed_blocks(rows["block_id"], read_kinds)
        except TraceError as error:
            raise self._foreign(file, error) from error
        schema = arrow_schema(table)
        filled = [
            rows.column(name) if name in present else pa.nulls(footer.num_rows, schema.field(name).type)
            for name in columns
        ]
        return pa.table(filled, list(columns))

    def _footer(self, table: str, number: int) -> Any:
        import pyarrow.parquet as pq

        file = self._files[table][number]
        if file not in self._footers:
            try:
                require_regular_file(file)
                footer = pq.read_metadata(file)
                schema = footer.schema.to_arrow_schema()
            except Exception as error:
                raise self._damaged(file, error) from error
            try:
                check_schema(table, schema, footer.num_rows)
            except TraceError as error:
                raise self._foreign(file, error) from error
            self._footers[file] = footer
        return self._footers[file]

    def _foreign(self, file: Path, error: TraceError) -> TraceError:
        return TraceError(
            f"{file} {error}: it was not written by memtrace, or was damaged or rewritten by another tool. Use the "
            "file as it was recorded."
        )

    def _damaged(self, file: Path, error: Exception) -> TraceError:
        lines = str(error).strip().splitlines()
        reason = lines[0].rstrip(".") if lines else type(error).__name__
        return TraceError(
            f"{file} is damaged ({reason}). Copy the trace again from where it was recorded; if it is damaged there "
            f"too and is in the last part, delete the files of that number and lower the last numbers in "
            f'"parts" of {self.path / MANIFEST_NAME} to open the rest.'
        )
