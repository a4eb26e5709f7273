"""A window of a trace: the events between two rows, preceded by the live set at the first of them.

A window is cut from its surroundings, which are whole parts (or a whole trace in memory). The surroundings know more
about its blocks than the window itself: what was read and freed before it and shortly after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memtrace.errors import TraceError
from memtrace.format import arrays
from memtrace.format.arrays import Array
from memtrace.format.decode import decode_columns, device_names
from memtrace.format.encode import encode_codes, select_rows
from memtrace.format.keyframes import surviving_rows
from memtrace.format.live_segments import LiveSegments
from memtrace.format.manifest import Manifest
from memtrace.format.part_reader import overlapping_spans
from memtrace.format.schema import EVENT_KINDS, RANK_TABLES, SPAN_KINDS, TABLES, arrow_schema
from memtrace.format.sources import SPAN_COLUMNS, STEP_COLUMNS, Source

if TYPE_CHECKING:
    import pyarrow as pa

_ALLOC, _BASELINE, _LIVE = (EVENT_KINDS.index(kind) for kind in ("alloc", "baseline", "live"))
_SEGMENT_KINDS = tuple(
    EVENT_KINDS.index(kind) for kind in ("segment_alloc", "segment_free", "segment_map", "segment_unmap")
)
_STEP = SPAN_KINDS.index("step")
_EVENT_NAMES = tuple(column.name for column in TABLES["events"])


@dataclass(frozen=True)
class WindowBounds:
    """Where a window begins and ends; None is an open end."""

    start_ns: int | None = None
    end_ns: int | None = None
    """The first event at or past this time is outside the window."""
    first_row: int | None = None
    """Row of ``events`` of the surroundings instead of ``start_ns``."""
    end_row: int | None = None
    steps: tuple[int, int] | None = None
    """First and last step, for the note on the window."""

    def __str__(self) -> str:
        if self.steps is not None:
            first, last = self.steps
            return f"step {first}" if first == last else f"steps {first} to {last}"
        if self.first_row is not None or self.end_row is not None:
            return f"events {self.first_row or 0} to {'the end' if self.end_row is None else self.end_row}"
        start = "the beginning" if self.start_ns is None else f"{self.start_ns} ns"
        return f"{start} to {'the end' if self.end_ns is None else f'{self.end_ns} ns'}"


# The columns of events that a window as well as its surroundings need; the others are read once.
_SHARED_COLUMNS = ("time_ns", "kind", "device", "block_id", "op_id")


class MemoizedSource:
    """A source that keeps what a window and its surroundings both read."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._columns: dict[tuple[str, str], list[pa.ChunkedArray]] = {}

    @property
    def manifest(self) -> Manifest:
        """The manifest of the rank."""
        return self._source.manifest

    def num_rows(self, table: str) -> int:
        """Return how many rows ``table`` has."""
        return self._source.num_rows(table)

    def read(self, table: str, columns: tuple[str, ...]) -> list[pa.Table]:
        """Return the parts of ``table`` in order, each with those of ``columns`` that it has."""
        import pyarrow as pa

        if table == "events" and not set(columns) & set(_SHARED_COLUMNS):
            return self._source.read(table, columns)
        missing = tuple(name for name in columns if (table, name) not in self._columns)
        if missing:
            parts, schema = self._source.read(table, missing), arrow_schema(table)
            for name in missing:
                self._columns[table, name] = [
                    part.column(name)
                    if name in part.column_names
                    else pa.chunked_array([pa.nulls(part.num_rows, schema.field(name).type)])
                    for part in parts
                ]
        if not columns:
            return []
        parts_of = zip(*(self._columns[table, name] for name in columns), strict=True)
        return [pa.table(dict(zip(columns, part, strict=True))) for part in parts_of]

    def notes(self) -> list[str]:
        """Return sentences about the files."""
        return self._source.notes()

    def with_manifest(self, manifest: Manifest) -> MemoizedSource:
        """Return the same tables with another manifest."""
        return MemoizedSource(self._source.with_manifest(manifest))

    def read_spans_after(self, number: int) -> tuple[int, list[pa.Table]]:
        """Return the table ``spans``, which is part 0."""
        return 0, self.read("spans", SPAN_COLUMNS) if number < 0 else []

    def part_numbers(self) -> list[int]:
        """Return one number: a window is one part."""
        return [0]

    def part(self, number: int) -> MemoizedSource:
        """Return the source itself."""
        return self

    def read_stored(self, table: str, number: int, columns: tuple[str, ...]) -> list[pa.Table]:
        """Return the table: a window is one part."""
        return self.read(table, columns)

    def order_ns(self, number: int) -> None:
        """Return None: a window is one part."""

    def surroundings(self, start_ns: int | None, end_ns: int | None) -> MemoizedSource:
        """Return the source itself."""
        return self

    def read_steps(self, first: int, last: int) -> list[pa.Table]:
        """Return the table ``spans``."""
        return self.read("spans", STEP_COLUMNS)


