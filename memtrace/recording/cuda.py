"""The CUDA side of a recording: what is older than it, totals at every step, segments at its end.

Blocks, segments and failures while it runs come from the allocator's trace tracker (``observers/native``). Where CUDA's
headers are missing, so that it cannot be built, they come from torch's own recorded history, in microseconds.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
import torch

from memtrace.format.encode import Text, make_table
from memtrace.format.schema import COUNTERS, EVENT_KINDS
from memtrace.readers.cuda_snapshot.entries import read_entries
from memtrace.readers.cuda_snapshot.events import segments_table
from memtrace.readers.cuda_snapshot.segments import LiveBlocks, SnapshotSegments, read_segments
from memtrace.readers.cuda_snapshot.settings import plain_settings
from memtrace.readers.cuda_snapshot.sizes import rounds_by_default
from memtrace.recording.manifest import ManifestFile
from memtrace.recording.observers import OLDER_SEGMENT, CudaRow, Observer

if TYPE_CHECKING:
    import pyarrow as pa

HISTORY_ENTRIES: Final = 100_000
logger = logging.getLogger("memtrace")
NO_HEADERS: Final = (
    "CUDA's headers are missing: its blocks and segments are from torch's own history, whose times are in "
    "microseconds, so a few accesses may be told of the wrong block"
)
_BASELINE: Final = EVENT_KINDS.index("baseline")
_FREES: Final = tuple(EVENT_KINDS.index(kind) for kind in ("free", "free_requested"))
_NS_PER_US: Final = 1000
_NOW: Final = -1


class Driver(Protocol):
    """What a recording asks of ``torch.cuda``."""

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call once CUDA is in use by the program, at once where it is already."""

    def snapshot(self) -> Mapping[str, Any]:
        """``torch.cuda.memory._snapshot()``."""

    def totals(self) -> list[tuple[int, int, int, int]]:
        """(device, allocated, reserved, used on the device by anyone) of each device in use. Bytes."""

    def keep_history(self, max_entries: int) -> bool:
        """Have torch record its history, without stacks; False where the program does so already."""

    def drop_history(self) -> None:
        """Undo ``keep_history``."""


class TorchDriver:
    """``Driver`` on top of torch.cuda."""

    def when_ready(self, call: Callable[[], None]) -> None:
        """See ``Driver``. The allocator is there from CUDA's initialisation on, and must not be asked for it."""
        torch.cuda._lazy_call(call)  # type: ignore[no-untyped-call]

    def snapshot(self) -> Mapping[str, Any]:
        """See ``Driver``."""
        taken: Mapping[str, Any] = torch.cuda.memory._snapshot()
        return taken

    def totals(self) -> list[tuple[int, int, int, int]]:
        """See ``Driver``. A device without segments is not asked: that would begin to use it."""
        rows = []
        for device in range(torch.cuda.device_count()):
            reserved = torch.cuda.memory_reserved(device)
            if reserved > 0:
                free, total = torch.cuda.mem_get_info(device)
                rows.append((device, torch.cuda.memory_allocated(device), reserved, total - free))
        return rows

    def keep_history(self, max_entries: int) -> bool:
        """See ``Driver``."""
        if torch._C._cuda_isHistoryEnabled():
            return False
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=max_entries)
        return True

    def drop_history(self) -> None:
        """See ``Driver``."""
        torch.cuda.memory._record_memory_history(None)


class CudaSide:
    """What a recording knows of CUDA beside the observer's events; settings and notes go into its ``manifest``."""

    def __init__(self, observer: Observer, driver: Driver, manifest: ManifestFile) -> None:
        self._observer = observer
        self._driver = driver
        self._manifest = manifest
        self._note = manifest.add_note
        self._lock = threading.Lock()
        self._is_recording = False
        self._is_attached = False
        self._history: History | None = None
        self._counters: list[tuple[int, int, int, int]] = []
        self._segments: pa.Table | None = None
        self._num_replays = 0

    def start(self) -> None:
        """Begin, at once or when the program first uses CUDA."""
        self._is_recording = True
        self._driver.when_ready(self._attach)

    def _attach(self) -> None:
        if self._is_recording:
            self._guard(self._attach_now)

    def _guard(self, work: Callable[[], None]) -> None:
        """We run within the program's own calls of CUDA: whatever fails here must not fail there."""
        try:
            work()
        except Exception as error:
            self._is_attached = False
            self._note(f"CUDA's memory is not followed from here on: {error}")
            logger.warning("memtrace: CUDA's memory is not followed from here on: %s", error)

    def _attach_now(self) -> None:
        # First the tracker: what happens before the snapshot is taken is then told twice, and not never.
        if not self._observer.attach_cuda():
            self._history = History(self._observer, self._driver, self._note)
            self._note(NO_HEADERS)
        snapshot = self._driver.snapshot()
        settings = plain_settings(snapshot.get("allocator_settings") or {})
        self._manifest.update(allocator_settings=settings)
        segments, live = read_segments(snapshot["segments"])
        self._observer.cuda_settings(rounds_by_default(settings, live), int(settings.get("max_split_size", -1)))
        self._observer.cuda_events(_older(segments, live))
        self._is_attached = True
        self._read_totals()

    def read_totals(self) -> None:
        """Read the allocator's and the driver's totals; called at every step."""
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
        """Count the replays of CUDA graphs from now on; the function that ends it."""
        graph: Any = torch.cuda.CUDAGraph
        original = graph.replay

        def replay(replayed: Any) -> None:
            self._num_replays += 1
            original(replayed)

        def restore() -> None:
            if graph.replay is replay:
                graph.replay = original

        graph.replay = replay
        return restore

    def stop(self) -> None:
        """Read what is left at the end; call before the observer stops."""
        self._is_recording = False
        self.read_totals()
        if self._is_attached:
            self._guard(self._read_segments)
        if self._num_replays:
            self._note(
                f"{self._num_replays} replays of CUDA graphs: a graph's memory is allocated when it is captured; what "
                "its kernels read and write in a replay is not seen"
            )

    def _read_segments(self) -> None:
        table = final_segments(self._driver.snapshot())
        with self._lock:
            self._segments = table

    def close(self) -> None:
        """After the last ``take_history``: leave torch as it was."""
        if self._history is not None:
            self._history.close()

    def take_history(self) -> int:
        """Tell the observer of what torch's history has, and until when it is complete; -1: it is not used."""
        return self._history.take() if self._history is not None else -1

    def take_tables(self) -> dict[str, pa.Table]:
        """The tables ``counters`` and ``segments`` as far as they are new."""
        with self._lock:
            rows, self._counters = self._counters, []
            segments, self._segments = self._segments, None
        tables = {"segments": segments} if segments is not None else {}
        return tables | ({"counters": _counters_table(rows)} if rows else {})


