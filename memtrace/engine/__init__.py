"""Runs analyses of traces in this process, in worker processes, or on a Dask cluster.

    engine = choose_engine(EngineOptions(workers=8))
    with engine:
        engine.map_ranks(trace, source, summarize)

An analysis is a function of a trace, which is mapped over the ranks of a job, or three functions ``partial``, ``merge``
and ``finish``, which are mapped over the parts of a long trace (``memtrace.analysis.by_part``). Results come in the
order of the ranks and parts, so that they do not depend on where they were computed. No other package knows about
parallelism.
"""

from __future__ import annotations

from memtrace.engine.engine import Engine, EngineOptions, RankError, choose_engine
from memtrace.engine.runners import InProcess, Runner, WorkerError
from memtrace.engine.sources import TraceSource

__all__ = ["Engine", "EngineOptions", "InProcess", "RankError", "Runner", "TraceSource", "WorkerError", "choose_engine"]
