"""A trace opened for reading.

    trace = memtrace.load("run.memtrace")
    trace.events.nlargest(10, "size")   # tables are DataFrames, read when first used
    trace.window(900, 910)              # steps 900 to 910, opened without reading the rest

The tables and their columns are those of ``memtrace.format.schema``. What follows from them (blocks, steps, peaks) is
in ``memtrace.analysis``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar

import numpy as np

from memtrace.code_owner import CodeOwner
from memtrace.display import Displayed
from memtrace.errors import TraceError
from memtrace.format.arrays import Array, distinct
from memtrace.format.decode import decode_columns, device_names
from memtrace.format.encode import make_table
from memtrace.format.keyframes import find_sorted
from memtrace.format.manifest import Manifest
from memtrace.format.part_reader import RankFolder, open_folder
from memtrace.format.schema import EVENT_KINDS, SPAN_KINDS, TABLES, arrow_schema
from memtrace.format.sources import SPAN_COLUMNS, MemoryTables, Source
from memtrace.format.storage import AnyPath, StorageError, to_path
from memtrace.format.window import MemoizedSource, Window, WindowBounds, find_step_bounds
from memtrace.frames import Frame
from memtrace.text import to_printable

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

logger = logging.getLogger("memtrace")
P = ParamSpec("P")
T = TypeVar("T")

MAX_KEPT_RANKS: Final = 16
"""Largest number of ranks of which ``each_rank`` keeps what was read and computed."""

_RANK_RESULT: Final = "rank result"
"""The first element of the keys of results of one rank that are kept with its job."""
_WHAT_TO_PASS: Final = "Pass the folder that memtrace.record wrote (*.memtrace), or a file."
_DEVICE_TABLES = tuple(name for name, columns in TABLES.items() if any(column.name == "device" for column in columns))


@dataclass(frozen=True)
class StoredPart:
    """Columns of one part as they are stored."""

    devices: tuple[str, ...]
    """What the columns ``device`` refer to."""
    columns: Mapping[str, Mapping[str, Array]]
    """By table and column."""


class Trace(Displayed):
    """One recording: the tables of one rank, or of several (``rank(n)`` then returns one of them)."""

    def __init__(
        self, path: AnyPath | None, sources: Mapping[int, Source], unreadable: Mapping[int, str] | None = None
    ) -> None:
        self.path = path
        self.unreadable = dict(unreadable or {})
        """Ranks of the folder that cannot be opened, and why; the others are open."""
        self._sources = dict(sources)
        self._columns: dict[tuple[str, str], Array] = {}
        self._block_ids: Array | None = None
        self._frames: dict[int, Frame] = {}
        self._results: dict[tuple[Any, ...], Any] = {}
        self._has_marks = True

    @classmethod
    def from_tables(cls, manifest: Manifest, tables: Mapping[str, pa.Table], path: AnyPath | None = None) -> Trace:
        """Return a trace of one rank from tables in memory; absent tables are empty."""
        return cls(path, {manifest.rank: MemoryTables(manifest, tables)})

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in this trace, in order."""
        return tuple(self._sources)

    def rank(self, number: int) -> Trace:
        """Return the trace of one rank; TraceError where it is absent or cannot be opened."""
        if number in self.unreadable:
            raise TraceError(self.unreadable[number])
        if number not in self._sources:
            ranks = ", ".join(map(str, self.ranks))
            raise TraceError(f"{self._where} has no rank {number}. It has rank {ranks}.")
        if len(self._sources) == 1:
            return self
        return self.cached(Trace._only_rank, number)

    def each_rank(self) -> Iterator[Trace]:
        """Yield the trace of each rank in order.

        Of a job with more than ``MAX_KEPT_RANKS`` ranks, nothing is kept of a rank once the caller has dropped it:
        results of a thousand ranks fit in memory, their events do not.
        """
        for number in self.ranks:
            yield self.rank_to_read(number)

    def rank_to_read(self, number: int) -> Trace:
        """Return the trace of one rank, which this trace keeps unless it has many ranks: see ``each_rank``."""
        return self.rank(number) if len(self._sources) <= MAX_KEPT_RANKS else self.open_rank(number)

    def open_rank(self, number: int) -> Trace:
        """Return the trace of one rank, of which a trace of several ranks keeps nothing."""
        is_alone = len(self._sources) == 1 or number not in self._sources
        return self.rank(number) if is_alone else self._only_rank(number)

    def rank_result(self, number: int, function: Callable[..., T], *args: Hashable) -> T:
        """Return ``function(rank, *args)`` of one rank, computed on the first call and kept with this trace.

        Of many ranks only the results are kept, see ``each_rank``.

        Args:
            number: the rank.
            function: a module-level function of a single-rank trace.
            args: hashable arguments.
        """
        key = (_RANK_RESULT, number, function, args)
        if key not in self._results:
            self._results[key] = function(self.rank_to_read(number), *args)
        result: T = self._results[key]
        return result

    def has_rank_result(self, number: int, function: Callable[..., object], *args: Hashable) -> bool:
        """Return whether ``rank_result`` has its answer."""
        return (_RANK_RESULT, number, function, args) in self._results

    def keep_rank_result(self, number: int, result: object, function: Callable[..., object], *args: Hashable) -> None:
        """Keep what another process computed, so that ``rank_result`` returns it."""
        self._results[_RANK_RESULT, number, function, args] = result

    def without_ranks(self, reasons: Mapping[int, str]) -> Trace:
        """Return the same trace without ranks that cannot be read: they are in ``unreadable``.

        Args:
            reasons: what is wrong with each of these ranks, in a sentence.

        Raises:
            TraceError: no rank is left.
        """
        if not reasons:
            return self
        sources = {number: source for number, source in self._sources.items() if number not in reasons}
        if not sources:
            raise TraceError(next(iter(reasons.values())))
        other = Trace(self.path, sources, {**self.unreadable, **reasons})
        other._has_marks = self._has_marks
        other._results = {key: result for key, result in self._results.items() if key[0] == _RANK_RESULT}
        return other

    def window(
        self,
        first_step: int | None = None,
        last_step: int | None = None,
        *,
        start_ns: int | None = None,
        end_ns: int | None = None,
    ) -> Trace:
        """Return a part of the trace, opened in time and memory proportional to it.

        The blocks that are live at its start come first in ``events``, with kind ``live`` (or ``baseline``) and the
        time of their allocation. Steps keep their numbers. Of several ranks each is cut by its own steps.

        Args:
            first_step: number of the first marked step; None: the window begins with the trace.
            last_step: number of the last marked step, included; None: the window ends with the trace.
            start_ns: time of the first event instead of a step; None: the window begins with the trace.
            end_ns: time of the first event that is outside the window; None: the window ends with the trace.

        Raises:
            TraceError: the trace has no such step; ``memtrace.analysis.step_window`` takes detected steps as well.
            ValueError: both steps and times are given.
        """
        by_steps = first_step is not None or last_step is not None
        if by_steps and (start_ns is not None or end_ns is not None):
            raise ValueError("give steps or times, not both")
        windows: dict[int, Source] = {}
        for rank, source in self._sources.items():
            bounds = WindowBounds(start_ns, end_ns)
            if by_steps:
                try:
                    bounds = find_step_bounds(source, first_step, last_step)
                except TraceError as error:
                    where = f"{self._where}, rank {rank}" if len(self._sources) > 1 else self._where
                    raise TraceError(f"{where}: {error}") from None
            around = source.surroundings(bounds.start_ns, bounds.end_ns)
            windows[rank] = Window(around if around is source else MemoizedSource(around), bounds)
        window = Trace(self.path, windows, self.unreadable)
        if (Trace._read_names, (), ()) in self._results:
            self._share_names(window)
        return window

    def window_of_rows(self, first_row: int, end_row: int, steps: pa.Table | None = None) -> Trace:
        """Return the events from ``first_row`` up to ``end_row`` of a single-rank trace, which is read whole.

        Args:
            first_row: row of ``events``.
            end_row: the row after the last one.
            steps: rows of ``spans`` that mark the window's steps; None: it has the marked steps of the trace.
        """
        bounds = WindowBounds(first_row=first_row, end_row=end_row)
        return Trace(self.path, {self.ranks[0]: Window(self._source, bounds, steps)}, self.unreadable)

    @property
    def surroundings(self) -> Trace | None:
        """What a window of one rank is cut from, which knows more about its blocks; None for a whole trace."""
        return self.cached(Trace._open_surroundings)

    @property
    def part_numbers(self) -> list[int]:
        """Numbers of the parts of a single-rank trace, in order; each can be opened by itself."""
        return self._source.part_numbers()

    def part(self, number: int) -> Trace:
        """Return one part of a single-rank trace: its events, after the blocks that are live when it begins.

        The parts share the texts of the trace, which are read once.
        """
        source = self._source.part(number)
        if source is self._source:
            return self
        part = Trace(self.path, {self.ranks[0]: source}, self.unreadable)
        self._share_names(part)
        return part

    def stored_columns(self, number: int, tables: Mapping[str, tuple[str, ...]]) -> StoredPart:
        """Return columns of one part of a single-rank trace as they are stored; nothing is kept.

        Block ids are those of the file, and the keyframe is only in the table ``live``.

        Args:
            number: one of ``part_numbers``.
            tables: the columns of each table to read.
        """
        parts = {table: self._source.read_stored(table, number, names) for table, names in tables.items()}
        with_device = [part for table, names in tables.items() if "device" in names for part in parts[table]]
        devices = device_names(with_device)
        columns = {table: decode_columns(table, parts[table], names, devices) for table, names in tables.items()}
        return StoredPart(devices, columns)

    def arrow_table(self, table: str) -> pa.Table:
        """Return all columns of a table of a single-rank trace, which is read whole."""
        import pyarrow as pa

        parts = self._source.read(table, tuple(arrow_schema(table).names))
        empty = make_table(table, 0, {})
        return pa.concat_tables([*parts, empty], promote_options="permissive").unify_dictionaries() if parts else empty

    def order_ns(self, number: int) -> int | None:
        """Return the largest time of all events before a part of a single-rank trace; None where it is one part."""
        return self._source.order_ns(number)

    def with_tables(self, tables: Mapping[str, pa.Table], names: Mapping[int, str]) -> Trace:
        """Return a trace in memory of other tables, which refer to the names of this single-rank trace.

        Args:
            tables: the tables, without names.
            names: further names by id.
        """
        other = Trace.from_tables(self.manifest, tables, self.path)
        self._share_names(other)
        texts, stacks = self._names
        other._results[Trace._read_names, (), ()] = ({**texts, **names}, stacks)
        return other

    def spans_after(self, number: int) -> tuple[int, dict[str, Array]]:
        """Return the number of the last part of ``spans``, and the columns of the parts after ``number``.

        Args:
            number: the number that an earlier call returned; -1 for all spans.
        """
        last, parts = self._source.read_spans_after(number)
        return last, decode_columns("spans", parts, SPAN_COLUMNS, ())

    def without_marks(self) -> Trace:
        """Return the same trace of one rank as if no steps were marked: analyses then use detected steps."""
        bare = Trace(self.path, self._sources, self.unreadable)
        bare._has_marks = False
        bare._columns = dict(self._columns)
        bare._block_ids = self._block_ids
        spans = bare.columns("spans", *(column.name for column in TABLES["spans"]))
        kept = spans["kind"] != SPAN_KINDS.index("step")
        bare._columns |= {("spans", name): values[kept] for name, values in spans.items()}
        return bare

    def with_spans(self, more: Mapping[str, Array]) -> Trace:
        """Return the same trace of one rank with more spans, which come first.

        Args:
            more: columns of the table ``spans``; those that are absent are -1.
        """
        other = Trace(self.path, self._sources, self.unreadable)
        self._share_names(other)
        spans = other.columns("spans", *(column.name for column in TABLES["spans"]))
        num_rows = len(next(iter(more.values())))
        other._columns |= {
            ("spans", name): np.concatenate([more.get(name, np.full(num_rows, -1)), values]).astype(values.dtype)
            for name, values in spans.items()
        }
        return other

    @property
    def manifest(self) -> Manifest:
        """The manifest of the rank."""
        return self._source.manifest

    @property
    def rank_folder(self) -> RankFolder | None:
        """The files of a single rank that is read whole; None for a window, and for tables in memory."""
        return self._source if isinstance(self._source, RankFolder) and self._has_marks else None

    @property
    def folder(self) -> Path | None:
        """The folder on disk of a single rank that is read whole; None for a window, a URL, and tables in memory."""
        path = None if self.rank_folder is None else self.rank_folder.path
        return path if isinstance(path, Path) else None

    @property
    def file_notes(self) -> list[str]:
        """Sentences about missing and incomplete files."""
        unreadable = [f"rank {number} is left out: {why}" for number, why in self.unreadable.items()]
        return [*self._source.notes(), *unreadable]

    @property
    def has_times(self) -> bool:
        """Whether times and durations are those of the program.

        They are not where a file has no times and numbers its entries, and in a recording of fake tensors, whose
        operators compute nothing: durations are unknown then.
        """
        return self.manifest.coverage.has_times and not self.has_fake_tensors

    @property
    def has_fake_tensors(self) -> bool:
        """Whether the trace is a recording of fake tensors, which have sizes but no memory."""
        return self.cached(Trace._finds_fake_tensors)

    @property
    def has_blocks(self) -> bool:
        """Whether the blocks are the program's. A file of totals has one block per category instead."""
        return self.manifest.coverage.has_blocks

    # -- columns, for the analysis ---------------------------------------------------------------------------

    def num_rows(self, table: str) -> int:
        """Return how many rows a table has."""
        return self._source.num_rows(table)

    def columns(self, table: str, *names: str) -> dict[str, Array]:
        """Return columns of a table as numpy arrays, read on first use and kept.

        Integers have -1 for null. Columns with a vocabulary are int8 codes into the tuples of ``schema``, ``device``
        into ``devices``, -1 for null. Booleans are False for null. Block and operator ids are int32 where they fit.
        Where block ids are sparse (a window, a ring recording), ``block_id`` is the block's place in ``block_ids``.
        """
        missing = [name for name in names if (table, name) not in self._columns]
        if missing:
            parts = self._source.read(table, tuple(missing))
            decoded = decode_columns(table, parts, missing, self.devices if "device" in missing else ())
            for name, values in decoded.items():
                self._columns[table, name] = self._densify(table, values) if name == "block_id" else values
        return {name: self._columns[table, name] for name in names}

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that have events, segments or counters: cpu first, then by name and number."""
        return self.cached(Trace._read_devices)

    @property
    def block_ids(self) -> Array | None:
        """The blocks' ids, ascending, where they are sparse; None where they count from 0."""
        self.columns("events", "block_id")
        return self._block_ids

    def cached(self, function: Callable[Concatenate[Trace, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return ``function(self, *args, **kwargs)``, computed on the first call and kept with the trace.

        Args:
            function: a module-level function; together with its arguments it is the key.
            args: hashable arguments.
            kwargs: hashable arguments.
        """
        key = (function, args, tuple(sorted(kwargs.items())))
        if key not in self._results:
            begin_s = time.perf_counter()
            self._results[key] = function(self, *args, **kwargs)
            logger.debug("%s in %s: %.3f s", function.__name__, function.__module__, time.perf_counter() - begin_s)
        result: T = self._results[key]
        return result

    def name(self, identity: int) -> str | None:
        """Return the text of an id of the table names; None for -1 and for a name that was never written.

        Unprintable characters are replaced, here and in ``frames``: the text can go to a terminal.
        """
        texts, _ = self._names
        text = texts.get(identity)
        return None if text is None else to_printable(text)

    def name_ids(self, text: str) -> list[int]:
        """Return the ids of a text in the table names; several kinds of names can share one."""
        texts, _ = self._names
        return [identity for identity, known in texts.items() if known == text]

    def frames(self, stack: int) -> list[Frame]:
        """Return the frames of a stack, innermost first; empty for -1 and for a stack that was never written."""
        return [self.frame(identity) for identity in self.frame_ids(stack)]

    def frame(self, identity: int) -> Frame:
        """Return a frame by its id in the table names; KeyError where it was never written."""
        if identity not in self._frames:
            self._frames[identity] = Frame.from_text(self._names[0][identity])
        return self._frames[identity]

    def frame_ids(self, stack: int) -> list[int]:
        """Return the frames of a stack, innermost first, as ids of the table names."""
        texts, stacks = self._names
        return [identity for identity in stacks.get(stack, ()) if identity in texts]

    @property
    def code_owner(self) -> CodeOwner:
        """Tells whose code the frames of the trace are."""
        return self.cached(Trace._find_code_owner)

    # -- tables, for people ----------------------------------------------------------------------------------

    @property
    def events(self) -> pd.DataFrame:
        """One row per event: the columns of ``schema.TABLES['events']``, null as NA."""
        return self._frame_of("events")

    @property
    def ops(self) -> pd.DataFrame:
        """One row per operator call: the columns of ``schema.TABLES['ops']``, null as NA."""
        return self._frame_of("ops")

    @property
    def spans(self) -> pd.DataFrame:
        """Steps, phases, module calls, waits and ranges: the columns of ``schema.TABLES['spans']``."""
        return self._frame_of("spans")

    @property
    def labels(self) -> pd.DataFrame:
        """Categories and names that the program gives to blocks: the columns of ``schema.TABLES['labels']``."""
        return self._frame_of("labels")

    @property
    def segments(self) -> pd.DataFrame:
        """Segments of the CUDA allocator at the end: the columns of ``schema.TABLES['segments']``, null as NA."""
        return self._frame_of("segments")

    @property
    def counters(self) -> pd.DataFrame:
        """Totals counted by the allocator and the driver: the columns of ``schema.TABLES['counters']``."""
        return self._frame_of("counters")

    @property
    def device_times(self) -> pd.DataFrame:
        """Operator calls timed by the device: the columns of ``schema.TABLES['device_times']``."""
        return self._frame_of("device_times")

    @property
    def names(self) -> pd.DataFrame:
        """Interned names, frames and stacks: the columns of ``schema.TABLES['names']``."""
        return self._frame_of("names")

    def __repr__(self) -> str:
        return f"<memtrace.Trace {self._where}, rank {', '.join(map(str, self.ranks))}>"

    # -- inside ----------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return str(self.path) if self.path else "the trace"

    @property
    def _source(self) -> Source:
        if len(self._sources) != 1:
            ranks = ", ".join(map(str, self.ranks))
            raise TraceError(
                f"{self._where} has several ranks ({ranks}). Choose one with trace.rank({self.ranks[0]}), or "
                f"--rank {self.ranks[0]} on the command line."
            )
        return next(iter(self._sources.values()))

    def _densify(self, table: str, column: Array) -> Array:
        """Return block ids as places in ``block_ids`` where they are sparse, so that arrays can be indexed by them."""
        if table == "events":
            largest = int(column.max(initial=-1))
            is_sparse = largest >= len(column) // 2 + 1024
            ids = self._block_ids = distinct(column[column >= 0]) if is_sparse else None
        else:
            ids = self.block_ids
        if ids is None:
            return column
        places, found = find_sorted(ids, column)
        return np.where(found, places, -1).astype(np.int32)

    @property
    def _names(self) -> tuple[dict[int, str], dict[int, list[int]]]:
        return self.cached(Trace._read_names)

    def _share_names(self, other: Trace) -> None:
        """Give another trace of the same names what was read of them, and what follows from them."""
        other._results[Trace._read_names, (), ()] = self._names
        other._results[Trace._find_code_owner, (), ()] = self.code_owner

    def _only_rank(self, number: int) -> Trace:
        return Trace(self.path, {number: self._sources[number]}, self.unreadable)

    def _open_surroundings(self) -> Trace | None:
        source = self._source
        if not isinstance(source, Window):
            return None
        around = Trace(self.path, {self.ranks[0]: source.around}, self.unreadable)
        return around if self._has_marks else around.without_marks()

    def _read_devices(self) -> tuple[str, ...]:
        return device_names([part for table in _DEVICE_TABLES for part in self._source.read(table, ("device",))])

    def _finds_fake_tensors(self) -> bool:
        if self.manifest.source.observer != "dispatch":
            return False  # the native observer ignores fake tensors
        events = self.columns("events", "kind", "address")
        # Older blocks are left out: fake tensors of earlier code can still be there.
        return bool((events["address"][events["kind"] == EVENT_KINDS.index("alloc")] < 0).any())

    def _find_code_owner(self) -> CodeOwner:
        texts, stacks = self._names
        frames = {identity for stack in stacks.values() for identity in stack}
        return CodeOwner(
            self.manifest.code, {Frame.from_text(texts[identity]).file for identity in frames & texts.keys()}
        )

    def _read_names(self) -> tuple[dict[int, str], dict[int, list[int]]]:
        texts: dict[int, str] = {}
        stacks: dict[int, list[int]] = {}
        for part in self._source.read("names", ("id", "text", "frames")):
            ids = part.column("id").to_pylist()
            texts.update(_present(zip(ids, part.column("text").to_pylist(), strict=True)))
            if "frames" in part.column_names:
                stacks.update(_present(zip(ids, part.column("frames").to_pylist(), strict=True)))
        return texts, stacks

    def _frame_of(self, table: str) -> pd.DataFrame:
        import pandas as pd
        import pyarrow as pa

        nullable = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.int16(): pd.Int16Dtype()}
        frame: pd.DataFrame = self.arrow_table(table).to_pandas(types_mapper=nullable.get)
        return frame


def load(path: str | AnyPath, *others: str | AnyPath, work_during_read: Callable[[], object] | None = None) -> Trace:
    """Open a trace: a ``*.memtrace`` folder, the folder of one rank, or a file of another tool.

    Args:
        path: the folder or file, or its URL in a storage, such as ``s3://bucket/run.memtrace``. Of a trace in a storage
            only the parts and columns that are asked for are read; a file of another tool is downloaded.
        others: further ones: all of them are the ranks of one job (see ``memtrace.readers.number_ranks``). Files that
            cannot be read are in ``unreadable`` if others can.
        work_during_read: called once while another process reads a file, to use the time.

    Raises:
        TraceError: there is nothing to read, or it is damaged, foreign or of another format version.
    """
    path = to_path(path)
    if others:
        return _load_job([path, *map(to_path, others)], work_during_read)
    if _is_dir(path):
        return Trace(path, *open_folder(path))
    if not path.exists():
        raise TraceError(f"{path} does not exist. {_WHAT_TO_PASS}")
    from memtrace import readers

    ranks = readers.read(path, work_during_read=work_during_read)
    return Trace(path, {rank.manifest.rank: MemoryTables(rank.manifest, rank.tables) for rank in ranks})


def load_rank(path: str | AnyPath, number: int) -> Trace:
    """Open one rank of a trace folder, and none of the others.

    Raises:
        TraceError: the folder does not contain the rank, or it cannot be opened.
    """
    path = to_path(path)
    ranks, _ = open_folder(path / f"rank={number}")
    return Trace(path, ranks)


def _is_dir(path: AnyPath) -> bool:
    try:
        return path.is_dir()
    except StorageError as error:
        raise TraceError(str(error)) from error


def _load_job(paths: list[AnyPath], work_during_read: Callable[[], object] | None) -> Trace:
    from memtrace import readers

    opened: list[tuple[AnyPath, Source | TraceError]] = []
    unreadable: dict[int, str] = {}
    are_folders = [_is_dir(path) for path in paths]
    files = [path for path, is_folder in zip(paths, are_folders, strict=True) if not is_folder]
    for file in files:
        if not file.exists():
            raise TraceError(f"{file} does not exist. {_WHAT_TO_PASS}")
    read = readers.read_each(files, work_during_read=work_during_read)
    for path, is_folder in zip(paths, are_folders, strict=True):
        if is_folder:
            ranks, faults = open_folder(path)
            opened += [(path, rank) for rank in ranks.values()]
            unreadable |= faults
        elif isinstance(answer := next(read), TraceError):
            opened.append((path, answer))
        else:
            opened += [(path, MemoryTables(rank.manifest, rank.tables)) for rank in answer]
    errors = [source for _, source in opened if isinstance(source, TraceError)]
    if len(errors) == len(opened):
        raise errors[0] if errors else TraceError("No file was given. Give at least one file to read.")
    # A file that cannot be read takes part, so that it has a rank and the others keep theirs.
    manifests = readers.number_ranks(
        [(path, Manifest() if isinstance(source, TraceError) else source.manifest) for path, source in opened]
    )
    sources: dict[int, Source] = {}
    for manifest, (_, source) in zip(manifests, opened, strict=True):
        if isinstance(source, TraceError):
            unreadable[manifest.rank] = str(source)
        else:
            sources[manifest.rank] = source.with_manifest(manifest)
    return Trace(None, dict(sorted(sources.items())), {n: why for n, why in unreadable.items() if n not in sources})


def _present(pairs: Iterable[tuple[int, T | None]]) -> Iterable[tuple[int, T]]:
    return ((key, value) for key, value in pairs if value is not None)
