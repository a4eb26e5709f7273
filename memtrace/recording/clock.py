"""Aligns the clocks of the ranks of a job through the job's key-value store.

Rank 0 is the reference. Every other rank asks rank 0 for the time ``NUM_PINGS`` times and keeps the answer with the
shortest round trip, as NTP does. The exchange runs when the recording starts (or as soon as the program has joined its
process group) and again when it ends, which shows the drift. It runs on its own thread with its own connection to the
store and has deadlines, so a rank that does not record or has died blocks nobody.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import torch

from memtrace.format.manifest import ClockOffset
from memtrace.recording.background import BackgroundTask

NUM_PINGS: Final = 16
POLL_SECONDS: Final = 0.02
"""Interval at which the thread checks whether it should stop and whether the process group exists."""
FIRST_POLL_SECONDS: Final = 2e-5
"""First interval between two checks for a key; doubled up to ``POLL_SECONDS``."""
STOP_TIMEOUT_SECONDS: Final = 2.0
"""Maximum time that the end of a recording waits for other ranks."""


@dataclass(frozen=True)
class MeasuredOffset:
    """Difference between the clock of rank 0 and the clock of this rank."""

    offset_ns: int
    """Added to a time of this rank, it gives the time of rank 0."""
    error_ns: int
    """Largest possible error of ``offset_ns``: half a round trip."""


class ClockExchange:
    """One exchange of times between rank 0 and the other ranks.

    Args:
        store: a connection to the job's store that nobody else uses.
        rank: the rank of this process.
        now: the clock of this rank, in nanoseconds.
        key: prefix of the store's keys; unique to this exchange.
    """

    def __init__(self, store: Any, rank: int, now: Callable[[], int], key: str) -> None:
        self._store = store
        self._rank = rank
        self._now = now
        self._key = key

    def measure_offset(self, should_stop: Callable[[], bool]) -> MeasuredOffset | None:
        """The offset from the clock of rank 0; None if ``should_stop`` became true before the first answer."""
        ticket = self._store.add(f"{self._key}/tickets", 1)
        self._store.set(f"{self._key}/ticket/{ticket}", str(self._rank))
        best: MeasuredOffset | None = None
        for ping in range(NUM_PINGS):
            sent_ns = self._now()
            self._store.set(f"{self._key}/ask/{self._rank}/{ping}", "")
            answer = self._get(f"{self._key}/answer/{self._rank}/{ping}", should_stop)
            received_ns = self._now()
            if answer is None:
                return best
            error_ns = (received_ns - sent_ns + 1) // 2
            if best is None or error_ns < best.error_ns:
                best = MeasuredOffset(int(answer) - (sent_ns + received_ns) // 2, error_ns)
        return best

    def serve(self, num_ranks: int, should_stop: Callable[[], bool]) -> int:
        """Answer ``num_ranks`` ranks in the order of their requests; return how many asked before ``should_stop``."""
        for num_served in range(num_ranks):
            rank = self._get(f"{self._key}/ticket/{num_served + 1}", should_stop)
            if rank is None:
                return num_served
            for ping in range(NUM_PINGS):
                if self._get(f"{self._key}/ask/{int(rank)}/{ping}", should_stop) is None:
                    break
                self._store.set(f"{self._key}/answer/{int(rank)}/{ping}", str(self._now()))
        return num_ranks

    def _get(self, key: str, should_stop: Callable[[], bool]) -> bytes | None:
        """The value of a key as soon as it is set. The store's own wait would print its timeouts to stderr."""
        pause = FIRST_POLL_SECONDS
        while not self._store.check([key]):
            if should_stop():
                return None
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        value: bytes = self._store.get(key)
        return value


class ClockAligner:
    """Aligns the clock of this rank while a recording runs.

    Args:
        trace_name: name of the trace; the same on all ranks. The store keeps its keys as long as the job runs, so every
            recording of that name in this process also has a number.
        rank: the rank of this process.
        now: the clock of this rank, in nanoseconds.
    """

    _num_recordings: ClassVar[Counter[str]] = Counter()

    def __init__(self, trace_name: str, rank: int, now: Callable[[], int]) -> None:
        self._key = f"memtrace/clock/{trace_name}/{self._num_recordings[trace_name]}"
        self._num_recordings[trace_name] += 1
        self._rank = rank
        self._now = now
        self._stopping = threading.Event()
        self._deadline = 0.0
        self._offset = ClockOffset()
        self._task = BackgroundTask(self._run)

    def start(self) -> None:
        """Start the exchange on its own thread."""
        self._task.start()

    def stop(self) -> ClockOffset:
        """Measure the drift, end the thread and return the result."""
        self._deadline = time.monotonic() + STOP_TIMEOUT_SECONDS
        self._stopping.set()
        self._task.finish(STOP_TIMEOUT_SECONDS + 1)
        return self._offset

    def _run(self) -> None:
        while not torch.distributed.is_initialized():
            if self._stopping.wait(POLL_SECONDS):
                self._update(note="the program never joined a process group")
                return
        try:
            self._exchange()
        except Exception as error:  # the store belongs to the program: its errors must not reach the program through us
            self._update(note=f"{type(error).__name__}: {error}".splitlines()[0])

    def _exchange(self) -> None:
        default_store: Any = torch.distributed.distributed_c10d._get_default_store()
        num_others = torch.distributed.get_world_size() - 1
        store = default_store.clone()
        at_start = ClockExchange(store, self._rank, self._now, f"{self._key}/begin")
        at_end = ClockExchange(store, self._rank, self._now, f"{self._key}/end")
        if self._rank == 0:
            self._update(offset_ns=0, error_ns=0)
            num_served = at_start.serve(num_others, self._stopping.is_set)
            self._stopping.wait()
            at_end.serve(num_served, self._is_past_deadline)
            self._update(drift_ns=0)
            return
        first = at_start.measure_offset(self._stopping.is_set)
        if first is None:
            self._update(note="rank 0 did not answer")
            return
        self._update(offset_ns=first.offset_ns, error_ns=first.error_ns)
        self._stopping.wait()
        last = at_end.measure_offset(self._is_past_deadline)
        if last is not None:
            self._update(drift_ns=last.offset_ns - first.offset_ns)

    def _update(self, **fields: Any) -> None:
        self._offset = replace(self._offset, **fields)

    def _is_past_deadline(self) -> bool:
        return time.monotonic() > self._deadline