class Window:
    """The events of ``around`` within bounds, after rows for all blocks and segments that are live at the first one.

    Attributes:
        around: the surroundings: whole parts, or a whole trace in memory.
        bounds: where the window begins and ends.
        steps: rows of ``spans`` that mark its steps where the surroundings do not.
    """

    def __init__(self, around: Source, bounds: WindowBounds, steps: pa.Table | None = None) -> None:
        self.around = around
        self.bounds = bounds
        self.steps = steps
        self._devices = device_names(around.read("events", ("device",)))
        columns = self._decode("events", "kind", "block_id", "time_ns")
        self._kind, self._block, time = columns["kind"], columns["block_id"], columns["time_ns"]
        num_live = int(around.num_rows("live"))
        first = bounds.first_row if bounds.start_ns is None else _first_at(time, bounds.start_ns)
        end = bounds.end_row if bounds.end_ns is None else _first_at(time, bounds.end_ns)
        self._first = max(first or 0, num_live)
        self._end = max(self._first, len(time) if end is None else end)
        self._before_ns = int(time[: self._first].max()) if self._first else int(time[0]) if len(time) else 0
        self._start_ns = int(time[self._first]) if self._first < len(time) else self._before_ns
        if bounds.start_ns is not None:
            self._start_ns = bounds.start_ns
        self._end_ns = bounds.end_ns
        if self._end_ns is None and self._end < len(time):
            self._end_ns = int(time[self._end])
        # Blocks older than the recording are live before they are first seen.
        later = np.flatnonzero((self._kind[self._end :] == _BASELINE) & (self._block[self._end :] >= 0)) + self._end
        live = surviving_rows(self._kind[: self._first], self._block[: self._first])
        is_older = self._kind[live] == _BASELINE
        self._live_rows = np.concatenate([later, live[is_older], live[~is_older]])
        self._segments: pa.Table | None = None
        self._used_ops: Array | None = None

    @property
    def manifest(self) -> Manifest:
        """The manifest of the rank, with a note on the window."""
        return self.around.manifest.with_notes(f"This is a window of the trace: {self.bounds}.")

    def num_rows(self, table: str) -> int:
        """Return how many rows ``table`` has."""
        return sum(part.num_rows for part in self.read(table, (TABLES[table][0].name,)))

    def notes(self) -> list[str]:
        """Return sentences about the files."""
        return self.around.notes()

    def with_manifest(self, manifest: Manifest) -> Window:
        """Return the same window with another manifest."""
        return Window(self.around.with_manifest(manifest), self.bounds, self.steps)

    def read_spans_after(self, number: int) -> tuple[int, list[pa.Table]]:
        """Return the table ``spans``, which is part 0."""
        return 0, self.read("spans", SPAN_COLUMNS) if number < 0 else []

    def part_numbers(self) -> list[int]:
        """Return one number: a window is one part."""
        return [0]

    def part(self, number: int) -> Window:
        """Return the window itself."""
        return self

    def read_stored(self, table: str, number: int, columns: tuple[str, ...]) -> list[pa.Table]:
        """Return the table: a window is one part."""
        return self.read(table, columns)

    def order_ns(self, number: int) -> None:
        """Return None: a window is one part."""

    def surroundings(self, start_ns: int | None, end_ns: int | None) -> Window:
        """Return the window itself: a window of it is cut from all of it."""
        return self

    def read_steps(self, first: int, last: int) -> list[pa.Table]:
        """Return the table ``spans``."""
        return self.read("spans", STEP_COLUMNS)

    def read(self, table: str, columns: tuple[str, ...]) -> list[pa.Table]:
        """Return ``table`` as few parts, with those of ``columns`` that it has."""
        if table == "events":
            return self._read_events(columns)
        if table == "live":
            return []
        if table in RANK_TABLES:
            is_whole = table == "names" or self._end >= len(self._kind)
            return self.around.read(table, columns) if is_whole else []
        key = {"ops": "op_id", "device_times": "op_id", "labels": "block_id", "counters": "time_ns"}.get(table)
        parts = []
        for part in self.around.read(table, tuple({*columns, *([key] if key else ["start_ns", "duration_ns"])})):
            if table == "spans":
                part = overlapping_spans(part, self._start_ns, self._end_ns)
            else:
                part = self._filter(part, table, key or "")
            parts.append(part.select([name for name in columns if name in part.column_names]))
        if table == "spans" and self.steps is not None:
            parts.append(self.steps.select(list(columns)))
        return parts

    def _filter(self, part: pa.Table, table: str, key: str) -> pa.Table:
        values = arrays.integers([part.column(key)], np.int64)
        if table == "counters":
            inside = values >= self._start_ns
            inside &= values < (np.iinfo(np.int64).max if self._end_ns is None else self._end_ns)
        elif table == "labels":
            blocks = np.concatenate([self._block[self._live_rows], self._block[self._first : self._end]])
            inside = np.isin(values, blocks)
        else:
            inside = np.isin(values, self._ops())
        return select_rows(part, inside)

    def _ops(self) -> Array:
        if self._used_ops is None:
            op = self._decode("events", "op_id")["op_id"]
            self._used_ops = arrays.distinct(np.concatenate([op[self._live_rows], op[self._first : self._end]]))
        return self._used_ops

    def _read_events(self, columns: tuple[str, ...]) -> list[pa.Table]:
        import pyarrow as pa

        parts = self.around.read("events", columns)
        if not parts:
            return []
        whole = pa.concat_tables(parts, promote_options="permissive").unify_dictionaries()
        head = select_rows(whole, self._live_rows)
        time = self._decode("events", "time_ns")["time_ns"][self._live_rows]
        live = {
            "kind": np.where(self._kind[self._live_rows] == _ALLOC, _LIVE, self._kind[self._live_rows]),
            "time_ns": np.minimum(time, self._before_ns),  # of blocks that are first seen later
        }
        replaced = encode_codes("events", live, self._devices)
        for name in set(columns) & set(live):
            head = head.set_column(head.column_names.index(name), name, replaced.column(name))
        segments = self._live_segments().select([name for name in columns if name in head.column_names])
        body = whole.slice(self._first, self._end - self._first)
        tables = [table.select(whole.column_names) for table in (segments, head, body)]
        return [table for table in tables if table.num_rows] or [body.select(whole.column_names)]

    def _live_segments(self) -> pa.Table:
        """Return the segments that are reserved at the first row, as rows of ``events``."""
        if self._segments is None:
            rows = np.flatnonzero(np.isin(self._kind[: self._first], _SEGMENT_KINDS))
            live: Mapping[str, Array] = {name: np.empty(0, np.int64) for name in _EVENT_NAMES}
            if len(rows):
                segments = LiveSegments()
                columns = self._decode("events", *_EVENT_NAMES)
                segments.advance({name: values[rows] for name, values in columns.items()})
                live = segments.columns(_EVENT_NAMES)
            self._segments = encode_codes("events", live, self._devices)
        return self._segments

    def _decode(self, table: str, *names: str) -> dict[str, Array]:
        return decode_columns(table, self.around.read(table, names), names, self._devices)


