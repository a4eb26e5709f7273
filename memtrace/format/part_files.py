"""The files in the folder of one rank: which parts there are, their footers, and their rows.

Nothing is read before it is asked for, and then only the columns that are asked for. Every error names the file, what
is wrong with it, and what to do.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memtrace.errors import TraceError
from memtrace.format.live_status import LIVE_STATUS_TEMPORARY
from memtrace.format.manifest import Manifest, missing_parts, read_manifest
from memtrace.format.range_file import RangeFile
from memtrace.format.regular_file import require_regular_file
from memtrace.format.schema import MANIFEST_NAME, RANK_TABLES, TABLES, arrow_schema, find_column
from memtrace.format.storage import AnyPath, Entry, StorageError, StoragePath, map_requests
from memtrace.format.stored import StoredRows, sources
from memtrace.format.validation import (
    MAX_PART_ROWS,
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


WHOLE_BYTES: Final = 256 << 10
"""Files of a storage up to this size are read whole: a second request takes longer."""
TAIL_BYTES: Final = 64 << 10
"""Bytes at the end of a larger file that are read for its footer."""
MAX_TAILS: Final = 256
"""Ends of files, and whole small files, that are kept."""
MAX_NAMED_PARTS: Final = 1 << 20
"""Most parts that the manifest may name where the storage lists no files."""


def part_name(table: str, number: int) -> str:
    """Return the file name of a part of a table."""
    return f"{table}-{number:05d}.parquet"


def parse_part_name(name: str) -> tuple[str, int] | None:
    """Return the table and the number of a part by its file name; None for another file."""
    match = _PART.fullmatch(name)
    return (match["table"], int(match["number"])) if match and match["table"] in TABLES else None


class RemoteFiles:
    """The files of one rank in a storage: each is read in ranges, and its end, with the footer, only once.

    Args:
        entries: the files in the listing of the folder, by name.
    """

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)
        self._tails: OrderedDict[str, bytes] = OrderedDict()

    def open(self, file: StoragePath) -> RangeFile:
        """Open a file."""
        entry = self._entries.get(file.name)
        if entry is None or entry.size_bytes is None:
            entry = self._entries[file.name] = file.entry()
        size_bytes = entry.size_bytes
        if size_bytes is None:
            content = file.read_bytes()
            return RangeFile(file, len(content), content)
        tail = self._tails.get(file.name)
        if tail is None:
            length = size_bytes if size_bytes <= WHOLE_BYTES else min(TAIL_BYTES, size_bytes)
            tail = self._tails[file.name] = file.read_range(size_bytes - length, size_bytes)
            while len(self._tails) > MAX_TAILS:
                self._tails.popitem(last=False)
        return RangeFile(file, size_bytes, tail)


class PartFiles:
    """The manifest and the Parquet files ``<table>-<5 digits>.parquet`` in the folder of one rank.

    Args:
        path: the folder, on disk or in a storage.
        entries: the listing of a folder in a storage; None: it is listed here.

    Attributes:
        path: the folder.
        manifest: its manifest.
        leftovers: files that were being written when the process died.
    """

    def __init__(self, path: AnyPath, entries: Mapping[str, Entry] | None = None) -> None:
        self.path = path
        if isinstance(path, StoragePath) and entries is None:
            entries = path.list_folder()[0] if path.is_listed else {}
        self._entries = entries = entries or {}
        self.manifest = read_manifest(path / MANIFEST_NAME, entries.get(MANIFEST_NAME))
        self._remote = RemoteFiles(entries)
        self.leftovers: list[str] = []
        self._files: dict[str, dict[int, AnyPath]] = {table: {} for table in TABLES}
        for name in sorted(_file_names(path, entries, self.manifest)):  # sorting names is quicker than sorting paths
            part = parse_part_name(name)
            if part is not None:
                self._files[part[0]][part[1]] = path / name
            elif name.endswith(".tmp") and name != LIVE_STATUS_TEMPORARY:
                self.leftovers.append(name)
        if not self.manifest.finished:
            self._drop_unfinished_part()
        self._footers: dict[AnyPath, tuple[Any, set[str]]] = {}
        """The metadata of files, and the names of their columns."""
        self._valid_schemas: dict[str, pa.Schema] = {}
        self._checked: dict[str, list[int]] = {}
        options = self.manifest.options
        was_ring_killed = not self.manifest.finished and options is not None and options.last_steps is not None
        # The last manifest of a killed ring can list parts that it has deleted since, their keyframe first.
        self._first = min(self._files["live"], default=0) if was_ring_killed else 0

    def listed_file(self, name: str) -> Entry | None:
        """Return a file of a folder in a storage as it was listed; None where the listing lacks it."""
        return self._entries.get(name)

    def read_ahead(self) -> None:
        """Read the small files of a folder in a storage, several at a time, so that no table waits for an answer.

        Nothing is read of a folder on disk. What cannot be read is reported when it is needed.
        """
        if isinstance(self.path, StoragePath):
            sizes = {name: entry.size_bytes for name, entry in self._entries.items() if parse_part_name(name)}
            small = [self.path / name for name, size in sizes.items() if size is not None and size <= WHOLE_BYTES]
            with suppress(OSError):
                map_requests(self._remote.open, small[:MAX_TAILS], self.path)

    def states(self) -> dict[str, Entry]:
        """Return the state of the manifest and of every part: as it is now, or in a storage when it was opened."""
        if isinstance(self.path, StoragePath):
            return {name: entry for name, entry in self._entries.items() if _is_of_trace(name)}
        states: dict[str, Entry] = {}
        with os.scandir(self.path) as files:
            for file in files:
                if _is_of_trace(file.name):
                    status = file.stat(follow_symlinks=False)
                    states[file.name] = Entry(status.st_size, str(status.st_mtime_ns))
        return states

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

    def read_footers(self, table: str, numbers: Sequence[int]) -> None:
        """Read the footers of some parts of a table, several at a time where they are in a storage."""
        if isinstance(self.path, StoragePath):
            map_requests(lambda number: self._footer(table, number), numbers, self.path)

    def read_parts(self, table: str, numbers: Sequence[int], columns: tuple[str, ...]) -> list[pa.Table]:
        """Return columns of some parts of a table, which are read several at a time where they are in a storage."""
        return map_requests(lambda number: self.read(table, number, columns), numbers, self.path)

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
        opened = [self._open_checked(table, number)] if file not in self._footers and isinstance(file, Path) else []
        footer, present = self._checked_footer(table, number)
        metadata = footer.metadata or {}

        def read(names: list[str]) -> pa.Table:
            try:
                with (
                    opened.pop()
                    if opened
                    else pq.ParquetFile(
                        self._open(file), metadata=footer, pre_buffer=isinstance(file, StoragePath)
                    ) as part
                ):
                    rows = part.read(columns=names, use_threads=False)
                if names and rows.num_rows != footer.num_rows:
                    raise ValueError(f"it has {rows.num_rows:,} rows instead of {footer.num_rows:,}")
                return rows
            except Exception as error:
                raise self._damaged(file, error) from error

        def read_kinds() -> pa.ChunkedArray | None:
            kinds = stored.column("kind")
            return kinds if kinds is not None or "kind" not in present else read(["kind"])["kind"]

        stored_names = [name for column in columns for name in sources(table, column, present, metadata)]
        rows = read(list(dict.fromkeys(stored_names)))
        stored = StoredRows(table, rows, metadata, lambda names: self.read("live", number, names))
        schema = arrow_schema(table)
        restored = []
        try:
            for name in columns:
                values = self._restore(stored, name, file)
                if values is not None:
                    check_column(find_column(table, name), values)
                    if name in SIZES:
                        check_sizes(values, read_kinds)
                    if (table, name) == ("events", "block_id"):
                        check_accessed_blocks(values, read_kinds)
                restored.append(pa.nulls(footer.num_rows, schema.field(name).type) if values is None else values)
        except TraceError as error:
            raise self._foreign(file, error) from error
        return pa.table(restored, list(columns))

    def _restore(self, stored: StoredRows, name: str, file: AnyPath) -> pa.ChunkedArray | None:
        try:
            return stored.column(name)
        except (KeyError, ValueError, OverflowError) as error:
            raise self._damaged(file, error) from error

    def forget_footer(self, table: str, number: int) -> None:
        """Forget the footer of a file that is not read again soon: those of a long trace take more memory than a part.

        Nothing happens where the file does not exist.
        """
        file = self._files[table].get(number)
        if file is not None:
            self._footers.pop(file, None)

    def _footer(self, table: str, number: int) -> Any:
        return self._checked_footer(table, number)[0]

    def _checked_footer(self, table: str, number: int) -> tuple[Any, set[str]]:
        known = self._footers.get(self._files[table][number])
        if known is None:
            self._open_checked(table, number).close()
            known = self._footers[self._files[table][number]]
        return known

    def _open_checked(self, table: str, number: int) -> Any:
        """Open a file, whose columns are checked and whose footer is kept."""
        import pyarrow.parquet as pq

        file = self._files[table][number]
        try:
            if isinstance(file, Path):
                require_regular_file(file)
            part = pq.ParquetFile(self._open(file))
            footer, schema = part.metadata, part.schema_arrow
        except Exception as error:
            raise self._damaged(file, error) from error
        try:
            # The parts of a table have one schema.
            known = self._valid_schemas.get(table)
            if known is None or not schema.equals(known) or footer.num_rows > MAX_PART_ROWS:
                check_schema(table, schema, footer.num_rows)
                self._valid_schemas[table] = schema
        except TraceError as error:
            part.close()
            raise self._foreign(file, error) from error
        self._footers[file] = footer, set(schema.names)
        return part

    def _open(self, file: AnyPath) -> Path | RangeFile:
        return file if isinstance(file, Path) else self._remote.open(file)

    def _foreign(self, file: AnyPath, error: TraceError) -> TraceError:
        return TraceError(
            f"{file} {error}: it was not written by memtrace, or was damaged or rewritten by another tool. Use the "
            "file as it was recorded."
        )

    def _damaged(self, file: AnyPath, error: Exception) -> TraceError:
        if isinstance(error, StorageError):
            return TraceError(str(error))
        lines = str(error).strip().splitlines()
        reason = lines[0].rstrip(".") if lines else type(error).__name__
        return TraceError(
            f"{file} is damaged ({reason}). Copy the trace again from where it was recorded; if it is damaged there "
            f"too and is in the last part, delete the files of that number and lower the last numbers in "
            f'"parts" of {self.path / MANIFEST_NAME} to open the rest.'
        )


def _is_of_trace(name: str) -> bool:
    return name == MANIFEST_NAME or parse_part_name(name) is not None


def _file_names(path: AnyPath, entries: Mapping[str, Entry], manifest: Manifest) -> list[str]:
    """Return the names of the files of a rank; where a storage lists none, those that the manifest names."""
    if isinstance(path, Path):
        return os.listdir(path)  # noqa: PTH208 (names are all that is needed)
    if path.is_listed:
        return list(entries)
    ranges = [(table, low, high) for table, parts in (manifest.parts or {}).items() for low, high in parts]
    if sum(high - low + 1 for _, low, high in ranges) > MAX_NAMED_PARTS:
        raise TraceError(
            f"{path / MANIFEST_NAME} names too many parts. Copy the trace again from where it was recorded."
        )
    return [part_name(table, number) for table, low, high in ranges for number in range(low, high + 1)]
