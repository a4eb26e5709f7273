"""What commands ask of several traces: each is analyzed by a task of its own, and the caller compares the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from memtrace.analysis.cache_share import DataSource
from memtrace.analysis.compare import Run, RunComparison, compare_runs, device_peaks, match_runs, run_facts
from memtrace.analysis.diff import TraceComparison, compare_traces, diff_facts, shared_steps
from memtrace.analysis.stalls import DataStalls, measure_stalls, stall_facts
from memtrace.engine.engine import Engine, RankTask
from memtrace.engine.sources import TraceSource
from memtrace.errors import MemtraceError
from memtrace.trace import Trace

OpenTrace = tuple[Trace, TraceSource]
"""An open trace, and how workers open it."""


def compare_two(engine: Engine, before: OpenTrace, after: OpenTrace) -> TraceComparison:
    """Return the differences between two single-rank traces, each of which is analyzed by a task of its own.

    Raises:
        MemtraceError: one of them cannot be read.
    """
    _compute_each(engine, diff_facts, [before, after])
    shared = shared_steps(before[0], after[0])
    if shared is not None:
        _compute_each(engine, diff_facts, [before, after], shared)
    return compare_traces(before[0], after[0])


def _compute_each(
    engine: Engine, function: Callable[..., object], traces: Sequence[OpenTrace], *arguments: object
) -> None:
    tasks = [RankTask(trace, trace.ranks[0], source, arguments) for trace, source in traces]
    errors = engine.compute(function, tasks, "comparing")
    if errors:
        raise MemtraceError(errors[0][1].reason)


def measure_data_stalls(
    engine: Engine,
    recording: OpenTrace,
    synthetic: OpenTrace | None,
    cached: OpenTrace | None,
    cache_shares: Sequence[float],
    data_source: DataSource | None,
) -> DataStalls:
    """Return how long the steps of a recording wait for data, see ``memtrace.analysis.stalls``.

    Args:
        engine: where the recordings are analyzed, each by a task of its own.
        recording: a single-rank trace.
        synthetic: a recording on data generated in memory; None: no breakdown.
        cached: a recording with all data cached; None: no breakdown.
        cache_shares: shares of the data set to predict steps for; empty: some.
        data_source: how fast data is read; None: by the difference between the recordings.

    Raises:
        MemtraceError: one of them cannot be read, or has no steps.
    """
    _compute_each(engine, stall_facts, [each for each in (recording, synthetic, cached) if each is not None])
    return measure_stalls(
        recording[0],
        synthetic=None if synthetic is None else synthetic[0],
        cached=None if cached is None else cached[0],
        cache_shares=cache_shares,
        source=data_source,
    )


def match_compared_runs(
    engine: Engine, traces: Sequence[OpenTrace], labels: Sequence[str], rank: int | None, device: str | None
) -> tuple[Run, ...]:
    """Return the runs to compare; the peaks by which ranks and devices are chosen are found by tasks.

    Args:
        engine: where the ranks are analyzed.
        traces: traces of one or several ranks.
        labels: one label for each trace.
        rank: rank to compare; None: see ``match_runs``.
        device: device to compare; None: see ``match_runs``.
    """
    tasks = [
        RankTask(trace, number, source)
        for trace, source in traces
        for number in (trace.ranks if rank is None or len(trace.ranks) == 1 else (rank,))
    ]
    reasons = {
        (task.trace, task.number): error.reason
        for task, error in engine.compute(device_peaks, tasks, "finding the peaks")
    }
    opened = [
        trace.without_ranks({number: why for (of, number), why in reasons.items() if of is trace})
        for trace, _ in traces
    ]
    return match_runs(opened, labels, rank=rank, device=device)


def compare_matched_runs(engine: Engine, runs: Sequence[Run], sources: Sequence[TraceSource]) -> RunComparison:
    """Compare runs, each of which is analyzed by a task of its own.

    Args:
        engine: where they are analyzed.
        runs: the runs, as ``match_compared_runs`` returns them.
        sources: how workers open their traces.

    Raises:
        MemtraceError: one of them cannot be read.
    """
    tasks = [RankTask(run.trace, run.rank, source, (run.device,)) for run, source in zip(runs, sources, strict=True)]
    errors = engine.compute(run_facts, tasks, "comparing")
    if errors:
        raise MemtraceError(errors[0][1].reason)
    return compare_runs(runs)
