"""Writes what an observer sees to the parts of its traces, off the training thread.

A disk that is full or slow, or memory that runs out, never breaks the training: one warning, and the recording ends
with what was written.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from memtrace.errors import MemtraceError
from memtrace.format import schema
from memtrace.recording import arrow
from memtrace.recording.background import BackgroundTask
from memtrace.recording.observers import Batch, Observer
from memtrace.recording.reserve import AddressSpaceReserve
from memtrace.recording.sink import Rows, TraceSink

if TYPE_CHECKING:
    import pyarrow as pa

    from memtrace.recording.cuda import CudaMonitor

FLUSH_SECONDS: Final = 5.0
SPACE_SECONDS: Final = 5.0
"""Time for which a recording waits for address space."""
SPACE_POLL_SECONDS: Final = 0.1


class Writer:
    """Drains an observer on a thread of its own until it is stopped.

    What is drained goes to the trace of the recording, and to those of the recordings inside it that run at that time.
    Such a recording begins and ends between two batches: what the program did before it is drained first, and waits in
    a queue until the thread writes it.

    Args:
        observer: what is drained.
        sink: the trace of the outermost recording.
        reserve: address space for Arrow.
        cuda: source of events and tables of CUDA; None where there is no CUDA.
    """

    def __init__(
        self, observer: Observer, sink: TraceSink, reserve: AddressSpaceReserve, cuda: CudaMonitor | None = None
    ) -> None:
        self._observer = observer
        self._sink = sink
        sink.write_for(observer)
        self._reserve = reserve
        self._cuda = cuda
        self._inner: list[TraceSink] = []
        self._waiting: list[TraceSink] = []
        self._lock = threading.RLock()  # guards the order of batches in the queue, and the two lists of traces
        self._queue: deque[Callable[[], None]] = deque()
        self._requests: list[threading.Event] = []
        self._names: list[pa.Table] = []
        self._phase_of_name: dict[int, int] = {}
        self._is_stopping = False
        self._is_over = False
        self._task = BackgroundTask(self._run, has_low_priority=True)

    def start(self) -> bool:
        """Begin to write; return whether a thread could be started."""
        return self._task.start()

    def stop(self) -> None:
        """Write what is left and end; call after the observer stopped."""
        self._is_stopping = True
        self._observer.wake()
        self._task.finish()

    def abandon(self) -> None:
        """End without writing, because the recording has not begun."""
        self._is_stopping = True
        self._observer.wake()
        self._task.settle()

    def add(self, sink: TraceSink) -> None:
        """Write what is seen from now on to another trace too; called on another thread.

        Raises:
            MemtraceError: the writer has ended, or is about to.
        """
        with self._lock:
            if self._is_over or self._is_stopping:
                raise MemtraceError("the recording that contains it has ended")
            self._take(at_end=True)
            self._waiting.append(sink)
            self._queue.append(partial(self._begin_inner, sink))
        self._observer.wake()

    def begin_part(self, *, save: bool = False) -> threading.Event:
        """Write what has been seen so far, so that the next parts begin with the live set of now; on another thread.

        Args:
            save: whether traces that are kept in memory are written to disk too.

        Returns:
            Set when that is done, or can no longer be done.
        """
        done = threading.Event()
        with self._lock:
            if self._is_over:
                done.set()
                return done
            self._take(at_end=True)
            self._requests.append(done)
            self._queue.append(partial(self._begin_parts, done, save=save))
        self._observer.wake()
        return done

    def remove(self, sink: TraceSink, last_tables: Mapping[str, pa.Table]) -> None:
        """Return when what has been seen so far is in the parts of an added trace; called on another thread.

        Args:
            sink: the trace, which gets no more rows.
            last_tables: tables of what is true at its end.
        """
        with self._lock:
            if not self._is_over:
                self._take(at_end=True)
                self._queue.append(partial(self._end_inner, sink, last_tables))
        self._observer.wake()
        sink.is_over.wait()

    def _run(self) -> None:
        try:
            self._write_until_stopped()
        except BaseException as error:  # whatever it is, the program must go on
            self._end_early(error)
        finally:
            self._end_all_inner()

    def _end_early(self, error: BaseException) -> None:
        self._reserve.close()  # the warning needs memory, too
        with suppress(Exception):
            self._sink.abandon()
        self._sink.failed(_describe(error, self._sink))

    def _write_until_stopped(self) -> None:
        self._sink.begin()
        lack: MemoryError | None = None
        while not self._must_stop() and (lack := self._wait_for_address_space()) is None:
            due = min(sink.due for sink in (self._sink, *self._inner))
            self._observer.wait(max(0.0, due - time.monotonic()), self._sink.rows_wanted)
            if self._must_stop():  # perhaps because the program ran out of memory: the reserve is needed for the end
                break
            now_ns = self._observer.now()
            self._take(at_end=False)
            failure = self._observer.failure()
            self._write_queue()
            if failure is not None:
                self._sink.flush()
                self._sink.failed(failure)
                return
            self._sink.write_if_due(now_ns)
            for sink in list(self._inner):
                self._protect(sink, partial(sink.write_if_due, now_ns))
        self._reserve.close()
        self._take(at_end=True)
        self._write_queue()
        self._sink.flush(with_manifest=False)
        if lack is not None:
            self._sink.failed(_describe(lack, self._sink))

    def _wait_for_address_space(self) -> MemoryError | None:
        """Return None once there is enough, or the recording is to stop; otherwise the error that ends the recording.

        A program that has used up its address space is often about to fail: its error must still be recorded.
        """
        deadline, rows_wanted = time.monotonic() + SPACE_SECONDS, self._sink.rows_wanted
        while not self._must_stop() and (lack := self._acquire_reserve()) is not None:
            num_rows = self._observer.wait(SPACE_POLL_SECONDS, rows_wanted)
            if num_rows >= rows_wanted or time.monotonic() > deadline:
                return lack
        return None

    def _acquire_reserve(self) -> MemoryError | None:
        try:
            self._reserve.acquire()
        except MemoryError as error:
            return error
        return None

    def _must_stop(self) -> bool:
        return self._is_stopping  # another thread sets it at any time

    # Batches.

    def _take(self, *, at_end: bool) -> None:
        """Put the next batch into the queue; an error is raised on the writer's thread, in its place in the queue."""
        with self._lock:
            self._reserve.release()
            try:
                until_ns = -1 if self._cuda is None else self._cuda.take_history()
                batch = self._observer.drain(-1 if at_end else until_ns)
                tables = {} if self._cuda is None else self._cuda.take_tables()
                self._queue.append(partial(self._append, batch, tables))
            except BaseException as error:
                self._queue.append(partial(_raise, error))

    def _write_queue(self) -> None:
        while self._queue:
            self._queue.popleft()()

    def _append(self, batch: Batch, cuda_tables: Mapping[str, pa.Table]) -> None:
        rows = self._encode(batch, cuda_tables)
        self._sink.append(rows)
        for sink in list(self._inner):
            self._protect(sink, partial(sink.append, rows))

    def _encode(self, batch: Batch, cuda_tables: Mapping[str, pa.Table]) -> Rows:
        columns = arrow.batch_columns(batch)
        tables = {**arrow.encode_batch(columns, batch), **cuda_tables}
        if tables["names"].num_rows:
            self._names.append(tables["names"])
            self._phase_of_name |= {
                row[0]: schema.PHASES.index(row[2]) for row in batch["names"] if row[2] in schema.PHASES
            }
        return Rows(tables, arrow.part_columns(columns, batch, self._phase_of_name))

    def _begin_parts(self, done: threading.Event, *, save: bool) -> None:
        def write(sink: TraceSink) -> None:
            sink.flush()
            if save:
                sink.save()

        try:
            write(self._sink)
            for sink in list(self._inner):
                self._protect(sink, partial(write, sink))
        finally:
            self._requests.remove(done)
            done.set()

    # Recordings inside the outermost one. Whatever happens to one of them, the others go on.

    def _begin_inner(self, sink: TraceSink) -> None:
        self._waiting.remove(sink)
        self._inner.append(sink)
        sink.write_for(self._observer)
        self._protect(sink, lambda: sink.begin_inside(self._sink, self._names))

    def _end_inner(self, sink: TraceSink, last_tables: Mapping[str, pa.Table]) -> None:
        if sink in self._inner:
            self._protect(sink, partial(sink.end, last_tables))
            self._drop(sink)

    def _protect(self, sink: TraceSink, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with suppress(Exception):
                sink.abandon()
            self._drop(sink)
            sink.failed(_describe(error, sink))

    def _drop(self, sink: TraceSink) -> None:
        if sink in self._inner:
            self._inner.remove(sink)
        sink.is_over.set()

    def _end_all_inner(self) -> None:
        with self._lock:
            self._is_over = True
            waiting, self._waiting = self._waiting, []
            for done in self._requests:
                done.set()
        for sink in list(self._inner):
            self._end_inner(sink, {})
        for sink in waiting:
            sink.is_over.set()
        self._sink.is_over.set()


def _raise(error: BaseException) -> None:
    raise error


def _describe(error: BaseException, sink: TraceSink) -> str:
    reason = str(error) or type(error).__name__
    return f"out of memory: {reason}" if isinstance(error, MemoryError) else f"cannot write to {sink.folder}: {reason}"
