"""Records CUDA memory: existing blocks and segments, totals at every step, and the segments at the end.

While the recording runs, allocations, frees, segments and out-of-memory errors come from the trace tracker of torch's
caching allocator (``observers/native``). Where there is no tracker (ROCm, the pure-Python observer), these events come
from torch's own allocator history, with times in microseconds. Other allocators report no events: their blocks are
known by the storages of tensors.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from memtrace.format.encode import Text, make_table
from memtrace.format.schema import COUNTERS, EVENT_KINDS
from memtrace.readers.cuda_snapshot.events import segments_table
from memtrace.readers.cuda_snapshot.segments import LiveBlocks, SnapshotSegments, read_segments
from memtrace.readers.cuda_snapshot.settings import plain_settings
from memtrace.readers.cuda_snapshot.sizes import read_divisions
from memtrace.recording.cuda_driver import NO_CACHING_VARIABLE, CudaAllocator, CudaDriver
from memtrace.recording.cuda_history import CudaHistory, rows_from_columns
from memtrace.recording.manifest import ManifestFile
from memtrace.recording.observers import FOUND_BLOCK, OLDER_SEGMENT, CudaRow, Observer

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("memtrace")
HISTORY_NOTE: Final = (
    "CUDA blocks and segments come from torch's allocator history, whose times are in microseconds, so some accesses "
    "may be assigned to the wrong block"
)
ALLOCATOR_NOTES: Final[Mapping[CudaAllocator, str]] = {
    "cudaMallocAsync": "the allocator cudaMallocAsync reports no events",
    "pluggable": "the program's own CUDA allocator (change_current_allocator) reports no events",
    "uncached": f"torch's CUDA allocator reports no events while caching is disabled ({NO_CACHING_VARIABLE})",
}
STORAGES_NOTE: Final = (
    "CUDA blocks are recorded when an operator returns them or first accesses them, and until their storage is freed; "
    "workspaces within operators, segments and out-of-memory errors are missing"
)
_BASELINE: Final = EVENT_KINDS.index("baseline")


class CudaMonitor:
    """Records what the observer does not see of CUDA memory.

    Args:
        observer: receives existing segments and blocks, and the allocator history if it does not track CUDA itself.
        driver: access to ``torch.cuda``.
        manifest: receives the devices, the allocator settings and notes.

    Attributes:
        num_replays: number of replays of CUDA graphs so far.
    """

    def __init__(self, observer: Observer, driver: CudaDriver, manifest: ManifestFile) -> None:
        self._observer = observer
        self._driver = driver
        self._manifest = manifest
        self._note = manifest.add_note
        self._lock = threading.Lock()
        self._process = os.getpid()
        self._is_recording = False
        self._is_starting = False
        self._is_attached = False
        self._is_paused = False
        self._is_deferred = False
        self._cancel: Callable[[], None] = lambda: None
        self._history: CudaHistory | None = None
        self._complete_until_ns = 0
        self._counters: list[tuple[int, int, int, int]] = []
        self._segments: pa.Table | None = None
        self.num_replays = 0

    def start(self) -> None:
        """Start now, or when the program initialises CUDA."""
        self._is_recording = self._is_starting = True
        self._cancel = self._driver.when_ready(self._attach)
        self._is_starting = False

    def _attach(self) -> None:
        # A forked child inherits the queued call, but is not recorded.
        if self._is_recording and os.getpid() == self._process:
            self._is_deferred = self._is_paused
            if not self._is_paused:
                self._guard(self._attach_now)

    def pause(self) -> None:
        """Read nothing until ``resume``."""
        self._is_paused = True

    def resume(self) -> None:
        """Read again, after ``list_state``."""
        self._is_paused = False

    def list_state(self) -> None:
        """Record the blocks and segments that exist after a pause, or in the middle of it."""
        if self._is_deferred:
            self._is_deferred = False
            self._guard(self._attach_now)
        elif self._is_attached and self._manifest.current.cuda_allocator == "native" and self._history is None:
            self._guard(self._follow_allocator)
        self.read_totals()

    def _guard(self, work: Callable[[], None]) -> None:
        """Call ``work``, which runs inside the program's own CUDA calls: its errors must not reach the program."""
        try:
            work()
        except Exception as error:
            self._is_attached = False
            self._note(f"CUDA memory is no longer recorded: {error}")
            logger.warning("memtrace: CUDA memory is no longer recorded, training continues: %s", error)

    def _attach_now(self) -> None:
        allocator = self._driver.allocator()
        self._manifest.update(cuda_allocator=allocator)
        self._read_devices()
        if allocator == "native":
            self._follow_allocator()
        else:
            self._follow_storages(ALLOCATOR_NOTES.get(allocator, f"the CUDA allocator {allocator} reports no events"))
        self._is_attached = True
        self._read_totals()

    def _follow_allocator(self) -> None:
        """Record the events of torch's caching allocator, from the snapshot taken here on."""
        rows: list[CudaRow] = []
        has_events = False
        history = None
        # Blocks that were there when the recording began are recorded at its beginning, like those of the CPU.
        time_ns = 0 if self._is_starting else self._observer.now()
        try:
            if self._observer.attach_cuda():
                snapshot = self._driver.snapshot()
            else:
                history = CudaHistory(self._observer, self._driver, self._note)
                snapshot = history.start()
                self._note(HISTORY_NOTE)
            settings = plain_settings(snapshot.get("allocator_settings") or {})
            self._manifest.update(allocator_settings=settings)
            segments, live = read_segments(snapshot["segments"])
            self._observer.cuda_settings(read_divisions(settings, live), int(settings.get("max_split_size", -1)))
            kind = FOUND_BLOCK if self._is_attached else _BASELINE
            rows, has_events = _existing_rows(segments, live, kind, time_ns), True
        finally:
            self._observer.finish_cuda(rows, has_events)
        self._history = history

    def _follow_storages(self, reason: str) -> None:
        """Record the blocks of tensors, because the allocator reports no events."""
        logger.warning("memtrace: %s: %s", reason, STORAGES_NOTE)
        self._note(f"{reason}: {STORAGES_NOTE}")
        self._observer.cuda_settings(None, -1)  # sizes of blocks are unknown
        self._observer.finish_cuda([], False)

    def read_totals(self) -> None:
        """Read the memory totals of all devices; called at every step."""
        if self._is_attached:
            self._guard(self._read_totals)

    def _read_totals(self) -> None:
        now = self._observer.now()
        rows = [
            (now, device, counter, value)
            for device, *values in self._driver.totals()
            for counter, value in enumerate(values)
            if value is not None
        ]
        with self._lock:
            self._counters.extend(rows)

    def watch_graphs(self) -> Callable[[], None]:
        """Count the replays of CUDA graphs from now on; return the function that ends it."""
        graph: Any = torch.cuda.CUDAGraph
        original = graph.replay

        def replay(self_: Any) -> None:
            self.num_replays += 1
            original(self_)

        def restore() -> None:
            if graph.replay is replay:
                graph.replay = original

        graph.replay = replay
        return restore

    def stop(self) -> None:
        """Read history, totals and segments at the end of the recording; call this before the observer stops."""
        self._is_recording = False
        self.read_totals()
        if self._is_attached and self._manifest.current.cuda_allocator == "native":
            self._guard(self._read_last_entries)
            self._guard(self._read_segments)
            self._guard(self._read_devices)
        if (note := self.replay_note()) is not None:
            self._note(note)

    def replay_note(self, since: int = 0) -> str | None:
        """A sentence about the replays of CUDA graphs; None if there were none.

        Args:
            since: number of replays that are not counted because they came before.
        """
        if self.num_replays == since:
            return None
        return (
            f"{self.num_replays - since} replays of CUDA graphs: the memory of a graph is recorded when it is "
            "captured; reads and writes of its kernels during replay are not recorded"
        )

    def segments_now(self) -> dict[str, pa.Table]:
        """The table ``segments`` at this moment, for a recording that ends while this one goes on."""
        tables: dict[str, pa.Table] = {}
        if self._is_attached and self._manifest.current.cuda_allocator == "native":
            self._guard(lambda: tables.update(segments=final_segments(self._driver.snapshot())))
        return tables

    def _read_last_entries(self) -> None:
        if self._history is not None:
            self._complete_until_ns = self._history.read()

    def _read_segments(self) -> None:
        table = final_segments(self._driver.snapshot())
        with self._lock:
            self._segments = table

    def _read_devices(self) -> None:
        """Describe the devices; at the end again, because the program sets its share of their memory when it likes."""
        self._manifest.add_devices(self._driver.devices())

    def close(self) -> None:
        """Leave torch as it was; call this after the last ``take_history``."""
        self._cancel()
        if self._history is not None:
            self._history.close()

    def take_history(self) -> int:
        """Pass new entries of torch's history to the observer; return until when it is complete, -1 if unused."""
        if self._history is None:
            return -1
        self._guard(self._read_last_entries)
        return self._complete_until_ns

    def take_tables(self) -> dict[str, pa.Table]:
        """New rows of the tables ``counters`` and ``segments``."""
        with self._lock:
            rows, self._counters = self._counters, []
            segments, self._segments = self._segments, None
        tables = {"segments": segments} if segments is not None else {}
        return tables | ({"counters": _counters_table(rows)} if rows else {})


