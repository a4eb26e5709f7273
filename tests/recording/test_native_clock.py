"""The native observer's clock against the system's."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from memtrace.recording.observers.native_observer import NativeObserver


@pytest.fixture
def observer() -> Iterator[NativeObserver]:
    observer = NativeObserver()
    observer.start(accesses=False, stacks=False, stack_min_bytes=0, device_time_min_bytes=-1)
    yield observer
    observer.stop()
    observer.drain(-1)


def difference(observer: NativeObserver) -> float:
    """The system's clock minus the observer's: of many readings, the one that took the shortest time."""
    readings = []
    for _ in range(200):
        before, now, after = time.perf_counter_ns(), observer.now(), time.perf_counter_ns()
        readings.append((after - before, (before + after) / 2 - now))
    return min(readings)[1]


def test_it_runs_like_the_clock_of_the_system(observer: NativeObserver) -> None:
    first = difference(observer)
    for _ in range(3):
        observer.wait(0.6, 1 << 30)
        observer.drain(-1)
        assert difference(observer) == pytest.approx(first, abs=50_000)


def test_times_do_not_go_back(observer: NativeObserver) -> None:
    last = observer.now()
    for number in range(100_000):
        now = observer.now()
        assert now >= last
        last = now
        if number % 1000 == 0:
            observer.drain(-1)
