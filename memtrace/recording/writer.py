"""Writes what an observer sees to Parquet parts, off the training thread.

A part is written under a temporary name and renamed into place when it is whole: a killed process leaves a trace that
opens and lacks its last flush at most. A disk that is full or slow never breaks the training: one warning, and the
recording ends with what was written.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from memtrace.format import schema
from memtrace.recording import arrow
from memtrace.recording.observers import Observer

if TYPE_CHECKING:
    from memtrace.recording.cuda import CudaMonitor
    from memtrace.recording.ring import Ring

logger = logging.getLogger("memtrace")

FLUSH_SECONDS: Final = 5.0
PART_ROWS: Final = 4_000_000

# Counters grow by small steps and times by small differences; the rest repeats.
_DELTA: Final = {
    "events": ("time_ns", "block_id", "op_id", "address"),
    "ops": ("op_id", "start_ns", "duration_ns", "sequence_nr"),
    "spans": ("start_ns", "duration_ns", "index"),
    "labels": ("block_id",),
    "names": ("id",),
    "segments": ("address",),
    "counters": ("time_ns",),
    "device_times": ("op_id", "start_ns", "duration_ns"),
}
# Events come last: whoever reads while we write finds the names and operators they refer to.
_IN_ORDER: Final = (*(name for name in schema.TABLES if name != "events"), "events")


def open_part(path: Path, table: str, metadata: dict[str, str] | None = None) -> pq.ParquetWriter:
    """A Parquet writer for one part of a table, with the encodings that suit its columns."""
    target = schema.arrow_schema(table).with_metadata(metadata or {})
    return pq.ParquetWriter(
        path,
        target,
        compression="zstd",
        write_statistics=False,
        use_dictionary=[
            field.name
            for field in target
            if field.name not in _DELTA[table]
            and not pa.types.is_list(field.type)
            and not pa.types.is_boolean(field.type)
        ],
        column_encoding=dict.fromkeys(_DELTA[table], "DELTA_BINARY_PACKED"),
    )


class PartWriter:
    """The parts of one rank: rows are appended as they come, ``flush`` makes them durable."""

    def __init__(self, folder: Path, ring: Ring | None) -> None:
        self._folder = folder
        self._ring = ring
        self._open: dict[str, pq.ParquetWriter] = {}
        self._index = 0
        self.num_events = 0
        self.rows_in_part = 0
        self.numbered_anew = False

    def _path(self, table: str, *, temporary: bool) -> Path:
        name = f"{table}-{self._index:05d}.parquet"
        return self._folder / (f".{name}.tmp" if temporary else name)

    def append(self, tables: Mapping[str, pa.Table]) -> None:
        """Add rows to the current part. Raises OSError when the disk does not take them."""
        for name, rows in tables.items():
            if rows.num_rows == 0:
                continue
            if name not in self._open:
                self._open[name] = open_part(self._path(name, temporary=True), name)
            self._open[name].write_table(rows)
            if name == "events":
                self.num_events += rows.num_rows
                self.rows_in_part += rows.num_rows

    def flush(self) -> None:
        """End the current part and rename it into place."""
        if not self._open:
            return
        for name in _IN_ORDER:
            if name in self._open:
                self._open[name].close()
                if name == "spans" and self.numbered_anew:
                    self._drop_void_steps()
                self._path(name, temporary=True).replace(self._path(name, temporary=False))
        self._open.clear()
        self.rows_in_part = 0
        if self._ring is not None:
            self._ring.part_written(self._index)
        self._index += 1

    def _drop_void_steps(self) -> None:
        """Steps count from the last step 0 on: those before it were the optimizers', until the program marked its own.

        The parts on disk are mended before the one with that step 0 is in place: a killed process leaves no step twice.
        """
        import pyarrow.compute as pc  # 7 MB that hardly any recording needs

        paths = [*sorted(self._folder.glob("spans-*.parquet")), self._path("spans", temporary=True)]
        parts = [pq.read_table(path).cast(schema.arrow_schema("spans")) for path in paths]
        is_step = [pc.equal(pc.cast(part["kind"], pa.string()), "step") for part in parts]
        begins = pc.indices_nonzero(pc.and_(is_step[-1], pc.fill_null(pc.equal(parts[-1]["index"], 0), False)))
        start = begins[-1].as_py() if len(begins) else 0
        void = [*is_step[:-1], is_step[-1].slice(0, start)]
        if not any(pc.any(one).as_py() for one in void if len(begins)):  # what was marked is not drained yet
            return
        self.numbered_anew = False
        kept = [part.filter(pc.invert(one)) for part, one in zip(parts[:-1], void[:-1], strict=True)]
        kept.append(pa.concat_tables([parts[-1].slice(0, start).filter(pc.invert(void[-1])), parts[-1].slice(start)]))
        for path, rows in zip(paths, kept, strict=True):
            temporary = self._folder / ".spans.rewritten.tmp"
            with open_part(temporary, "spans") as writer:
                writer.write_table(rows.unify_dictionaries())
            temporary.replace(path)

    def abandon(self) -> None:
        """Drop the current part after an error."""
        for name, writer in self._open.items():
            try:
                writer.close()
            except (OSError, pa.ArrowException):
                logger.debug("closing a part that failed", exc_info=True)
            self._path(name, temporary=True).unlink(missing_ok=True)
        self._open.clear()


def part_numbers(folder: Path) -> dict[str, list[int]]:
    """The numbers of the parts of every table: a table without rows for a part has a gap there."""
    return {
        name: sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob(f"{name}-*.parquet"))
        for name in schema.TABLES
    }


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    """Write manifest.json in one step, so that it is whole at every moment."""
    temporary = folder / f".{schema.MANIFEST_NAME}.tmp"
    temporary.write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
    temporary.replace(folder / schema.MANIFEST_NAME)


class Writer:
    """Drains an observer on a thread of its own until told to stop.

    ``failed`` is called, once, on that thread when writing ends early, with the reason. ``cuda`` has events and tables
    of its own; None where there is no CUDA.
    """

    def __init__(
        self,
        observer: Observer,
        folder: Path,
        manifest: dict[str, Any],
        ring: Ring | None,
        failed: Callable[[str], None],
        flush_seconds: float = FLUSH_SECONDS,
        cuda: CudaMonitor | None = None,
    ) -> None:
        self._observer = observer
        self._folder = folder
        self._manifest = manifest
        self._ring = ring
        self._failed = failed
        self._flush_seconds = flush_seconds
        self._cuda = cuda
        self._parts = PartWriter(folder, ring)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="memtrace-writer", daemon=True)

    @property
    def num_events(self) -> int:
        """Events written so far."""
        return self._parts.num_events

    def steps_numbered_anew(self) -> None:
        """A second step 0 is on its way, which voids the steps before it; called on the training thread."""
        self._parts.numbered_anew = True

    def start(self) -> None:
        """Begin to write."""
        self._thread.start()

    def stop(self) -> None:
        """Write what is left and end; call after the observer stopped."""
        self._stopping.set()
        self._observer.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._write_until_stopped()
        except (OSError, pa.ArrowException, MemoryError) as error:
            self._parts.abandon()
            self._failed(f"cannot write to {self._folder}: {error}")

    def _write_until_stopped(self) -> None:
        due = time.monotonic() + self._flush_seconds
        while not self._stopping.is_set():
            self._observer.wait(max(0.0, min(due - time.monotonic(), self._flush_seconds)))
            self._parts.append(self._drain(at_end=False))
            if self._observer.overrun():
                self._flush()
                self._failed("the disk does not keep up with the program")
                return
            if time.monotonic() >= due or self._parts.rows_in_part >= PART_ROWS:
                self._flush()
                due = time.monotonic() + self._flush_seconds
        self._parts.append(self._drain(at_end=True))
        self._flush()

    def _drain(self, *, at_end: bool) -> dict[str, pa.Table]:
        if self._cuda is None:
            return arrow.tables(self._observer.drain(-1))
        until_ns = self._cuda.take_history()
        drained = arrow.tables(self._observer.drain(-1 if at_end else until_ns))
        return drained | self._cuda.take_tables()

    def _flush(self) -> None:
        self._parts.flush()
        self._manifest["num_events"] = self._parts.num_events
        self._manifest["parts"] = part_numbers(self._folder)
        if self._ring is not None:
            self._manifest["coverage"]["dropped_events"] = self._ring.dropped_events
        write_manifest(self._folder, self._manifest)
