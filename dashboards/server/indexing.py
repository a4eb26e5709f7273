"""Builds the index of a rank: in worker processes where the trace is large, and part by part while it grows."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Final

from memtrace.analysis.part_summary import PartSummary, summarize_part
from memtrace.analysis.trace_index import TraceIndex
from memtrace.trace import Trace, load

MAX_WORKERS: Final = 4
MIN_PARTS_FOR_WORKERS: Final = 12
"""Fewer parts are read sooner than processes start."""
_AHEAD: Final = 3
"""Parts for each worker that are read before the earlier ones are in the index."""

_opened: dict[str, Trace] = {}
"""The trace of a worker process, under "trace"."""


def missing_parts(index: TraceIndex, trace: Trace) -> list[int]:
    """Return the parts of a trace that an index lacks."""
    last = index.parts[-1].number if index.parts else -1
    return [number for number in trace.part_numbers if number > last]


def summarize_parts(trace: Trace, paths: Sequence[str], numbers: Sequence[int]) -> Iterator[PartSummary]:
    """Summarize parts of a single-rank trace in order.

    Args:
        trace: the trace.
        paths: what ``load`` opened, for the worker processes.
        numbers: the parts.

    Raises:
        TraceError: a part is damaged.
    """
    num_done = 0
    if len(numbers) >= MIN_PARTS_FOR_WORKERS:
        try:
            for summary in _summarize_in_workers(trace, paths, numbers):
                num_done += 1
                yield summary
        except (BrokenProcessPool, OSError):  # processes cannot be started here, or one was killed
            pass
    for number in numbers[num_done:]:
        yield summarize_part(trace, number)


def _summarize_in_workers(trace: Trace, paths: Sequence[str], numbers: Sequence[int]) -> Iterator[PartSummary]:
    num_workers = min(MAX_WORKERS, os.cpu_count() or 1)
    # Spawned, because the threads of the server may hold locks while this process forks.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _open_in_worker, (tuple(paths), trace.ranks[0])) as pool:
        waiting: list[Future[PartSummary]] = []
        try:
            for number in numbers:
                waiting.append(pool.submit(_summarize_in_worker, number))
                if len(waiting) >= _AHEAD * num_workers:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            pool.shutdown(cancel_futures=True)


def _open_in_worker(paths: tuple[str, ...], rank: int) -> None:
    _opened["trace"] = load(*paths).rank(rank)


def _summarize_in_worker(number: int) -> PartSummary:
    return summarize_part(_opened["trace"], number)
