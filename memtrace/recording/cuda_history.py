"""Reads torch's own allocator history where the observer cannot see CUDA's allocator itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from memtrace.format.schema import EVENT_KINDS
from memtrace.readers.cuda_snapshot.entries import read_entries
from memtrace.recording.cuda_driver import CudaDriver
from memtrace.recording.observers import CudaRow, Observer

MAX_HISTORY_ENTRIES: Final = 100_000
_FREES: Final = tuple(EVENT_KINDS.index(kind) for kind in ("free", "free_requested"))
_OOM: Final = EVENT_KINDS.index("oom")
_NS_PER_US: Final = 1000


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
        self._lock = threading.Lock()
        self._has_gaps = False
        self._is_ours = driver.enable_history(MAX_HISTORY_ENTRIES)
        self._epoch_ns = time.time_ns() - observer.now()
        self._last_read: dict[int, tuple[int, int]] = {}
        """For each device: time of the last entry that was read, and the number of entries at that time."""

    def read(self) -> int:
        """Pass on the entries since the last call; return the time up to which the history is complete.

        The observer ignores entries once it is stopped.
        """
        with self._lock:
            until_ns = self._observer.now()
            rows: list[CudaRow] = []
            for device, trace in enumerate(self._driver.snapshot().get("device_traces") or []):
                rows += self._new_rows(device, trace)
            self._observer.cuda_events(rows)
            return until_ns

    def _new_rows(self, device: int, trace: Sequence[Mapping[str, Any]]) -> list[CudaRow]:
        entries = read_entries([trace])
        if entries.time_us is None or not len(entries):
            return []
        # Times are in microseconds. An allocation is placed at the beginning of its microsecond and a free at the end,
        # so that accesses lie between them.
        time_ns = entries.time_us * _NS_PER_US - self._epoch_ns + np.isin(entries.kind, _FREES) * (_NS_PER_US - 1)
        time_ns = np.maximum.accumulate(time_ns)
        new = self._unread(device, time_ns)
        location = np.where(entries.kind == _OOM, entries.device_free, entries.address)
        columns = (
            np.full(len(entries), device),
            location,
            entries.size,
            entries.stream,
            entries.pool,
            np.full(len(entries), -1),
        )
        kinds, times = entries.kind[new].tolist(), np.maximum(time_ns[new], 0).tolist()
        rows = rows_from_columns(*(column.astype(np.int64)[new] for column in columns))
        return [(kind, *row, when) for kind, row, when in zip(kinds, rows, times, strict=True)]

    def _unread(self, device: int, time_ns: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Indices of the entries that were not read yet."""
        last_ns, num_at_last = self._last_read.get(device, (0, 0))
        if last_ns and time_ns[0] > last_ns and not self._has_gaps:
            self._has_gaps = True
            self._note("CUDA allocator events are missing: torch's history was overwritten before it was read")
        new = np.flatnonzero(time_ns >= last_ns)
        # Several entries can have the time of the last one read; the first ``num_at_last`` of them were read.
        new = new[(np.cumsum(time_ns[new] == last_ns) > num_at_last) | (time_ns[new] > last_ns)]
        end_ns = int(time_ns[-1])
        self._last_read[device] = (end_ns, int((time_ns == end_ns).sum()))
        return new

    def close(self) -> None:
        """Leave torch as it was."""
        if self._is_ours:
            self._driver.disable_history()


def rows_from_columns(*columns: Any) -> Sequence[tuple[int, int, int, int, int, int]]:
    """Tuples of the columns device, address and four more, for ``CudaRow``."""
    device, address, *rest = columns
    # Addresses of 2**63 and above are stored as their two's complement.
    return list(zip(device.tolist(), address.view(np.uint64).tolist(), *(c.tolist() for c in rest), strict=True))
