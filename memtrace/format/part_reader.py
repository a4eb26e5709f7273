"""Reads the parts of a rank: all of them, or a run of parts that begins with a keyframe."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.errors import TraceError
from memtrace.format import arrays
from memtrace.format.arrays import Array
from memtrace.format.encode import select_rows
from memtrace.format.keyframes import find_rows
from memtrace.format.manifest import Manifest, read_manifest
from memtrace.format.part_files import PartFiles
from memtrace.format.schema import MANIFEST_NAME, OP_PREFIX, RANK_TABLES, TABLES, arrow_schema
from memtrace.format.sources import SPAN_COLUMNS, STEP_COLUMNS
from memtrace.format.storage import AnyPath, Entry, StorageError, StoragePath, list_folders, map_requests

if TYPE_CHECKING:
    import pyarrow as pa

MAX_UNLISTED_RANKS: Final = 1 << 14
"""Most ranks of a trace in a storage that lists no folders."""
_RANK: Final = "rank="
_OP_COLUMNS = tuple(column.name for column in TABLES["ops"])
_LIVE_COLUMNS = tuple(column.name for column in TABLES["live"])


class PartRange:
    """The parts of a rank from one number to another, both included; the keyframe of the first part comes first.

    The keyframe's rows are the first rows of ``events``; their operator calls and labels are in ``ops`` and ``labels``.
    """

    def __init__(self, files: PartFiles, first: int | None = None, last: int | None = None) -> None:
        numbers = files.numbers("events")
        self._files = files
        self._manifest = files.manifest
        self._is_whole = first is None
        self._first = numbers[0] if first is None and numbers else first or 0
        self._last = numbers[-1] if last is None and numbers else last or 0
        self._keyframe: pa.Table | None = None
        self._ops_parts: list[int] | None = None

    @property
    def manifest(self) -> Manifest:
        """The manifest of the rank."""
        return self._manifest

    def num_rows(self, table: str) -> int:
        """Return how many rows ``table`` has."""
        if table == "live":
            return int(self._live().num_rows)
        if not self._is_whole and table in ("ops", "spans"):
            return sum(int(part.num_rows) for part in self.read(table, (TABLES[table][0].name,)))
        numbers = self._numbers(table)
        self._files.read_footers(table, numbers)
        rows = sum(self._files.num_rows(table, number) for number in numbers)
        return rows + sum(int(part.num_rows) for part in self._from_keyframe(table, (TABLES[table][0].name,)))

    def read(self, table: str, columns: tuple[str, ...]) -> list[pa.Table]:
        """Return the parts of ``table`` in order, each with those of ``columns`` that it has."""
        if table == "live":
            return [self._live().select(list(columns))]
        if table == "spans" and not self._is_whole:
            return self._read_spans(columns)
        head = self._from_keyframe(table, columns)
        return head + self._files.read_parts(table, self._numbers(table), columns)

    def notes(self) -> list[str]:
        """Return a note on the parts that were being written when the process died."""
        if not self._files.leftovers:
            return []
        return [f"{', '.join(self._files.leftovers)}: not complete when the recording stopped, ignored"]

    def with_manifest(self, manifest: Manifest) -> PartRange:
        """Return the same parts with another manifest."""
        other = PartRange(self._files, *(() if self._is_whole else (self._first, self._last)))
        other._manifest = manifest
        return other

    def surroundings(self, start_ns: int | None, end_ns: int | None) -> PartRange:
        """Return the parts from the one with the first event at or past ``start_ns`` to that at or past ``end_ns``."""
        numbers = self._files.numbers("events")
        if not numbers:
            return self

        def part_of(time_ns: int) -> int:
            # The first event at or past a time lies in the last part before which all times are smaller.
            return numbers[max(0, bisect_left(numbers, time_ns, key=self._files.order_ns) - 1)]

        first = numbers[0] if start_ns is None else part_of(start_ns)
        last = numbers[-1] if end_ns is None else part_of(end_ns)
        return PartRange(self._files, first, max(first, last)).with_manifest(self._manifest)

    def read_spans_after(self, number: int) -> tuple[int, list[pa.Table]]:
        """Return the number of the last part of ``spans``, and the rows of the parts after ``number``."""
        numbers = self._files.numbers("spans")
        later = self._files.read_parts("spans", [part for part in numbers if part > number], SPAN_COLUMNS)
        return max([number, *numbers]), later

    def part_numbers(self) -> list[int]:
        """Return the numbers of the parts of ``events``, in order."""
        numbers = self._files.numbers("events")
        return numbers if self._is_whole else [number for number in numbers if self._first <= number <= self._last]

    def part(self, number: int) -> PartRange:
        """Return one part, opened by its keyframe."""
        return PartRange(self._files, number, number).with_manifest(self._manifest)

    def read_stored(self, table: str, number: int, columns: tuple[str, ...]) -> list[pa.Table]:
        """Return the rows of ``table`` that were written with one part, without what its keyframe stands for."""
        if number not in self._files.numbers(table):
            return []
        rows = self._files.read(table, number, columns)
        self._files.forget_footer(table, number)
        return [rows]

    def order_ns(self, number: int) -> int:
        """Return the largest time of all events before a part."""
        order_ns = self._files.order_ns(number)
        self._files.forget_footer("live", number)
        return order_ns

    def read_steps(self, first: int, last: int) -> list[pa.Table]:
        """Return the parts of ``spans`` with steps from ``first`` to ``last``.

        Steps are written in order, so a binary search over the statistics finds the first of these parts.
        """
        numbers = self._files.numbers("spans")
        start = bisect_left(range(len(numbers)), first, key=lambda place: self._last_step(numbers[: place + 1]))
        parts = []
        for number in numbers[start:]:
            steps = self._files.value_range("spans", number, "index")
            if steps is not None and steps[0] > last:
                break
            if steps is not None:
                parts.append(self._files.read("spans", number, STEP_COLUMNS))
        return parts

    def _last_step(self, numbers: list[int]) -> int:
        """Return the number of the last step in some parts of ``spans``, -1 where they have none."""
        ranges = (self._files.value_range("spans", number, "index") for number in reversed(numbers))
        return next((steps[1] for steps in ranges if steps is not None), -1)

    def _numbers(self, table: str) -> list[int]:
        numbers = self._files.numbers(table)
        if self._is_whole or table == "names":
            return numbers
        if table in RANK_TABLES:  # what is true at the end of the trace
            return numbers if self._last == self._files.numbers("events")[-1] else []
        inside = [number for number in numbers if self._first <= number <= self._last]
        return inside if table != "ops" else self._with_referenced_ops(inside)

    def _live(self) -> pa.Table:
        if self._keyframe is None:
            has_keyframe = self._first in self._files.numbers("live")
            self._keyframe = (
                self._files.read("live", self._first, _LIVE_COLUMNS)
                if has_keyframe
                else arrow_schema("live").empty_table()
            )
        return self._keyframe

    def _from_keyframe(self, table: str, columns: tuple[str, ...]) -> list[pa.Table]:
        """Return the rows of ``table`` that the keyframe stands for, where there are any."""
        if table not in ("events", "ops", "labels") or not self._live().num_rows:
            return []
        rows = {"events": events_of_keyframe, "ops": ops_of_keyframe, "labels": labels_of_keyframe}[table](self._live())
        return [rows.select([name for name in columns if name in rows.column_names])] if rows.num_rows else []

    def _read_spans(self, columns: tuple[str, ...]) -> list[pa.Table]:
        """Return the spans that overlap the parts. A span is written when it ends, so it can be in any later part."""
        numbers = self._files.numbers("events")
        is_first, is_last = self._first == numbers[0], self._last == numbers[-1]
        start_ns = None if is_first else self._files.order_ns(self._first)
        end_ns = None if is_last else self._files.order_ns(numbers[numbers.index(self._last) + 1])
        parts = []
        # Spans are drained no later than one part before the events inside them.
        later = [number for number in self._files.numbers("spans") if number >= self._first - 1]
        self._files.read_footers("spans", later)
        for number in later:
            starts = self._files.value_range("spans", number, "start_ns")
            if end_ns is None or (starts is not None and starts[0] <= end_ns):
                part = self._files.read("spans", number, tuple({*columns, "start_ns", "duration_ns"}))
                parts.append(overlapping_spans(part, start_ns, end_ns).select(list(columns)))
        return parts

    def _with_referenced_ops(self, inside: list[int]) -> list[int]:
        """Add the parts of ``ops`` with calls that events refer to: those that returned later, or are shared."""
        if self._ops_parts is None:
            missing = arrays.distinct(_integers(self.read("events", ("op_id",)), "op_id"))
            missing = missing[missing >= 0]
            parts = self._from_keyframe("ops", ("op_id",))
            parts += [self._files.read("ops", number, ("op_id",)) for number in inside]
            missing = _without(missing, _integers(parts, "op_id"))
            others = [number for number in self._files.numbers("ops") if number not in inside]
            # Calls that were in flight at the end of the last part are in one of the next.
            for number in sorted(others, key=lambda number: (number < self._last, number)):
                ids = self._files.value_range("ops", number, "op_id") if len(missing) else None
                if ids is not None and ids[0] <= missing[-1] and missing[0] <= ids[1]:
                    left = _without(missing, _integers([self._files.read("ops", number, ("op_id",))], "op_id"))
                    if len(left) < len(missing):
                        inside = sorted([*inside, number])
                    missing = left
            self._ops_parts = inside
        return self._ops_parts


class RankFolder(PartRange):
    """All parts in the folder of one rank."""

    def __init__(self, path: AnyPath, entries: Mapping[str, Entry] | None = None) -> None:
        super().__init__(PartFiles(path, entries))
        self.path = path

    def read_ahead(self) -> None:
        """Read the small files of a folder in a storage at the same time; see ``PartFiles.read_ahead``."""
        self._files.read_ahead()

    def states(self) -> dict[str, Entry]:
        """Return the state of each file of the trace; see ``PartFiles.states``."""
        return self._files.states()

    def listed_file(self, name: str) -> Entry | None:
        """Return a file of a folder in a storage as it was listed; None where the listing lacks it."""
        return self._files.listed_file(name)


def events_of_keyframe(live: pa.Table) -> pa.Table:
    """Return the rows of ``events`` that begin the live set."""
    return live.select([column.name for column in TABLES["events"] if column.name in live.column_names])


def ops_of_keyframe(live: pa.Table) -> pa.Table:
    """Return the operator calls that allocated the live blocks, as far as they had returned."""
    import pyarrow as pa

    ids = _integers([live], "op_id")
    prefixed = [OP_PREFIX + name for name in _OP_COLUMNS[1:]]
    is_known = np.zeros(len(ids), bool)
    for name in prefixed:
        column = live.column(name)
        # recompute is never null, and says nothing of a call that is not known.
        if not pa.types.is_boolean(column.type):
            is_known |= ~np.concatenate([np.empty(0, bool), *(_nulls(chunk) for chunk in column.chunks)])
    known = np.flatnonzero(is_known & (ids >= 0))
    _, first = np.unique(ids[known], return_index=True)
    rows = select_rows(live.select(["op_id", *prefixed]), known[first])
    return rows.rename_columns(list(_OP_COLUMNS))


def labels_of_keyframe(live: pa.Table) -> pa.Table:
    """Return the labels of the live blocks: two rows where the name is from another label than the category."""
    import pyarrow as pa

    blocks = select_rows(live, _integers([live], "block_id") >= 0)
    schema = arrow_schema("labels")

    def rows(category: str, name: pa.Array | pa.ChunkedArray) -> pa.Table:
        return pa.Table.from_arrays([blocks.column("block_id"), blocks.column(category), name], schema=schema)

    both = [rows("name_category", blocks.column("name")), rows("category", pa.nulls(blocks.num_rows, pa.int32()))]
    return pa.concat_tables([select_rows(table, _has_label(table)) for table in both]).unify_dictionaries()


def _has_label(labels: pa.Table) -> Array:
    is_null = [
        np.concatenate([np.empty(0, bool), *(_nulls(chunk) for chunk in labels.column(name).chunks)])
        for name in ("category", "name")
    ]
    has_label: Array = ~(is_null[0] & is_null[1])
    return has_label


def overlapping_spans(spans: pa.Table, start_ns: int | None, end_ns: int | None) -> pa.Table:
    """Return the spans that overlap a window of time; None is an open end."""
    start = _integers([spans], "start_ns")
    end = start + _integers([spans], "duration_ns")
    inside = np.ones(len(start), bool)
    if start_ns is not None:
        inside &= (end > start_ns) | (start >= start_ns)
    if end_ns is not None:
        inside &= start < end_ns
    return select_rows(spans, inside)


def _nulls(chunk: pa.Array) -> Array:
    if not chunk.null_count:
        return np.zeros(len(chunk), bool)
    bits = np.frombuffer(chunk.buffers()[0], np.uint8)
    nulls: Array = ~np.unpackbits(bits, count=chunk.offset + len(chunk), bitorder="little")[chunk.offset :].astype(bool)
    return nulls


def _integers(parts: list[pa.Table], name: str) -> Array:
    return arrays.integers([part.column(name) for part in parts], np.int64)


def _without(values: Array, others: Array) -> Array:
    _, present = find_rows(others, values)
    absent: Array = values[~present]
    return absent


def open_folder(path: AnyPath) -> tuple[dict[int, RankFolder], dict[int, str]]:
    """Open the ranks of a trace folder (``rank=N`` inside), or the folder of one rank, on disk or in a storage.

    Returns:
        The ranks that can be opened, and for each of the others why not.

    Raises:
        TraceError: none can be opened.
    """
    try:
        folders = _find_rank_folders(path)
    except StorageError as error:
        raise TraceError(str(error)) from error
    if not folders:
        raise TraceError(
            f"{path} is not a memtrace trace: it contains neither rank=0, rank=1, ... nor {MANIFEST_NAME}. "
            "Pass the folder that memtrace.record wrote (*.memtrace)."
        )
    # A rank that died, or whose disk was full, before it wrote anything is missing; the others open all the same.
    chosen = [folder for folder in folders if folder.has_begun] or folders
    results = map_requests(_try_to_open, chosen, path)
    numbers = [_rank_in_name(folder.path, number) for number, folder in enumerate(chosen)]
    attempts = list(zip(numbers, results, strict=True))
    opened = [folder for _, folder in attempts if isinstance(folder, RankFolder)]
    faults = {number: fault for number, fault in attempts if isinstance(fault, TraceError)}
    if not opened:
        raise next(iter(faults.values()))
    ranks = {_rank_of(folder): folder for folder in opened}
    if len(ranks) < len(opened):
        raise TraceError(f"{path}: two folders belong to the same rank. Keep one recording per folder.")
    return dict(sorted(ranks.items())), {number: str(fault) for number, fault in sorted(faults.items())}


@dataclass(frozen=True)
class _FoundRank:
    """A folder that may be that of a rank."""

    path: AnyPath
    has_begun: bool
    """Whether it has a manifest."""
    entries: Mapping[str, Entry] | None = None
    """Its listing, in a storage."""


def _find_rank_folders(path: AnyPath) -> list[_FoundRank]:
    """Return the folders of the ranks at ``path``: the folder itself if it has a manifest."""
    if isinstance(path, Path):
        if (path / MANIFEST_NAME).exists():
            return [_FoundRank(path, has_begun=True)]
        folders = sorted(folder for folder in path.glob("rank=*") if folder.is_dir())
        return [_FoundRank(folder, (folder / MANIFEST_NAME).exists()) for folder in folders]
    if not path.is_listed:
        return _find_unlisted_ranks(path)
    files, names = path.list_folder()
    if MANIFEST_NAME in files:
        return [_FoundRank(path, has_begun=True, entries=files)]
    ranks = [name for name in names if name.startswith(_RANK)]
    listings = list_folders(path, _RANK, ranks)
    return [
        _FoundRank(path / name, MANIFEST_NAME in entries, entries)
        for name, entries in zip(ranks, listings, strict=True)
    ]


def _find_unlisted_ranks(path: StoragePath) -> list[_FoundRank]:
    """Return the folders of the ranks in a storage that lists no folders: rank 0 knows how many there are."""
    if (path / MANIFEST_NAME).is_file():
        return [_FoundRank(path, has_begun=True)]
    first = path / "rank=0"
    if not (first / MANIFEST_NAME).is_file():
        return []
    world_size = min(read_manifest(first / MANIFEST_NAME).world_size, MAX_UNLISTED_RANKS)
    ranks = [path / f"rank={number}" for number in range(world_size)]
    exist = map_requests(lambda folder: (folder / MANIFEST_NAME).is_file(), ranks, path)
    return [_FoundRank(folder, has_begun=True) for folder, exists in zip(ranks, exist, strict=True) if exists]


def _try_to_open(folder: _FoundRank) -> RankFolder | TraceError:
    try:
        return RankFolder(folder.path, folder.entries)
    except TraceError as fault:
        return fault
    except StorageError as error:
        return TraceError(str(error))


def _rank_in_name(folder: AnyPath, otherwise: int) -> int:
    named = re.fullmatch(r"rank=(\d+)", folder.name)
    return int(named[1]) if named else otherwise


def _rank_of(folder: RankFolder) -> int:
    rank = folder.manifest.rank
    if _rank_in_name(folder.path, rank) != rank:
        raise TraceError(
            f"{folder.path / MANIFEST_NAME} names rank {rank}, its folder is {folder.path.name}: the parts of two "
            "ranks were mixed. Copy the trace again from where it was recorded."
        )
    return rank
