"""Writes what an observer sees to the parts of a trace, off the training thread.

A disk that is full or slow, or memory that runs out, never breaks the training: one warning, and the recording ends
with what was written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from memtrace.format import schema
from memtrace.format.keyframes import PartColumns
from memtrace.format.part_writer import PART_ROWS, PartWriter
from memtrace.recording import arrow
from memtrace.recording.background import BackgroundTask
from memtrace.recording.manifest import ManifestFile
from memtrace.recording.observers import Batch, Observer
from memtrace.recording.reserve import AddressSpaceReserve

if TYPE_CHECKING:
    import pyarrow as pa

    from memtrace.recording.cuda import CudaMonitor
    from memtrace.recording.ring import Ring

FLUSH_SECONDS: Final = 5.0


class Writer:
    """Drains an observer on a thread of its own until it is stopped.

    Args:
        observer: what is drained.
        folder: the folder of the rank.
        manifest: the manifest of the rank, written with every part.
        ring: deletes parts that are no longer needed; None keeps all of them.
        failed: called once, on the writer's thread, with the reason when writing ends early.
        reserve: address space for Arrow.
        flush_seconds: a part is written at least this often.
        cuda: source of events and tables of CUDA; None where there is no CUDA.
    """

    def __init__(
        self,
        observer: Observer,
        folder: Path,
        manifest: ManifestFile,
        ring: Ring | None,
        failed: Callable[[str], None],
        reserve: AddressSpaceReserve,
        flush_seconds: float = FLUSH_SECONDS,
        cuda: CudaMonitor | None = None,
    ) -> None:
        self._observer = observer
        self._folder = folder
        self._manifest = manifest
        self._ring = ring
        self._failed = failed
        self._reserve = reserve
        self._flush_seconds = flush_seconds
        self._cuda = cuda
        self._parts = PartWriter(folder, arrow.DEVICES)
        self._parts.on_table_written = self._drop_void_steps
        self._has_void_steps = False
        self._is_stopping = False
        self._task = BackgroundTask(self._run)

    @property
    def num_events(self) -> int:
        """Events written so far."""
        return self._parts.num_events

    def steps_numbered_anew(self) -> None:
        """Note that a second step 0 follows, which voids the steps before it; called on the training thread."""
        self._has_void_steps = True

    def start(self) -> bool:
        """Begin to write; return whether a thread could be started."""
        return self._task.start()

    def stop(self) -> None:
        """Write what is left and end; call after the observer stopped."""
        self._is_stopping = True
        self._observer.wake()
        self._task.finish()

    def abandon(self) -> None:
        """End without writing, because the recording has not begun."""
        self._is_stopping = True
        self._observer.wake()
        self._task.settle()

    def _run(self) -> None:
        try:
            self._write_until_stopped()
        except BaseException as error:  # whatever it is, the program must go on
            self._end_early(error)

    def _end_early(self, error: BaseException) -> None:
        self._reserve.close()  # the warning needs memory, too
        with suppress(Exception):
            self._parts.abandon()
        reason = str(error) or type(error).__name__
        if isinstance(error, MemoryError):
            self._failed(f"out of memory: {reason}")
        else:
            self._failed(f"cannot write to {self._folder}: {reason}")

    def _write_until_stopped(self) -> None:
        due = time.monotonic() + self._flush_seconds
        while not self._must_stop():
            self._observer.wait(max(0.0, min(due - time.monotonic(), self._flush_seconds)))
            if self._must_stop():  # perhaps because the program ran out of memory: the reserve is needed for the end
                break
            self._reserve.release()
            self._drain(at_end=False)
            failure = self._observer.failure()
            is_due = time.monotonic() >= due
            if failure is not None or is_due or self._parts.rows_in_part >= PART_ROWS:
                self._flush()
                due = time.monotonic() + self._flush_seconds
            if not self._must_stop():
                self._reserve.acquire()
            if failure is not None:
                self._failed(failure)
                return
        self._reserve.close()
        self._drain(at_end=True)
        self._flush()

    def _must_stop(self) -> bool:
        return self._is_stopping  # another thread sets it at any time

    def _drain(self, *, at_end: bool) -> None:
        until_ns = -1 if self._cuda is None else self._cuda.take_history()
        batch = self._observer.drain(-1 if at_end else until_ns)
        columns = arrow.batch_columns(batch)
        tables: Mapping[str, pa.Table] = arrow.encode_batch(columns, batch)
        if self._cuda is not None:
            tables = {**tables, **self._cuda.take_tables()}
        self._parts.append(tables, _part_columns(columns, batch))

    def _flush(self) -> None:
        num_events = self._parts.rows_in_part
        number = self._parts.flush()
        if number is None:
            return
        if self._ring is not None:
            dropped = self._ring.part_written(number, num_events, self._parts.order_ns)
            if dropped is not None:
                self._parts.forget_parts(dropped)
            self._manifest.set_dropped_events(self._ring.dropped_events)
        self._manifest.update(num_events=self._parts.num_events, parts=self._parts.parts)
        if not self._is_stopping:  # otherwise the last manifest follows at once
            self._manifest.write(self._folder)

    def _drop_void_steps(self, table: str, temporary: Path) -> None:
        if table == "spans" and self._has_void_steps:
            from memtrace.recording.void_steps import drop_void_steps

            if drop_void_steps(self._folder, temporary):
                self._has_void_steps = False


def _part_columns(columns: arrow.Columns, batch: Batch) -> PartColumns:
    return PartColumns(
        columns["events"],
        columns["ops"],
        columns["labels"],
        columns["spans"],
        {row[0]: schema.PHASES.index(row[2]) for row in batch["names"] if row[2] in schema.PHASES},
    )