def _existing_rows(segments: SnapshotSegments, live: LiveBlocks, kind: int, time_ns: int) -> list[CudaRow]:
    """Segments and blocks that exist, the blocks of a kind of event, as rows for ``Observer.finish_cuda``."""
    segment_rows = rows_from_columns(
        segments.device, segments.address, segments.size, segments.stream, segments.pool, segments.expandable
    )
    block_rows = rows_from_columns(live.device, live.address, live.requested, live.stream, live.pool, live.size)
    rows = [(OLDER_SEGMENT, *row) for row in segment_rows] + [(kind, *row) for row in block_rows]
    return [(*row, time_ns) for row in rows]


def final_segments(snapshot: Mapping[str, Any]) -> pa.Table:
    """The table ``segments`` of a snapshot taken at the end of a recording, without stacks."""
    segments, _ = read_segments(snapshot["segments"])
    return segments_table(segments, np.full(len(segments), -1, np.int64))


def _counters_table(rows: Sequence[tuple[int, int, int, int]]) -> pa.Table:
    time_ns, device, counter, value = np.array(rows, np.int64).T
    return make_table(
        "counters",
        len(rows),
        {
            "time_ns": time_ns,
            "device": Text(device.astype(np.int8), [f"cuda:{number}" for number in range(int(device.max()) + 1)]),
            "name": Text(counter.astype(np.int8), COUNTERS),
            "value": value,
        },
    )
