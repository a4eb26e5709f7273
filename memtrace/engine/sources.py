"""How a trace is opened in any process: workers get the paths, not the data."""

from __future__ import annotations

import threading
import uuid
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from memtrace.errors import TraceError
from memtrace.format.storage import to_path
from memtrace.trace import Trace, load, load_rank


@dataclass(frozen=True)
class TraceSource:
    """Traces, and which rank and steps of them."""

    paths: tuple[str, ...]
    """What ``memtrace.load`` opens; several are the ranks of one job."""
    rank: int | None = None
    """None: all ranks."""
    from_step: int | None = None
    """First step of the window; None: the first recorded."""
    to_step: int | None = None
    """Last step of the window, included; None: the last recorded."""

    is_alone: bool = False
    """Whether workers open the rank without the other ranks of its job."""
    token: str = ""
    """Differs from one question to the next: a worker that outlives a question opens the traces again."""

    @classmethod
    def of(
        cls,
        paths: tuple[str, ...],
        rank: int | None = None,
        from_step: int | None = None,
        to_step: int | None = None,
    ) -> TraceSource:
        """Return a source that worker processes with another working directory can open."""
        located = map(to_path, paths)
        absolute = (str(path.absolute()) if isinstance(path, Path) else path.url for path in located)
        return cls(tuple(absolute), rank, from_step, to_step, token=uuid.uuid4().hex)

    def only(self, trace: Trace, rank: int | None = None) -> TraceSource:
        """Return the source of one rank of an open trace.

        Args:
            trace: the trace that the source names.
            rank: the rank; None: the only one of the trace, or all where it has several.
        """
        if rank is None and len(trace.ranks) > 1:
            return self
        # A rank that is opened with its job knows which other ranks cannot be read.
        is_alone = len(self.paths) == 1 and not trace.unreadable
        return replace(self, rank=trace.ranks[0] if rank is None else rank, is_alone=is_alone)

    def open(self) -> Trace:
        """Open the rank or the ranks, or the window of their steps."""
        trace = _opened.job(self) if self.rank is None else _opened.one_rank(self, self.rank)
        if self.from_step is None and self.to_step is None:
            return trace
        from memtrace.analysis.windows import step_window

        return step_window(trace, self.from_step, self.to_step)


class _Opened(threading.local):
    """What a thread of a worker opened last, with what was read and computed of it.

    Traces are not shared between threads. The next task is often about the same rank; all ranks of a job do not fit in
    memory.
    """

    _job_key: object = None
    _job: Trace
    _rank_key: object = None
    _rank: Trace

    def job(self, source: TraceSource) -> Trace:
        """Return the traces that a source names, with all of their ranks."""
        key = (source.paths, source.token)
        if self._job_key != key:
            self._job_key = self._rank_key = None
            self._job, self._job_key = load(*source.paths), key
        return self._job

    def one_rank(self, source: TraceSource, number: int) -> Trace:
        """Return one rank of the traces that a source names."""
        key = (source.paths, source.token, number)
        if self._rank_key != key:
            self._rank_key = None
            self._rank, self._rank_key = self._open_rank(source, number), key
        return self._rank

    def _open_rank(self, source: TraceSource, number: int) -> Trace:
        if source.is_alone:
            with suppress(TraceError):  # a file, or the folder of the rank itself
                return load_rank(source.paths[0], number)
        return self.job(source).open_rank(number)


_opened = _Opened()
