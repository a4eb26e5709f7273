"""Records CUDA memory: existing blocks and segments, totals at every step, and the segments at the end.

While the recording runs, allocations, frees, segments and out-of-memory errors come from the trace tracker of the CUDA
allocator (``observers/native``). Without the CUDA headers the tracker cannot be built, and these events come from
torch's own allocator history, with times in microseconds.
"""

from __future__ import annotations

import logging
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
from memtrace.readers.cuda_snapshot.sizes import rounds_by_default
from memtrace.recording.cuda_driver import CudaDriver
from memtrace.recording.cuda_history import CudaHistory, rows_from_columns
from memtrace.recording.manifest import ManifestFile
from memtrace.recording.observers import OLDER_SEGMENT, CudaRow, Observer

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("memtrace")
NO_HEADERS_NOTE: Final = (
    "CUDA headers not found: CUDA blocks and segments come from torch's allocator history, whose times are in "
    "microseconds, so some accesses may be assigned to the wrong block"
)
_BASELINE: Final = EVENT_KINDS.index("baseline")
_NOW: Final = -1


class CudaMonitor:
    """Records what the observer does not see of CUDA memory.

    Args:
        observer: receives existing segments and blocks, and the allocator history if it does not track CUDA itself.
        driver: access to ``torch.cuda``.
        manifest: receives the allocator settings and notes.
    """

    def __init__(self, observer: Observer, driver: CudaDriver, manifest: ManifestFile) -> None:
        self._observer = observer
        self._driver = driver
        self._manifest = manifest
        self._note = manifest.add_note
        self._lock = threading.Lock()
        self._is_recording = False
        self._is_attached = False
        self._history: CudaHistory | None = None
        self._counters: list[tuple[int, int, int, int]] = []
        self._segments: pa.Table | None = None
        self._num_replays = 0

    def start(self) -> None:
        """Start now, or when the program initialises CUDA."""
        self._is_recording = True
        self._driver.when_ready(self._attach)

    def _attach(self) -> None:
        if self._is_recording:
            self._guard(self._attach_now)

    def _guard(self, work: Callable[[], None]) -> None:
        """Call ``work``, which runs inside the program's own CUDA calls: its errors must not reach the program."""
        try:
            work()
        except Exception as error:
            self._is_attached = False
            self._note(f"CUDA memory is no longer recorded: {error}")
            logger.warning("memtrace: CUDA memory is no longer recorded, training continues: %s", error)

    def _attach_now(self) -> None:
        # The tracker is attached before the snapshot: an event in between is then recorded twice rather than never.
        if not self._observer.attach_cuda():
            self._history = CudaHistory(self._observer, self._driver, self._note)
            self._note(NO_HEADERS_NOTE)
        snapshot = self._driver.snapshot()
        settings = plain_settings(snapshot.get("allocator_settings") or {})
        self._manifest.update(allocator_settings=settings)
        segments, live = read_segments(snapshot["segments"])
        self._observer.cuda_settings(rounds_by_default(settings, live), int(settings.get("max_split_size", -1)))
        self._observer.cuda_events(_existing_rows(segments, live))
        self._is_attached = True
        self._read_totals()
        self._read_memory()

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
        ]
        with self._lock:
            self._counters.extend(rows)

    def watch_graphs(self) -> Callable[[], None]:
        """Count the replays of CUDA graphs from now on; return the function that ends it."""
        graph: Any = torch.cuda.CUDAGraph
        original = graph.replay

        def replay(self_: Any) -> None:
            self._num_replays += 1
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
        if self._is_attached:
            self._guard(self._read_last_entries)
            self._guard(self._read_segments)
            self._guard(self._read_memory)
        if self._num_replays:
            self._note(
                f"{self._num_replays} replays of CUDA graphs: the memory of a graph is recorded when it is captured; "
                "reads and writes of its kernels during replay are not recorded"
            )

    def _read_last_entries(self) -> None:
        if self._history is not None:
            self._history.read()

    def _read_segments(self) -> None:
        table = final_segments(self._driver.snapshot())
        with self._lock:
            self._segments = table

    def _read_memory(self) -> None:
        """Read what torch may use of the devices, at the end again: the program sets the fraction when it likes."""
        for device, total_bytes, allowed_bytes in self._driver.memory():
            self._manifest.update_device(f"cuda:{device}", total_bytes=total_bytes, allowed_bytes=allowed_bytes)

    def close(self) -> None:
        """Leave torch as it was; call this after the last ``take_history``."""
        if self._history is not None:
            self._history.close()

    def take_history(self) -> int:
        """Pass new entries of torch's history to the observer; return until when it is complete, -1 if unused."""
        return self._history.read() if self._history is not None else -1

    def take_tables(self) -> dict[str, pa.Table]:
        """New rows of the tables ``counters`` and ``segments``."""
        with self._lock:
            rows, self._counters = self._counters, []
            segments, self._segments = self._segments, None
        tables = {"segments": segments} if segments is not None else {}
        return tables | ({"counters": _counters_table(rows)} if rows else {})


def _existing_rows(segments: SnapshotSegments, live: LiveBlocks) -> list[CudaRow]:
    """Segments and blocks that are older than the recording, as rows for ``Observer.cuda_events``."""
    segment_rows = rows_from_columns(
        segments.device, segments.address, segments.size, segments.stream, segments.pool, segments.expandable
    )
    block_rows = rows_from_columns(live.device, live.address, live.requested, live.stream, live.pool, live.size)
    return [(OLDER_SEGMENT, *row, _NOW) for row in segment_rows] + [(_BASELINE, *row, _NOW) for row in block_rows]


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
