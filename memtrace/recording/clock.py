"""Ties the clocks of the ranks of one job together over the job's own key-value store.

Rank 0 is the reference: the others ask it for the time, a few times, and believe the answer that came back soonest (as
NTP does). That happens once when the recording begins, or as soon as the program has joined its process group, and
again when it ends, which shows the drift. All of it runs on a thread of its own with a connection of its own, and gives
up by itself: a rank that does not record, or died, keeps nobody waiting.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch

PINGS: Final = 16
LOOK_SECONDS: Final = 0.02
"""How often the thread looks whether it should end, or the process group is there."""
FIRST_PAUSE_SECONDS: Final = 2e-5
END_SECONDS: Final = 2.0
"""How long the end of a recording waits for the others."""


@dataclass(frozen=True)
class Offset:
    """What to add to this rank's time for rank 0's, and by how much that can be wrong at most (half a round trip)."""

    offset_ns: int
    error_ns: int


class ClockExchange:
    """The exchange of one rank.

    Args:
        store: a connection to the store of the job, used by nobody else.
        now: this rank's clock, ns.
        key: what tells this exchange from others over the same store.
    """

    def __init__(self, store: Any, rank: int, now: Callable[[], int], key: str) -> None:
        self._store = store
        self._rank = rank
        self._now = now
        self._key = key

    def ask(self, stop: Callable[[], bool]) -> Offset | None:
        """The offset from rank 0's clock; None where ``stop`` says that it took too long."""
        ticket = self._store.add(f"{self._key}/tickets", 1)
        self._store.set(f"{self._key}/ticket/{ticket}", str(self._rank))
        best: Offset | None = None
        for ping in range(PINGS):
            sent = self._now()
            self._store.set(f"{self._key}/ask/{self._rank}/{ping}", "")
            told = self._get(f"{self._key}/tell/{self._rank}/{ping}", stop)
            received = self._now()
            if told is None:
                return best
            error = (received - sent + 1) // 2
            if best is None or error < best.error_ns:
                best = Offset(int(told) - (sent + received) // 2, error)
        return best

    def tell(self, count: int, stop: Callable[[], bool]) -> int:
        """Answer ``count`` ranks in the order in which they come; how many came before ``stop``."""
        for served in range(count):
            rank = self._get(f"{self._key}/ticket/{served + 1}", stop)
            if rank is None:
                return served
            for ping in range(PINGS):
                if self._get(f"{self._key}/ask/{int(rank)}/{ping}", stop) is None:
                    break
                self._store.set(f"{self._key}/tell/{int(rank)}/{ping}", str(self._now()))
        return count

    def _get(self, key: str, stop: Callable[[], bool]) -> bytes | None:
        """The value of a key once it is there. The store's own wait would write its timeouts to stderr."""
        pause = FIRST_PAUSE_SECONDS
        while not self._store.check([key]):
            if stop():
                return None
            time.sleep(pause)
            pause = min(2 * pause, LOOK_SECONDS)
        value: bytes = self._store.get(key)
        return value


class ClockAligner:
    """Aligns the clock of this rank while a recording runs; ``stop`` gives what the manifest says of it.

    ``name`` is the same on all ranks of a recording. A store keeps its keys for as long as the job lives, so each
    recording of that name in this process has a number too.
    """

    _times_used: ClassVar[Counter[str]] = Counter()

    def __init__(self, name: str, rank: int, now: Callable[[], int]) -> None:
        self._key = f"memtrace/clock/{name}/{self._times_used[name]}"
        self._times_used[name] += 1
        self._rank = rank
        self._now = now
        self._stopping = threading.Event()
        self._deadline = 0.0
        self._found: dict[str, Any] = {"reference_rank": 0, "offset_ns": None, "error_ns": None, "drift_ns": None}
        self._thread = threading.Thread(target=self._run, name="memtrace-clock", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        """Check for drift and end.

        The keys: reference_rank; offset_ns, to be added to this rank's times for those of the reference; error_ns, by
        how much that can be wrong; drift_ns, by how much the offset had changed at the end; note, where something
        was in the way. Unknown is None.
        """
        self._deadline = time.monotonic() + END_SECONDS
        self._stopping.set()
        self._thread.join(END_SECONDS + 1)
        return dict(self._found)

    def _run(self) -> None:
        while not torch.distributed.is_initialized():
            if self._stopping.wait(LOOK_SECONDS):
                self._found["note"] = "the program never joined a process group"
                return
        try:
            self._exchange()
        except Exception as error:  # the store is the program's: whatever it says must not harm the program
            self._found["note"] = f"{type(error).__name__}: {error}".splitlines()[0]

    def _exchange(self) -> None:
        shared: Any = torch.distributed.distributed_c10d._get_default_store()
        others = torch.distributed.get_world_size() - 1
        store = shared.clone()
        begin = ClockExchange(store, self._rank, self._now, f"{self._key}/begin")
        end = ClockExchange(store, self._rank, self._now, f"{self._key}/end")
        if self._rank == 0:
            self._found |= {"offset_ns": 0, "error_ns": 0}
            served = begin.tell(others, self._stopping.is_set)
            self._stopping.wait()
            end.tell(served, self._late)
            self._found["drift_ns"] = 0
            return
        first = begin.ask(self._stopping.is_set)
        if first is None:
            self._found["note"] = "rank 0 did not answer"
            return
        self._found |= {"offset_ns": first.offset_ns, "error_ns": first.error_ns}
        self._stopping.wait()
        last = end.ask(self._late)
        if last is not None:
            self._found["drift_ns"] = last.offset_ns - first.offset_ns

    def _late(self) -> bool:
        return time.monotonic() > self._deadline