def _older(segments: SnapshotSegments, live: LiveBlocks) -> list[CudaRow]:
    """Segments and blocks that are older than the recording, as rows for ``Observer.cuda_events``."""
    rows = [
        (OLDER_SEGMENT, *row, _NOW)
        for row in _zipped(
            segments.device, segments.address, segments.size, segments.stream, segments.pool, segments.expandable
        )
    ]
    rows += [
        (_BASELINE, *row, _NOW)
        for row in _zipped(live.device, live.address, live.requested, live.stream, live.pool, live.size)
    ]
    return rows


def _zipped(*columns: Any) -> Sequence[tuple[int, int, int, int, int, int]]:
    device, address, *rest = columns
    # Addresses of 2**63 and above are held as their two's complement.
    return list(zip(device.tolist(), address.view(np.uint64).tolist(), *(c.tolist() for c in rest), strict=True))


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


class History:
    """Torch's own history of its allocator, told to an observer piece by piece."""

    def __init__(self, observer: Observer, driver: Driver, note: Callable[[str], None]) -> None:
        self._observer = observer
        self._driver = driver
        self._note = note
        self._has_gaps = False
        self._is_ours = driver.keep_history(HISTORY_ENTRIES)
        self._epoch_ns = time.time_ns() - observer.now()
        self._told_until: dict[int, tuple[int, int]] = {}

    def take(self) -> int:
        """Tell of the entries that are new; the recording's time up to which all are told."""
        until = self._observer.now()
        rows: list[CudaRow] = []
        for device, trace in enumerate(self._driver.snapshot().get("device_traces") or []):
            rows += self._new_rows(device, trace)
        self._observer.cuda_events(rows)
        return until

    def _new_rows(self, device: int, trace: Sequence[Mapping[str, Any]]) -> list[CudaRow]:
        entries = read_entries([trace])
        if entries.time_us is None or not len(entries):
            return []
        # An alloc is told at the beginning of its microsecond and a free at its end, so that accesses lie between.
        time_ns = entries.time_us * _NS_PER_US - self._epoch_ns + np.isin(entries.kind, _FREES) * (_NS_PER_US - 1)
        time_ns = np.maximum.accumulate(time_ns)
        last, num_at_last = self._told_until.get(device, (0, 0))
        if last and time_ns[0] > last and not self._has_gaps:
            self._has_gaps = True
            self._note("torch's history was overwritten before it was read: events of CUDA's allocator are lost")
        new = np.flatnonzero(time_ns >= last)
        # Of those at the very time at which the last piece ended, that many are told already.
        new = new[(np.cumsum(time_ns[new] == last) > num_at_last) | (time_ns[new] > last)]
        end = int(time_ns[-1])
        self._told_until[device] = (end, int((time_ns == end).sum()))
        failed = entries.kind == EVENT_KINDS.index("oom")
        place = np.where(failed, entries.device_free, entries.address)
        columns = (
            np.full(len(entries), device),
            place,
            entries.size,
            entries.stream,
            entries.pool,
            np.full(len(entries), -1),
        )
        rows = _zipped(*(column.astype(np.int64)[new] for column in columns))
        return [
            (kind, *row, when)
            for kind, row, when in zip(
                entries.kind[new].tolist(), rows, np.maximum(time_ns[new], 0).tolist(), strict=True
            )
        ]

    def close(self) -> None:
        """Leave torch as it was."""
        if self._is_ours:
            self._driver.drop_history()
