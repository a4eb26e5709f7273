"""Reads torch's own allocator history where the observer cannot see CUDA's allocator itself."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from memtrace.format.schema import EVENT_KINDS
from memtrace.readers.cuda_snapshot.entries import SnapshotEntries, read_entries
from memtrace.readers.tables import Array
from memtrace.recording.cuda_driver import CudaDriver
from memtrace.recording.observers import CudaRow, Observer

MAX_HISTORY_ENTRIES: Final = 100_000
_FREES: Final = tuple(EVENT_KINDS.index(kind) for kind in ("free", "free_requested"))
_OOM: Final = EVENT_KINDS.index("oom")
_SNAPSHOT: Final = EVENT_KINDS.index("snapshot")
_NS_PER_US: Final = 1000
_MAX_TIME_ERROR_US: Final = 1000
"""Bound on how far the times of one entry differ between two snapshots: each converts them with its own calibration."""
_NUM_CLOCK_READS: Final = 5
_NUM_COMPARED: Final = 16
"""Number of entries by which the last one that was read is found again."""


@dataclass(frozen=True)
class _LastRead:
    """The last entries of a device that were read, in the order of time."""

    signature: Array
    """Kind, address and size of each: one row per entry."""
    time_us: int
    """Time of the last one."""
    time_ns: int
    """The same as a time of the recording, as it was passed on."""


class CudaHistory:
    """Passes new entries of torch's allocator history to an observer.

    Args:
        observer: receives the entries.
        driver: provides the history.
        note: adds a note to the manifest of the trace.
    """

    def __init__(self, observer: Observer, driver: CudaDriver, note: Callable[[str], None]) -> None:
        self._observer = observer
        self._driver = driver
        self._note = note
        self._lock = threading.RLock()
        self._has_gaps = False
        self._epoch_ns = 0
        self._last_read: dict[int, _LastRead] = {}
        self._is_ours = False
        self._stop_watching: Callable[[], None] = lambda: None

    def start(self) -> Mapping[str, Any]:
        """Enable the history unless the program has; return a snapshot after which the entries are passed on."""
        self._enable_if_off()
        self._stop_watching = self._driver.watch_history(self._before_change, self._after_change)
        snapshot = self._driver.snapshot()
        for device, trace in enumerate(snapshot.get("device_traces") or []):
            entries = read_entries([trace])
            # The snapshot's own entry marks the moment that its segments show.
            own = np.flatnonzero(entries.kind == _SNAPSHOT)
            if entries.time_us is not None and len(entries):
                end = int(own[-1]) + 1 if len(own) else len(entries)
                self._remember(device, entries, end, 0)
        return snapshot

    def _enable_if_off(self) -> None:
        if not self._driver.has_history():
            self._driver.enable_history(MAX_HISTORY_ENTRIES)
            self._is_ours = True

    def _before_change(self) -> None:
        self.read()

    def _after_change(self) -> None:
        """The program changed the history: it is the program's now, unless the program disabled it."""
        with self._lock:
            self._is_ours = False
            self._last_read = {} if not self._driver.has_history() else self._last_read
            self._enable_if_off()

    def read(self) -> int:
        """Pass on the entries since the last call; return the time up to which the history is complete.

        The observer ignores entries once it is stopped.
        """
        with self._lock:
            until_ns = self._observer.now()
            self._epoch_ns = self._measure_epoch()
            rows: list[CudaRow] = []
            for device, trace in enumerate(self._driver.snapshot().get("device_traces") or []):
                rows += self._new_rows(device, trace)
            self._observer.cuda_events(rows)
            return until_ns

    def _measure_epoch(self) -> int:
        """Unix time at which the observer's clock was 0, ns. Measured at every read, because the two clocks drift."""
        best_ns, epoch_ns = sys.maxsize, 0
        for _ in range(_NUM_CLOCK_READS):
            before_ns, unix_ns, after_ns = self._observer.now(), time.time_ns(), self._observer.now()
            if after_ns - before_ns < best_ns:
                best_ns, epoch_ns = after_ns - before_ns, unix_ns - (before_ns + after_ns) // 2
        return epoch_ns

    def _new_rows(self, device: int, trace: Sequence[Mapping[str, Any]]) -> list[CudaRow]:
        entries = read_entries([trace])
        if entries.time_us is None or not len(entries):
            return []
        first, last = self._first_unread(device, entries), self._last_read.get(device)
        # Times are in microseconds. An allocation is placed at the beginning of its microsecond and a free at the end,
        # so that accesses lie between them.
        time_ns = entries.time_us * _NS_PER_US - self._epoch_ns + np.isin(entries.kind, _FREES) * (_NS_PER_US - 1)
        time_ns = np.maximum.accumulate(np.maximum(time_ns[first:], last.time_ns if last else 0))
        if len(time_ns):
            self._remember(device, entries, len(entries), int(time_ns[-1]))
        kind = entries.kind[first:]
        columns = (
            np.full(len(entries), device),
            np.where(entries.kind == _OOM, entries.device_free, entries.address),
            entries.size,
            entries.stream,
            entries.pool,
            np.full(len(entries), -1),
        )
        rows = rows_from_columns(*(column.astype(np.int64)[first:] for column in columns))
        return [(code, *row, when) for code, row, when in zip(kind.tolist(), rows, time_ns.tolist(), strict=True)]

    def _first_unread(self, device: int, entries: SnapshotEntries) -> int:
        """Index of the first entry that was not read yet."""
        last = self._last_read.get(device)
        if last is None:
            return 0
        assert entries.time_us is not None
        signature = _signature(entries)
        is_near = np.abs(entries.time_us - last.time_us) <= _MAX_TIME_ERROR_US
        candidates = np.flatnonzero(is_near & (signature == last.signature[-1]).all(axis=1))
        if len(candidates):
            scores = [(_num_equal(signature[: index + 1], last.signature), index) for index in candidates.tolist()]
            most_equal = max(number for number, _ in scores)
            best: list[int] = [index for number, index in scores if number == most_equal]
            distance = np.abs(entries.time_us[best] - last.time_us)
            return 1 + best[int(distance.argmin())]
        if not self._has_gaps:
            self._has_gaps = True
            self._note("CUDA allocator events are missing: torch's history was overwritten before it was read")
        return int(np.searchsorted(entries.time_us, last.time_us, side="right"))

    def _remember(self, device: int, entries: SnapshotEntries, end: int, time_ns: int) -> None:
        assert entries.time_us is not None
        signature = _signature(entries)[max(end - _NUM_COMPARED, 0) : end]
        if len(signature):
            self._last_read[device] = _LastRead(signature, int(entries.time_us[end - 1]), time_ns)

    def close(self) -> None:
        """Leave torch's history as the program set it."""
        self._stop_watching()
        if self._is_ours:
            self._driver.disable_history()


def _signature(entries: SnapshotEntries) -> Array:
    return np.stack([entries.kind.astype(np.int64), entries.address.astype(np.int64), entries.size.astype(np.int64)], 1)


def _num_equal(entries: Array, last: Array) -> int:
    """Number of entries at the end of two lists that are equal."""
    length = min(len(entries), len(last))
    is_equal = (entries[len(entries) - length :] == last[len(last) - length :]).all(axis=1)[::-1]
    return int(np.argmin(is_equal)) if not is_equal.all() else length


def rows_from_columns(*columns: Any) -> Sequence[tuple[int, int, int, int, int, int]]:
    """Tuples of the columns device, address and four more, for ``CudaRow``."""
    device, address, *rest = columns
    # Addresses of 2**63 and above are stored as their two's complement.
    return list(zip(device.tolist(), address.view(np.uint64).tolist(), *(c.tolist() for c in rest), strict=True))
