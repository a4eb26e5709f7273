"""A recording opened for reading.

    trace = memtrace.load("run.memtrace")
    trace.events.nlargest(10, "size")   # tables are DataFrames, read when first used

The tables and their columns are those of ``memtrace.format.schema``. What follows from them (blocks, steps, peaks) is
in ``memtrace.analysis``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import numpy as np

from memtrace.errors import TraceError
from memtrace.format import arrays
from memtrace.format.arrays import Array
from memtrace.format.part_reader import MemoryTables, Source, open_folder
from memtrace.format.schema import CATEGORIES, COUNTERS, EVENT_KINDS, NAME_KINDS, PHASES, SPAN_KINDS, TABLES
from memtrace.frames import Frame

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

P = ParamSpec("P")
T = TypeVar("T")

_VOCABULARIES = {
    ("events", "kind"): EVENT_KINDS,
    ("ops", "phase"): PHASES,
    ("spans", "kind"): SPAN_KINDS,
    ("labels", "category"): CATEGORIES,
    ("counters", "name"): COUNTERS,
    ("names", "kind"): NAME_KINDS,
}
_OF_DEVICES = ("events", "segments", "counters", "device_times")
_IDENTITIES = {("events", "block_id"), ("events", "op_id"), ("ops", "op_id"), ("labels", "block_id")}
_DTYPES: dict[str, type[np.signedinteger[Any]]] = {"int64": np.int64, "int32": np.int32, "int16": np.int16}


class Trace:
    """One recording: the tables of one rank, or of several (then ``rank(n)`` gives one)."""

    def __init__(
        self, path: Path | None, sources: Mapping[int, Source], unreadable: Mapping[int, str] | None = None
    ) -> None:
        self.path = path
        self.unreadable = dict(unreadable or {})
        """Ranks of the folder that could not be opened, and why; they do not spoil the others."""
        self._sources = dict(sources)
        self._columns: dict[tuple[str, str], Array] = {}
        self._block_ids: Array | None = None
        self._results: dict[Hashable, Any] = {}

    @classmethod
    def from_tables(cls, manifest: dict[str, Any], tables: Mapping[str, pa.Table], path: Path | None = None) -> Trace:
        """A trace of one rank from tables in memory; tables that are absent count as empty."""
        return cls(path, {int(manifest.get("rank", 0)): MemoryTables(manifest, tables)})

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks in this trace, in order."""
        return tuple(self._sources)

    def rank(self, number: int) -> Trace:
        """The trace of one rank; TraceError where it is not there."""
        if number in self.unreadable:
            raise TraceError(self.unreadable[number])
        if number not in self._sources:
            held = ", ".join(map(str, self.ranks))
            raise TraceError(f"{self._where} has no rank {number}: it holds rank {held}.")
        if len(self._sources) == 1:
            return self
        return self.cached(Trace._only_rank, number)

    def without_marks(self) -> Trace:
        """The same trace of one rank as if no steps had been marked: analyses take those found in the events."""
        bare = Trace(self.path, self._sources, self.unreadable)
        bare._columns = dict(self._columns)
        bare._block_ids = self._block_ids
        spans = bare.columns("spans", *(column.name for column in TABLES["spans"]))
        kept = spans["kind"] != SPAN_KINDS.index("step")
        bare._columns |= {("spans", name): values[kept] for name, values in spans.items()}
        return bare

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest of the rank."""
        return self._source.manifest

    @property
    def file_notes(self) -> list[str]:
        """What the files themselves tell about what is missing."""
        unread = [f"rank {number} is left out: {why}" for number, why in self.unreadable.items()]
        return [*self._source.notes(), *unread]

    @property
    def has_times(self) -> bool:
        """Whether ``time_ns`` is a time. Where a file has none, it numbers the entries, and no duration can be told."""
        return bool(self.manifest.get("coverage", {}).get("has_times", True))

    @property
    def has_blocks(self) -> bool:
        """Whether its blocks are the program's. A file of totals has one a category, made anew at every change."""
        return bool(self.manifest.get("coverage", {}).get("has_blocks", True))

    # -- columns, for the analysis ---------------------------------------------------------------------------

    def num_rows(self, table: str) -> int:
        """How many rows a table has."""
        return self._source.num_rows(table)

    def columns(self, table: str, *names: str) -> dict[str, Array]:
        """Columns of a table as numpy arrays, read on first use and kept.

        Integers have -1 for null; kind, phase and category are int8 codes into the tuples of ``schema``, device
        into ``devices``, -1 for null; ``recompute`` is False for null. Block and operator ids are int32 where they
        fit. Where the blocks' ids are sparse (a long ring recording), ``block`` is their place in ``block_ids``.
        """
        wanted = [name for name in names if (table, name) not in self._columns]
        if wanted:
            self._read(table, wanted)
        return {name: self._columns[table, name] for name in names}

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that have events, segments or counters, cpu first, then by name and number."""

        return self.cached(Trace._read_devices)

    @property
    def block_ids(self) -> Array | None:
        """The blocks' ids in order of first sight where they are sparse; None where they count from 0."""
        self.columns("events", "block_id")
        return self._block_ids

    def cached(self, function: Callable[Concatenate[Trace, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of ``function(self, *args, **kwargs)``, computed on the first call and kept with the trace.

        Args:
            function: a module-level function; together with its arguments it is the key.
            args: hashable arguments.
            kwargs: hashable arguments.
        """
        key = (function, args, tuple(sorted(kwargs.items())))
        if key not in self._results:
            self._results[key] = function(self, *args, **kwargs)
        result: T = self._results[key]
        return result

    def name(self, identity: int) -> str | None:
        """The text of an id of the table names; None for -1 and for a name that was never written."""
        texts, _ = self._names
        return texts.get(identity)

    def frames(self, stack: int) -> list[Frame]:
        """The frames of a stack, innermost first; empty for -1 and for a stack that was never written."""
        texts, stacks = self._names
        return [Frame.from_text(texts[identity]) for identity in stacks.get(stack, ()) if identity in texts]

    # -- tables, for people ----------------------------------------------------------------------------------

    @property
    def events(self) -> pd.DataFrame:
        """One row an event: the columns of ``schema.TABLES['events']``, null as NA."""
        return self._frame_of("events")

    @property
    def ops(self) -> pd.DataFrame:
        """One row an operator call: the columns of ``schema.TABLES['ops']``, null as NA."""
        return self._frame_of("ops")

    @property
    def spans(self) -> pd.DataFrame:
        """Steps, phases, module calls, waits and ranges: the columns of ``schema.TABLES['spans']``."""
        return self._frame_of("spans")

    @property
    def labels(self) -> pd.DataFrame:
        """What the program itself told of its blocks: the columns of ``schema.TABLES['labels']``."""
        return self._frame_of("labels")

    @property
    def segments(self) -> pd.DataFrame:
        """What CUDA's allocator held at the end: the columns of ``schema.TABLES['segments']``, null as NA."""
        return self._frame_of("segments")

    @property
    def counters(self) -> pd.DataFrame:
        """Totals by the allocator's and the driver's count: the columns of ``schema.TABLES['counters']``."""
        return self._frame_of("counters")

    @property
    def device_times(self) -> pd.DataFrame:
        """Operators timed by the device: the columns of ``schema.TABLES['device_times']``."""
        return self._frame_of("device_times")

    @property
    def names(self) -> pd.DataFrame:
        """Interned names, frames and stacks: the columns of ``schema.TABLES['names']``."""
        return self._frame_of("names")

    def __repr__(self) -> str:
        """The path and the ranks."""
        return f"<memtrace.Trace {self._where}, rank {', '.join(map(str, self.ranks))}>"

    # -- inside ----------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        return str(self.path) if self.path else "the trace"

    @property
    def _source(self) -> Source:
        if len(self._sources) != 1:
            held = ", ".join(map(str, self.ranks))
            raise TraceError(
                f"{self._where} holds several ranks ({held}): choose one with trace.rank({self.ranks[0]}), or "
                f"--rank {self.ranks[0]} on the command line."
            )
        return next(iter(self._sources.values()))

    def _read(self, table: str, names: list[str]) -> None:
        parts = self._source.read(table, tuple(names))
        for name in names:
            present = [part.column(name) for part in parts if name in part.column_names]
            if len(present) < len(parts) or not parts:
                column = self._absent(table, name)
            else:
                column = self._convert(table, name, present)
            self._columns[table, name] = column

    def _absent(self, table: str, name: str) -> Array:
        """A column that the trace does not have: null in every row."""
        import pyarrow as pa

        from memtrace.format.schema import arrow_schema

        nulls = pa.nulls(self.num_rows(table), arrow_schema(table).field(name).type)
        return self._convert(table, name, [pa.chunked_array([nulls])])

    def _convert(self, table: str, name: str, parts: list[pa.ChunkedArray]) -> Array:
        if name == "device":
            return arrays.codes(parts, self.devices.index)
        if (table, name) in _VOCABULARIES:
            return arrays.codes(parts, arrays.vocabulary_coder(_VOCABULARIES[table, name], f"{table}.{name}"))
        kind = next(column.type for column in TABLES[table] if column.name == name)
        if kind == "bool":
            return arrays.booleans(parts)
        dtype = arrays.narrowest(parts) if (table, name) in _IDENTITIES else _DTYPES[kind]
        column = arrays.integers(parts, dtype)
        return self._densify(table, column) if name == "block_id" else column

    def _densify(self, table: str, column: Array) -> Array:
        """Block ids as places in ``block_ids`` where they are sparse, so that arrays can be indexed by them."""
        if table == "events":
            largest = int(column.max(initial=-1))
            sparse = largest >= 4 * len(column) + 1024
            ids = self._block_ids = np.unique(column[column >= 0]) if sparse else None
        else:
            ids = self.block_ids
        if ids is None:
            return column
        places = np.searchsorted(ids, column)
        known = (places < len(ids)) & (ids[np.minimum(places, len(ids) - 1)] == column)
        return np.where(known, places, -1).astype(np.int32)

    @property
    def _names(self) -> tuple[dict[int, str], dict[int, list[int]]]:
        return self.cached(Trace._read_names)

    def _only_rank(self, number: int) -> Trace:
        return Trace(self.path, {number: self._sources[number]}, self.unreadable)

    def _read_devices(self) -> tuple[str, ...]:
        parts = [part for table in _OF_DEVICES for part in self._source.read(table, ("device",))]
        return tuple(sorted(arrays.text_values([part.column("device") for part in parts]), key=_natural))

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

        from memtrace.format.schema import arrow_schema

        schema = arrow_schema(table)
        parts = self._source.read(table, tuple(schema.names))
        nullable = {pa.int64(): pd.Int64Dtype(), pa.int32(): pd.Int32Dtype(), pa.int16(): pd.Int16Dtype()}
        whole = pa.concat_tables([*parts, schema.empty_table()], promote_options="permissive")
        frame: pd.DataFrame = whole.unify_dictionaries().to_pandas(types_mapper=nullable.get)
        return frame


def load(path: str | Path, *others: str | Path, work_during_read: Callable[[], None] | None = None) -> Trace:
    """Open a trace: a ``*.memtrace`` folder, the folder of one rank, or a file of another tool.

    Several of them are the ranks of one job (see ``memtrace.readers.number_ranks``). Raises TraceError where there is
    nothing to read, and where what is there is damaged, foreign or too new. ``work_during_read``: see
    ``memtrace.readers.read``.
    """
    path = Path(path)
    if others:
        return _load_job([path, *map(Path, others)], work_during_read)
    if path.is_dir():
        return Trace(path, *open_folder(path))
    if not path.exists():
        raise TraceError(f"{path} does not exist. Give the folder that memtrace.record wrote (*.memtrace), or a file.")
    from memtrace import readers

    ranks = readers.read(path, work_during_read=work_during_read)
    return Trace(path, {rank.manifest["rank"]: MemoryTables(rank.manifest, rank.tables) for rank in ranks})


def _load_job(paths: list[Path], work_during_read: Callable[[], None] | None) -> Trace:
    from memtrace import readers

    found: list[tuple[Path, Source]] = []
    unreadable: dict[int, str] = {}
    for path in paths:
        if path.is_dir():
            folders, faults = open_folder(path)
            found += [(path, folder) for folder in folders.values()]
            unreadable |= faults
        else:
            read_ranks = readers.read(path, work_during_read=work_during_read)
            found += [(path, MemoryTables(rank.manifest, rank.tables)) for rank in read_ranks]
            work_during_read = None
    readers.number_ranks([(path, source.manifest) for path, source in found])
    ranks = {int(source.manifest["rank"]): source for _, source in found}
    return Trace(None, dict(sorted(ranks.items())), {n: why for n, why in unreadable.items() if n not in ranks})


def _present(pairs: Iterable[tuple[int, T | None]]) -> Iterable[tuple[int, T]]:
    return ((key, value) for key, value in pairs if value is not None)


def _natural(device: str) -> tuple[bool, list[tuple[int, str]]]:
    """cpu first; cuda:2 before cuda:10."""
    pieces = re.findall(r"\d+|\D+", device)
    return device != "cpu", [(int(piece) if piece.isdigit() else -1, piece) for piece in pieces]
