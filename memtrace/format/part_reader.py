"""The files of a trace: the manifest and the Parquet parts of one rank, and a twin that lives in memory.

Nothing is read before it is asked for, and then only the columns that are asked for. Every fault names the file,
what is wrong with it, and the way out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from memtrace.errors import TraceError
from memtrace.format.schema import FORMAT_VERSION, MANIFEST_NAME, TABLES

if TYPE_CHECKING:
    import pyarrow as pa

SURVIVORS_KEY = b"memtrace.survivors_through"
_PART = re.compile(r"(?P<table>[a-z_]+)-(?P<number>\d+)\.parquet")
_REQUIRED = {
    "events": ("time_ns", "kind", "device", "block_id", "size"),
    "ops": ("op_id", "name", "start_ns"),
    "spans": ("kind", "start_ns", "duration_ns"),
    "labels": ("block_id",),
    "names": ("id", "kind", "text"),
    "segments": ("device", "address", "size"),
    "counters": ("time_ns", "device", "name", "value"),
    "device_times": ("op_id", "start_ns", "duration_ns"),
}


class Source(Protocol):
    """The tables of one rank, wherever they come from."""

    manifest: dict[str, Any]

    def num_rows(self, table: str) -> int:
        """How many rows ``table`` has; 0 where it is absent."""
        ...

    def read(self, table: str, columns: tuple[str, ...]) -> list[pa.Table]:
        """The parts of ``table`` in order, each with those of ``columns`` that it has."""
        ...

    def notes(self) -> list[str]:
        """What a reader of the trace should know about its files."""
        ...


class MemoryTables:
    """Tables that are already in memory, as a reader of foreign files makes them."""

    def __init__(self, manifest: dict[str, Any], tables: Mapping[str, pa.Table]) -> None:
        unknown = sorted(set(tables) - set(TABLES))
        if unknown:
            raise ValueError(f"not a table of a trace: {', '.join(unknown)} (tables: {', '.join(TABLES)})")
        self.manifest = manifest
        self._tables = dict(tables)

    def num_rows(self, table: str) -> int:
        """How many rows ``table`` has; 0 where it is absent."""
        return self._tables[table].num_rows if table in self._tables else 0

    def read(self, table: str, columns: tuple[str, ...]) -> list[pa.Table]:
        """The table, as one part."""
        if table not in self._tables:
            return []
        whole = self._tables[table]
        return [whole.select([name for name in columns if name in whole.column_names])]

    def notes(self) -> list[str]:
        """Nothing: there are no files."""
        return []


class RankFolder:
    """The folder of one rank: ``manifest.json`` and Parquet parts ``<table>-<5 digits>.parquet``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path / MANIFEST_NAME)
        self._leftovers: list[str] = []
        self._parts: dict[str, list[Path]] = {}
        numbers: dict[str, dict[int, Path]] = {table: {} for table in TABLES}
        for file in sorted(path.iterdir()):
            match = _PART.fullmatch(file.name)
            if match and match["table"] in TABLES:
                numbers[match["table"]][int(match["number"])] = file
            elif file.name.endswith(".tmp"):
                self._leftovers.append(file.name)
        self._numbers = numbers

    def num_rows(self, table: str) -> int:
        """How many rows ``table`` has, by the parts' footers."""
        return sum(self._footer(file).metadata.num_rows for file in self._valid_parts(table))

    def read(self, table: str, columns: tuple[str, ...]) -> list[pa.Table]:
        """The parts of ``table`` in order, each with those of ``columns`` that it has."""
        return [self._read_part(file, table, columns) for file in self._valid_parts(table)]

    def notes(self) -> list[str]:
        """Parts that were being written when the process died."""
        if not self._leftovers:
            return []
        return [f"{', '.join(self._leftovers)}: being written when the recording stopped, ignored"]

    def _valid_parts(self, table: str) -> list[Path]:
        """The parts that count: those replaced by a ring's survivors left out; those the manifest names are there."""
        if table not in self._parts:
            numbers = self._numbers[table]
            first = max((self._survivors_through(file) for file in numbers.values()), default=0)
            missing = [
                number for number in _declared_parts(self.manifest, table) if number >= first and number not in numbers
            ]
            # A ring that was killed had dropped parts that its last manifest still names.
            if missing and (self.manifest.get("finished") or not self.manifest.get("options", {}).get("last_steps")):
                name = f"{table}-{missing[0]:05d}.parquet"
                raise TraceError(
                    f"{self.path / name} is missing ({len(missing)} part(s) of the table {table} in all). "
                    "Copy the trace again from where it was recorded, whole."
                )
            self._parts[table] = [numbers[number] for number in sorted(numbers) if number >= first]
        return self._parts[table]

    def _survivors_through(self, file: Path) -> int:
        metadata = self._footer(file).schema_arrow.metadata or {}
        return int(metadata.get(SURVIVORS_KEY, b"0"))

    def _footer(self, file: Path) -> Any:
        import pyarrow.parquet as pq

        try:
            return pq.ParquetFile(file)
        except Exception as error:
            raise self._damaged(file, error) from error

    def _read_part(self, file: Path, table: str, columns: tuple[str, ...]) -> pa.Table:
        part = self._footer(file)
        present = part.schema_arrow.names
        lacking = [name for name in _REQUIRED[table] if name not in present]
        if lacking:
            raise TraceError(
                f"{file} lacks the column {lacking[0]} of the table {table}: it was not written by memtrace, "
                "or was rewritten by another tool. Use the file as it was recorded."
            )
        try:
            return part.read(columns=[name for name in columns if name in present])
        except Exception as error:
            raise self._damaged(file, error) from error

    def _damaged(self, file: Path, error: Exception) -> TraceError:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        return TraceError(
            f"{file} is damaged ({reason}). Copy the trace again from where it was recorded; if it is damaged "
            f'there too and is the last part of its table, delete it and set "finished" to false in '
            f"{self.path / MANIFEST_NAME} to open the rest."
        )


