"""Where the rows of a recording go: the parts of one trace, with its ring and its manifest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.format.encode import encode_codes
from memtrace.format.keyframes import PartColumns
from memtrace.format.part_writer import LARGEST_PART_ROWS, PART_ROWS, PartWriter
from memtrace.format.schema import EVENT_KINDS, SPAN_KINDS
from memtrace.recording import arrow
from memtrace.recording.live_status import LiveStatusFile
from memtrace.recording.manifest import ManifestFile
from memtrace.recording.memory_files import MemoryFiles
from memtrace.recording.observers import Observer

if TYPE_CHECKING:
    import pyarrow as pa

    from memtrace.recording.ring import Ring

OUTERMOST: Final = -1
"""Number of the recording that no other recording contains."""
_STEP: Final = SPAN_KINDS.index("step")
_OOM: Final = EVENT_KINDS.index("oom")


@dataclass(frozen=True)
class Rows:
    """Rows that an observer has seen, as Arrow tables and as numpy columns.

    Every recording has steps of its own: in the column ``name`` of its steps is its number.
    """

    tables: dict[str, pa.Table]
    columns: PartColumns

    def of_recording(self, number: int) -> Rows:
        """Return the same rows without the steps of other recordings."""
        spans = self.columns.spans
        if not len(spans["kind"]):
            return self
        is_step = spans["kind"] == _STEP
        is_foreign = is_step & (spans["name"] != number)
        if number == OUTERMOST and not is_foreign.any():
            return self
        kept = {name: values[~is_foreign] for name, values in spans.items()}
        kept["name"] = np.where(kept["kind"] == _STEP, -1, kept["name"])
        tables = {**self.tables, "spans": encode_codes("spans", kept, arrow.DEVICES)}
        return Rows(tables, replace(self.columns, spans=kept))


class TraceSink:
    """The parts of one trace. Its methods are called on the writer's thread, unless they say otherwise.

    Args:
        folder: the folder of the rank.
        manifest: the manifest of the rank, written with every part.
        ring: deletes parts that are no longer needed; None keeps all of them.
        failed: called once with the reason when the trace ends early.
        flush_seconds: a part is written at least this often.
        number: number of the recording, or OUTERMOST.
        unsaved: the parts, where they stay in memory until ``save``, and how to claim the folder then, which returns
            it; None: they go to disk.

    Attributes:
        must_save: whether memory ran out, so that the trace is saved with the next part.
        must_save_at_end: whether it is saved with the last part.
        is_over: set when nothing more is written.
    """

    def __init__(
        self,
        folder: Path,
        manifest: ManifestFile,
        ring: Ring | None,
        failed: Callable[[str], None],
        flush_seconds: float,
        number: int = OUTERMOST,
        unsaved: tuple[MemoryFiles, Callable[[], Path]] | None = None,
    ) -> None:
        self.folder = folder
        self.must_save = self.must_save_at_end = False
        self._unsaved = unsaved
        self._num_saved_events = 0
        self.failed = failed
        self.is_over = threading.Event()
        self._flush_due = 0.0
        self._manifest = manifest
        self._ring = ring
        self._flush_seconds = flush_seconds
        self._number = number
        self._parts = PartWriter(folder, arrow.DEVICES)
        self._parts.on_table_written = self._drop_void_steps
        if unsaved is not None:
            self._parts.write_file = unsaved[0].write
        self._has_void_steps = False
        self._status = LiveStatusFile(folder) if unsaved is None else None

    @property
    def due(self) -> float:
        """Time at which there is something to write next, by ``time.monotonic``."""
        return self._flush_due if self._status is None else min(self._flush_due, self._status.due)

    @property
    def num_events(self) -> int:
        """Events written so far."""
        return self._parts.num_events if self._unsaved is None else self._num_saved_events

    @property
    def rows_wanted(self) -> int:
        """Events after which the current part is written before anything is due.

        Until then the observer keeps what it sees: a program of many small operators fills a part several times a
        second, and waits whenever rows are taken from the observer and written.
        """
        return LARGEST_PART_ROWS - self._parts.rows_in_part

    def steps_numbered_anew(self) -> None:
        """Note that a second step 0 follows, which voids the steps before it; called on the training thread."""
        self._has_void_steps = True

    def write_for(self, observer: Observer) -> None:
        """Use an observer, which shortens the parts."""
        self._parts.find_event_forms = observer.find_event_forms

    def begin(self) -> None:
        """Start the clock of the flushes."""
        self._flush_due = time.monotonic() + self._flush_seconds

    def begin_inside(self, outer: TraceSink, names: Sequence[pa.Table]) -> None:
        """Begin with the live set of ``outer``, whose trace goes on, and with the names known so far."""
        self.begin()
        self._parts.begin_with(outer._parts.live_set.without_steps(), names)
        if self._status is not None:
            self._status.begin_with(outer._parts.live_set)

    def append(self, rows: Rows) -> None:
        """Add rows to the current part."""
        own = rows.of_recording(self._number)
        self._parts.append(own.tables, own.columns)
        if self._status is not None:
            self._status.advance(own.columns)
        self.must_save |= self._unsaved is not None and bool((own.columns.events["kind"] == _OOM).any())

    def write_if_due(self, now_ns: int) -> None:
        """Write the current part if it is large or old enough, and the status for those who watch the recording.

        Args:
            now_ns: the observer's time up to which events have been drained.
        """
        if self._status is not None:
            self._status.write_if_due(self._parts.live_set, self._parts.num_events, now_ns)
        if self.must_save or time.monotonic() >= self._flush_due or self._parts.rows_in_part >= PART_ROWS:
            self.flush()

    def flush(self, *, with_manifest: bool = True) -> None:
        """Write the current part.

        Args:
            with_manifest: write the manifest too; unnecessary for the last part, which the last manifest follows.
        """
        self._flush_due = time.monotonic() + self._flush_seconds
        num_events = self._parts.rows_in_part
        number = self._parts.flush()
        if number is not None and self._ring is not None:
            dropped = self._ring.part_written(number, num_events, self._parts.order_ns)
            if dropped is not None:
                self._parts.forget_parts(dropped)
        if self._unsaved is not None:
            if self.must_save or (self.must_save_at_end and not with_manifest):
                self.save()
        elif number is not None:
            self._update_manifest()
            if with_manifest:
                self._manifest.write(self.folder)

    def _update_manifest(self) -> None:
        if self._ring is not None:
            self._manifest.set_dropped_events(self._ring.dropped_events)
        self._manifest.update(num_events=self._parts.num_events, parts=self._parts.parts)

    def save(self) -> None:
        """Write the parts that are kept in memory to disk, where there is such a trace already.

        Raises:
            MemtraceError: the folder contains something other than a memtrace trace.
            OSError: the disk does not take it.
        """
        if self._unsaved is None:
            return
        files, claim_folder = self._unsaved
        self.must_save = False
        self.folder = claim_folder()
        files.save(self.folder)
        self._num_saved_events = self._parts.num_events
        self._update_manifest()
        self._manifest.write(self.folder)

    def end(self, last_tables: Mapping[str, pa.Table]) -> None:
        """Write what is left; the last manifest follows.

        Args:
            last_tables: tables of what is true at the end.
        """
        self._parts.append(last_tables, PartColumns({}))
        self.flush(with_manifest=False)

    def abandon(self) -> None:
        """Drop the current part after an error."""
        self._parts.abandon()

    def remove_status(self) -> None:
        """Remove the status: the recording has ended."""
        if self._status is not None:
            self._status.remove()

    def _drop_void_steps(self, table: str, temporary: Path) -> None:
        if table == "spans" and self._has_void_steps:
            from memtrace.recording.void_steps import drop_void_steps

            if drop_void_steps(self.folder, temporary):
                self._has_void_steps = False
