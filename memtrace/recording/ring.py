"""Keeps the parts of the last steps of a long recording and drops the older ones.

A block that outlives its part must not be lost with it: when a part is dropped, the allocations whose blocks are still
live at its end move, with their operator calls and labels, into the place of the part after it, which then carries
``memtrace.survivors_through`` in its metadata. Readers ignore parts of that table with a smaller number.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from memtrace.format import schema
from memtrace.recording import arrow

SURVIVORS_KEY = "memtrace.survivors_through"


def _isin(column: pa.ChunkedArray, values: pa.ChunkedArray) -> pa.ChunkedArray:
    return pc.is_in(column, value_set=values.combine_chunks())


def _survivors(events: pa.Table) -> pa.Table:
    """The rows that a reader of what follows needs: beginnings of blocks still live, and what became of segments."""
    kinds = pc.cast(events["kind"], pa.string())
    ended = events["block_id"].filter(pc.equal(kinds, "free"))
    began = pc.is_in(kinds, value_set=arrow.strings(["alloc", "baseline"]))
    live = pc.and_(began, pc.invert(_isin(events["block_id"], ended)))
    return events.filter(pc.or_(live, pc.starts_with(kinds, "segment_")))


class Ring:
    """Drops parts that ended before the last ``last_steps`` steps began."""

    def __init__(self, folder: Path, last_steps: int) -> None:
        self._folder = folder
        self._last_steps = last_steps
        self._step_starts: deque[int] = deque(maxlen=last_steps + 1)
        self._parts: deque[int] = deque()
        self.dropped_events = 0

    def step_began(self, start_ns: int) -> None:
        """Tell of a new step; called on the training thread."""
        self._step_starts.append(start_ns)

    def forget_steps(self) -> None:
        """The steps told so far were none."""
        self._step_starts.clear()

    def part_written(self, index: int) -> None:
        """Tell of a new part and drop those that are no longer needed."""
        self._parts.append(index)
        while len(self._parts) > 2 and self._is_past(self._parts[1]):
            self._drop(self._parts.popleft(), into=self._parts[0])

    def _is_past(self, index: int) -> bool:
        if len(self._step_starts) <= self._last_steps:
            return False
        path = self._path("events", index)
        if not path.exists():
            return True
        times = pq.read_table(path, columns=["time_ns"])["time_ns"]
        return bool(times[-1].as_py() < self._step_starts[0])

    def _path(self, table: str, index: int) -> Path:
        return self._folder / f"{table}-{index:05d}.parquet"

    def _read(self, table: str, index: int) -> pa.Table:
        path = self._path(table, index)
        return pq.read_table(path) if path.exists() else schema.arrow_schema(table).empty_table()

    def _drop(self, index: int, into: int) -> None:
        """Replace part ``into`` by what survives of it and of part ``index``, then delete ``index``."""
        merged = {
            name: pa.concat_tables([self._read(name, index), self._read(name, into)]).unify_dictionaries()
            for name in ("events", "ops", "labels")
        }
        events = merged["events"]
        kept = _survivors(events)
        self.dropped_events += events.num_rows - kept.num_rows
        survivors = {
            "events": kept,
            "ops": merged["ops"].filter(_isin(merged["ops"]["op_id"], kept["op_id"].drop_null())),
            "labels": merged["labels"].filter(_isin(merged["labels"]["block_id"], kept["block_id"].drop_null())),
        }
        for name, rows in survivors.items():
            self._replace(name, into, rows)
        for name in ("events", "ops", "labels", "spans"):
            self._path(name, index).unlink(missing_ok=True)
        self._path("spans", into).unlink(missing_ok=True)

    def _replace(self, table: str, index: int, rows: pa.Table) -> None:
        from memtrace.recording.writer import open_part

        temporary = self._folder / f".{table}-{index:05d}.parquet.tmp"
        with open_part(temporary, table, {SURVIVORS_KEY: str(index)}) as writer:
            writer.write_table(rows.cast(schema.arrow_schema(table)))
        temporary.replace(self._path(table, index))