def _declared_parts(manifest: dict[str, Any], table: str) -> list[int]:
    """The numbers of the parts that the manifest says a table has; empty where it does not say."""
    parts = manifest.get("parts")
    numbers = parts.get(table) if isinstance(parts, dict) else None
    return [number for number in numbers if isinstance(number, int)] if isinstance(numbers, list) else []


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest at ``path``; TraceError where it is absent, unreadable, foreign or of a newer format."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TraceError(f"{path} is missing: {path.parent} is not the folder of a memtrace rank.") from None
    except (OSError, ValueError) as error:
        raise TraceError(
            f"{path} cannot be read ({error}). Copy the trace again from where it was recorded."
        ) from error
    if not isinstance(manifest, dict) or manifest.get("format") != "memtrace":
        raise TraceError(f'{path} is not the manifest of a memtrace trace (no "format": "memtrace").')
    version = manifest.get("format_version")
    if not isinstance(version, int):
        raise TraceError(f"{path} names no format_version. Copy the trace again from where it was recorded.")
    if version > FORMAT_VERSION:
        raise TraceError(
            f"{path} has format version {version}, written by memtrace {manifest.get('memtrace_version')}; this "
            f"memtrace reads up to version {FORMAT_VERSION}. Install a newer memtrace."
        )
    return manifest


def open_folder(path: Path) -> tuple[dict[int, RankFolder], dict[int, str]]:
    """The ranks of a trace folder (``rank=N`` inside), or of the folder of one rank; and why others cannot be opened.

    TraceError where none can.
    """
    if (path / MANIFEST_NAME).exists():
        folders = [path]
    else:
        folders = sorted(folder for folder in path.glob("rank=*") if folder.is_dir())
    if not folders:
        raise TraceError(
            f"{path} is not a memtrace trace: it holds neither rank=0, rank=1, ... nor {MANIFEST_NAME}. "
            "Give the folder that memtrace.record wrote (*.memtrace)."
        )
    # A rank that died, or whose disk was full, before it wrote anything is missing; it does not spoil the others.
    begun = [folder for folder in folders if (folder / MANIFEST_NAME).exists()]
    attempts = [(_named_rank(folder, number), _attempt(folder)) for number, folder in enumerate(begun or folders)]
    opened = [folder for _, folder in attempts if isinstance(folder, RankFolder)]
    faults = {number: fault for number, fault in attempts if isinstance(fault, TraceError)}
    if not opened:
        raise next(iter(faults.values()))
    ranks = {_rank_of(folder): folder for folder in opened}
    if len(ranks) < len(opened):
        raise TraceError(f"{path}: two folders are of the same rank. Keep one recording a folder.")
    return dict(sorted(ranks.items())), {number: str(fault) for number, fault in sorted(faults.items())}


def _attempt(path: Path) -> RankFolder | TraceError:
    try:
        return RankFolder(path)
    except TraceError as fault:
        return fault


def _named_rank(folder: Path, otherwise: int) -> int:
    """The rank that a folder's name says."""
    named = re.fullmatch(r"rank=(\d+)", folder.name)
    return int(named[1]) if named else otherwise


def _rank_of(folder: RankFolder) -> int:
    named = _named_rank(folder.path, 0)
    rank = folder.manifest.get("rank", named)
    if not isinstance(rank, int) or _named_rank(folder.path, rank) != rank:
        raise TraceError(
            f"{folder.path / MANIFEST_NAME} says rank {rank}, its folder says {folder.path.name}: "
            "the parts of two ranks were mixed. Copy the trace again from where it was recorded."
        )
    return rank
