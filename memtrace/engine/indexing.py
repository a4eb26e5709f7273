"""Summarizes the parts of a rank for an index, in worker processes where there are many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from memtrace.analysis.part_summary import PartSummary, summarize_part
from memtrace.engine.engine import Engine, EngineOptions, choose_engine
from memtrace.engine.processes import default_workers
from memtrace.engine.runners import InProcess
from memtrace.engine.sources import TraceSource
from memtrace.trace import Trace

MIN_PARTS_FOR_WORKERS: Final = 12
"""Fewer parts are read sooner than processes start."""


def summarize_parts(
    trace: Trace, numbers: Sequence[int], paths: Sequence[str], options: EngineOptions
) -> Iterator[PartSummary]:
    """Yield the summaries of parts of a single-rank trace, in their order.

    Args:
        trace: the trace.
        numbers: the parts.
        paths: what ``memtrace.load`` opened, for the workers.
        options: where the parts are read; without a number of workers and many parts: as many as the machine has cores
            and memory for.

    Raises:
        MemtraceError: a part cannot be read.
    """
    source = TraceSource.of(tuple(paths))
    if len(numbers) < MIN_PARTS_FOR_WORKERS:
        engine = Engine(InProcess())
    elif options.workers is None and options.scheduler is None:
        engine = choose_engine(EngineOptions(default_workers()), trace, source)
    else:
        engine = choose_engine(options, trace, source)
    with engine:
        yield from engine.map_parts(source, trace, summarize_part, numbers)
