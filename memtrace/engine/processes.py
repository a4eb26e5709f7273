"""Worker processes on this machine."""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from types import TracebackType
from typing import Final, TypeVar

from memtrace.engine.heap import keep_freed_memory
from memtrace.engine.runners import MAX_ATTEMPTS, WorkerError, describe_death
from memtrace.machine_memory import available_memory_bytes
from memtrace.processors import count_cores

T = TypeVar("T")
R = TypeVar("R")

WORKER_BYTES: Final = 1 << 30
"""Memory of the machine for each worker process: fewer are started where there is less."""
_UNSAFE_TO_FORK: Final = ("torch", "distributed")
"""Packages whose threads hold locks that a fork would copy: those of OpenMP, of CUDA and of Dask's event loop."""
_AHEAD: Final = 2
"""Tasks for each worker that run, or wait to, before the earlier results have been taken: bounds memory."""


class Processes:
    """Runs tasks in worker processes, each of which runs one task at a time.

    They are forked where that is safe, and then need no time to import what this process has imported. A process that
    dies ends the others with it: all are replaced. The tasks that were running are then run alone, so that it shows
    which of them is to blame.

    Args:
        num_workers: number of processes.
    """

    is_local = False

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._pool: ProcessPoolExecutor | None = None
        self.is_forked = False
        """Whether the processes run and were forked, so that they begin with tasks at once."""

    def fork(self) -> None:
        """Start the processes if they can be forked; else they start with the first task, which reports failures."""
        if self._pool is None and can_fork():
            # NumPy and memtrace import these where they are first needed, which would be in every process.
            import numpy.ma  # noqa: F401
            import pyarrow.parquet  # noqa: F401

            with suppress(OSError):
                self._pool = self._create_pool()

    def start(self, prepare: Callable[[int], object]) -> None:
        """Start the processes, unless they run; each runs a function first that imports what it needs."""
        if self._pool is not None:
            return
        for number in range(self.num_workers):
            self._submit(prepare, number)

    def map(self, function: Callable[[T], R], tasks: Sequence[T]) -> Iterator[R | WorkerError]:
        """Yield the result of each task, in the order of the tasks."""
        waiting: deque[tuple[int, Future[R]]] = deque()
        attempts = [0] * len(tasks)
        suspects: set[int] = set()
        submitted = 0
        while submitted < len(tasks) or waiting:
            limit = 1 if suspects else _AHEAD * self.num_workers
            while submitted < len(tasks) and len(waiting) < limit:
                future = self._submit(function, tasks[submitted])
                if future is None:
                    break
                waiting.append((submitted, future))
                submitted += 1
            try:
                if not waiting:
                    raise BrokenProcessPool
                number, future = waiting[0]
                result = future.result()
            except BrokenProcessPool:
                self._replace_pool()
                in_flight = [number for number, _ in waiting] or [submitted]
                waiting.clear()
                submitted = in_flight[0]
                suspects.update(in_flight)
                # Of several tasks any can be to blame; the first runs alone from now on.
                attempts[submitted] += len(in_flight) == 1
                if attempts[submitted] >= MAX_ATTEMPTS:
                    suspects.discard(submitted)
                    yield WorkerError(describe_death(attempts[submitted]))
                    submitted += 1
                continue
            waiting.popleft()
            suspects.discard(number)
            yield result

    def _submit(self, function: Callable[[T], R], task: T) -> Future[R] | None:
        """Start a task; None where the processes are broken."""
        try:
            if self._pool is None:
                self._pool = self._create_pool()
            return self._pool.submit(function, task)
        except BrokenProcessPool:
            return None
        except OSError as error:
            raise WorkerError(
                f"worker processes cannot be started ({error.strerror or error}). Pass --workers 1 to use none."
            ) from error

    def _create_pool(self) -> ProcessPoolExecutor:
        """Return a pool whose processes run if they could be forked, and start with the first tasks if not."""
        self.is_forked = can_fork()
        if not self.is_forked:
            return ProcessPoolExecutor(self.num_workers, multiprocessing.get_context("spawn"), _begin_worker)
        pool = ProcessPoolExecutor(self.num_workers, multiprocessing.get_context("fork"), _begin_worker)
        others = multiprocessing.active_children()
        with warnings.catch_warnings():
            # Python warns of forks beside other threads, those of NumPy and Arrow included.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                pool.submit(_do_nothing)  # the first task forks all processes
            except OSError:
                # The executor leaves behind the processes that could be started, and would wait for them at exit.
                for child in multiprocessing.active_children():
                    if child not in others:
                        child.kill()
                        child.join()
                raise
        return pool

    def _replace_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._pool, self.is_forked = None, False

    def close(self) -> None:
        """End the worker processes."""
        self._replace_pool()

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def can_fork() -> bool:
    """Return whether a fork of this process is safe: no thread can hold a lock that the fork would copy.

    The threads of NumPy and of Arrow, which are idle between calls, are stopped and started around a fork.
    """
    is_alone = threading.active_count() == 1
    return sys.platform == "linux" and is_alone and not any(name in sys.modules for name in _UNSAFE_TO_FORK)


def _do_nothing() -> None:
    """Be the first task of forked processes."""


def _begin_worker() -> None:
    """Leave interrupts to the process that started this one, and other cores to the other workers."""
    import pyarrow as pa

    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pa.set_cpu_count(1)
    pa.set_io_thread_count(1)


def default_workers() -> int:
    """Return how many workers this machine has cores and memory for."""
    available = available_memory_bytes()
    return count_cores() if available is None else max(1, min(count_cores(), available // WORKER_BYTES))
