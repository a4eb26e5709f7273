"""The ranks that a server shows: their traces, their indexes, and how both follow a recording that is being written."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from memtrace.dashboards.page import view_id
from memtrace.dashboards.server.index_cache import load_index, save_index
from memtrace.dashboards.server.indexing import PartSummarizer, missing_parts, summarize_here
from memtrace.dashboards.server.payloads import WindowPayload, build_window_payload

from memtrace.analysis.indexed_trace import IndexedTrace
from memtrace.analysis.live import GrowingSite, growing_sites
from memtrace.analysis.live_recording import rank_folders
from memtrace.analysis.part_summary import PartSummary
from memtrace.analysis.trace_index import TraceIndex
from memtrace.errors import MemtraceError, TraceError
from memtrace.format.schema import MANIFEST_NAME
from memtrace.trace import Trace, load

FOLLOW_SECONDS: Final = 0.5
"""Time between two looks at the manifest of a recording that is being written."""
IDLE_SECONDS: Final = 10.0
"""A recording is not followed while no request has come for this long."""
NUM_GROWING_SITES: Final = 5
MIN_PARTS_TO_KEEP: Final = 12
"""Summaries of fewer parts are made again sooner than an index is read."""
NUM_ATTEMPTS: Final = 5
"""A ring can delete a part between the moments at which the folder is listed and the part is read."""


@dataclass(frozen=True)
class Progress:
    """How far the index of a rank is."""

    num_parts: int
    num_indexed: int

    @property
    def is_complete(self) -> bool:
        """Whether every part is in the index."""
        return self.num_indexed >= self.num_parts


class ServedRank:
    """One rank. ``update`` is called on one thread, everything else on any.

    Attributes:
        rank: the number of the rank.
        folder: its folder; None for a file of another tool.
        current: the trace with its index; None until the first index is complete.
        progress: how far the index is.
        error: why the trace cannot be read any more; None if it can.
        version: counts the changes of ``current``.
        lock: held while ``current`` is read or changed.
    """

    def __init__(
        self, paths: Sequence[str], rank: int, folder: Path | None, summarize: PartSummarizer = summarize_here
    ) -> None:
        self.rank = rank
        self.folder = folder
        self.current: IndexedTrace | None = None
        self.progress = Progress(1, 0)
        self.error: str | None = None
        self.version = 0
        self.lock = threading.RLock()
        self._paths = tuple(paths)
        self._summarize = summarize
        self._index: TraceIndex | None = None
        self._whole: dict[str, WindowPayload | None] = {}
        self._seen: tuple[int, int] | None = None
        self._sites: tuple[int, dict[str, list[GrowingSite]]] = (-1, {})

    def update(self, trace: Trace | None = None) -> None:
        """Bring trace and index up to date where the recording has written more.

        Args:
            trace: the trace of the rank, where it is open already.
        """
        seen = self._manifest_identity()
        if self.current is not None and (seen is None or seen == self._seen):
            return
        for _ in range(NUM_ATTEMPTS):
            self.error = self._try_to_extend(trace)
            if self.error is None or self.folder is None:
                break
            trace = None
            time.sleep(FOLLOW_SECONDS / NUM_ATTEMPTS)
        self._seen = seen if self.error is None else None

    def _try_to_extend(self, trace: Trace | None) -> str | None:
        """Extend the index; return why that was not possible."""
        try:
            self._extend(trace or load(*self._paths).rank(self.rank))
        except (MemtraceError, OSError) as error:
            return str(error)
        return None

    def views(self) -> dict[str, str]:
        """Return the devices with blocks by the identifiers of their views on the page."""
        current = self.current
        devices = current.index.devices if current is not None else []
        return {view_id(self.rank, device): device for device in devices}

    def growing_sites(self, device: str) -> list[GrowingSite]:
        """Return the allocation sites that grow, as of the last part that was read."""
        with self.lock:
            current, (version, by_device) = self.current, self._sites
            if current is None or device not in current.index.devices:
                return []
            if version != self.version:
                by_device = {}
                self._sites = self.version, by_device
            if device not in by_device:
                try:
                    by_device[device] = growing_sites(current.trace, device, NUM_GROWING_SITES)
                except (TraceError, OSError):  # a ring has deleted the part
                    by_device[device] = []
            return by_device[device]

    def _manifest_identity(self) -> tuple[int, int] | None:
        if self.folder is None:
            return None
        try:
            status = (self.folder / MANIFEST_NAME).stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_ino

    def _extend(self, trace: Trace) -> None:
        if self._index is None:
            cached = load_index(self.folder) if self.folder is not None else None
            self._index = cached or TraceIndex()
        index, numbers = self._index, trace.part_numbers
        missing = missing_parts(index, trace)
        self.progress = Progress(len(numbers), len(numbers) - len(missing))
        waiting: list[PartSummary] = []
        for summary in self._summarize(trace, missing):
            if self.current is None:
                index.add(summary)  # nobody reads the index yet
            else:
                waiting.append(summary)
            self.progress = Progress(len(numbers), self.progress.num_indexed + 1)
        with self.lock:
            for summary in waiting:
                index.add(summary)
            if numbers:
                index.drop_before(numbers[0])
            index.spans.extend(trace)
            current = IndexedTrace(trace, index)
            if self.folder is not None and len(missing) >= MIN_PARTS_TO_KEEP:
                save_index(self.folder, index)
            # What is asked first is computed now; later versions of a recording may never be asked for.
            is_first = self.current is None
            self._whole = {device: build_window_payload(current, device) for device in index.devices if is_first}
            self.current = current
            self.version += 1

    def payload(self, device: str, start_ns: int | None, end_ns: int | None) -> WindowPayload | None:
        """Return the payload of a window of a device, while ``lock`` is held; None where it has no blocks there."""
        assert self.current is not None
        if start_ns is None and end_ns is None:
            if device not in self._whole:
                self._whole[device] = build_window_payload(self.current, device)
            return self._whole[device]
        return build_window_payload(self.current, device, start_ns, end_ns)


class ServedTrace:
    """All ranks of the traces that a server shows, kept up to date on a thread.

    Args:
        paths: folders or files, as for ``memtrace.load``.
        rank: show only this rank; None: all.
        follow: follow recordings that are being written.
        capacity_bytes: memory that every device has; None: as the recordings found it.
        summarize: summarizes the parts of a rank for its index.

    Attributes:
        name: the traces as the user named them.
        ranks: the ranks by number.
        follow: whether recordings are followed.
        capacity_bytes: memory of every device; None: as the recordings found it.
    """

    def __init__(
        self,
        paths: Sequence[str],
        rank: int | None = None,
        *,
        follow: bool = False,
        capacity_bytes: int | None = None,
        summarize: PartSummarizer = summarize_here,
    ) -> None:
        trace = load(*paths)
        chosen = trace.ranks if rank is None else (trace.rank(rank).ranks[0],)
        folders = rank_folders(Path(paths[0])) if len(paths) == 1 and Path(paths[0]).is_dir() else {}
        self.name = " ".join(paths)
        self.follow = follow
        self.capacity_bytes = capacity_bytes
        self._trace = trace if rank is None else trace.rank(rank)
        self._page: str | None = None
        self._page_lock = threading.Lock()
        self._asked_at = time.monotonic()
        self.ranks = {number: ServedRank(paths, number, folders.get(number), summarize) for number in chosen}
        self._traces = {number: trace.rank(number) for number in chosen}
        self._is_over = threading.Event()
        self.is_indexed = threading.Event()
        """Set when every rank was indexed once."""
        self._thread = threading.Thread(target=self._keep_up, name="memtrace-index", daemon=True)

    def cached_page(self, make: Callable[[Trace], str]) -> str:
        """Return the page of the whole trace, made once."""
        with self._page_lock:
            if self._page is None:
                self._page = make(self._trace)
            return self._page

    def note_request(self) -> None:
        """Note that somebody watches: a recording is followed only then, because it shares the machine."""
        self._asked_at = time.monotonic()

    def start(self) -> None:
        """Begin to index, and to follow."""
        self._thread.start()

    def stop(self) -> None:
        """Stop to follow."""
        self._is_over.set()

    def _keep_up(self) -> None:
        for number, served in self.ranks.items():
            served.update(self._traces.pop(number))
        self.is_indexed.set()
        while self.follow and not self._is_over.wait(FOLLOW_SECONDS):
            if time.monotonic() - self._asked_at < IDLE_SECONDS:
                for served in self.ranks.values():
                    served.update()