def _first_at(time: Array, time_ns: int) -> int:
    """Return the first row at or past a time, the number of rows where there is none."""
    late = time >= time_ns
    return int(late.argmax()) if late.any() else len(time)


def find_step_bounds(source: Source, first_step: int | None, last_step: int | None) -> WindowBounds:
    """Return where a window of marked steps begins and ends.

    Args:
        source: the tables of a rank.
        first_step: number of the first step; None: the window begins with the trace.
        last_step: number of the last step, included; None: the window ends with the trace.

    Raises:
        TraceError: the trace has no marked steps, or not this one.
    """
    limits = np.iinfo(np.int64)
    low = limits.min if first_step is None else first_step
    high = limits.max if last_step is None else last_step
    parts = source.read_steps(low, high)
    spans = decode_columns("spans", parts, STEP_COLUMNS, ())
    steps = np.flatnonzero((spans["kind"] == _STEP) & (spans["index"] >= low) & (spans["index"] <= high))
    numbers = spans["index"][steps]
    absent = [step for step in (first_step, last_step) if step is not None and step not in numbers]
    if absent or not len(steps) or low > high:
        raise TraceError(_no_such_step(source, absent[0] if absent else low))
    first, last = int(numbers.min()), int(numbers.max())
    start, end = spans["start_ns"][steps], (spans["start_ns"] + spans["duration_ns"])[steps]
    return WindowBounds(
        None if first_step is None else int(start[numbers == first][0]),
        None if last_step is None else int(end[numbers == last][-1]),
        steps=(first, last),
    )


def _no_such_step(source: Source, step: int) -> str:
    spans = decode_columns("spans", source.read("spans", STEP_COLUMNS), STEP_COLUMNS, ())
    numbers = spans["index"][spans["kind"] == _STEP]
    if not len(numbers):
        return "The trace has no marked steps. Mark them with rec.step() or rec.steps(loader)."
    return f"The trace has no step {step}. It has steps {numbers.min()} to {numbers.max()}."
