"""What commands ask of all ranks of a job, answered by an engine. A rank that cannot be read is reported."""

from __future__ import annotations

from typing import Final, TypeVar

from memtrace.analysis.by_part.summary import LongSummary, PartAnalysis, is_divisible, summarize_parts
from memtrace.analysis.check import LimitCheck, LimitReport, MemoryLimits, check_limits
from memtrace.analysis.options import AnalysisOptions
from memtrace.analysis.rank_groups import MeshLayout
from memtrace.analysis.rank_reports import analyze_reports
from memtrace.analysis.rank_results import UnreadableRank
from memtrace.analysis.rank_standing import RankStanding, choose_standing, measure_standing
from memtrace.analysis.ranks import RankComparison
from memtrace.analysis.ranks import compare_ranks as compare_reported_ranks
from memtrace.analysis.summary import Summary, summarize
from memtrace.engine.engine import Engine, RankError
from memtrace.engine.sources import TraceSource
from memtrace.errors import MemtraceError
from memtrace.planning.verdict import (
    JudgedJob,
    JudgedSummary,
    judge_long_rank,
    judge_rank,
)
from memtrace.trace import Trace

R = TypeVar("R")
S = TypeVar("S")
T = TypeVar("T")

_READING: Final = "summarizing"
_Survey = tuple[Summary, RankStanding]


def survey_rank(trace: Trace, options: AnalysisOptions) -> _Survey:
    """Return the summary of a single-rank trace and its standing in the job."""
    return summarize(trace, options), measure_standing(trace)


def summarize_long_rank(engine: Engine, trace: Trace, source: TraceSource) -> LongSummary | None:
    """Return the summary of a long single-rank trace, analyzed part by part; None where it is not such a trace."""
    if not is_divisible(trace):
        return None

    def run(trace: Trace, analysis: PartAnalysis[T, S, R], task: str) -> R:
        result: R = engine.run_parts(source, trace, analysis, task)
        return result

    return summarize_parts(trace, run)


def judge_ranks(engine: Engine, trace: Trace, source: TraceSource, options: AnalysisOptions) -> JudgedJob:
    """Return the summaries of all ranks of a trace, and the verdict on one of them.

    Args:
        engine: where the ranks are analyzed.
        trace: the trace of one rank or several.
        source: how workers open it.
        options: options of the summary.

    Raises:
        MemtraceError: no rank can be read.
    """
    long: dict[int, LongSummary] = {}
    surveys: dict[int, _Survey | RankError] = {}
    for rank in trace.each_rank():
        (number,) = rank.ranks
        try:
            divided = summarize_long_rank(engine, rank, source)
        except MemtraceError as error:
            surveys[number] = RankError(number, str(error))
            continue
        if divided is not None:
            long[number] = divided
            peak = max(divided.peak_bytes.values(), default=0)
            surveys[number] = divided.summary, RankStanding(number, peak)
    others = tuple(number for number in trace.ranks if number not in surveys)
    surveys |= engine.map_ranks(trace, source, survey_rank, options, task=_READING, ranks=others)
    known = {number: survey for number, survey in sorted(surveys.items()) if not isinstance(survey, RankError)}
    errors = [survey for _, survey in sorted(surveys.items()) if isinstance(survey, RankError)]
    if not known:
        raise MemtraceError(errors[0].reason)
    manifests = {number: trace.open_rank(number).manifest for number in known}
    chosen = choose_standing([standing for _, standing in known.values()], manifests)
    judged = _judge(engine, trace.rank(chosen), source, known[chosen][0], long.get(chosen), options)
    unreadable = tuple(UnreadableRank(error.rank, error.reason) for error in errors)
    return JudgedJob(judged, tuple(summary for summary, _ in known.values()), unreadable)


def _judge(
    engine: Engine,
    trace: Trace,
    source: TraceSource,
    summary: Summary,
    long: LongSummary | None,
    options: AnalysisOptions,
) -> JudgedSummary:
    if long is not None:
        return judge_long_rank(trace, long, options)
    return engine.ask([(trace, source)], judge_rank, summary, options)


def compare_ranks(engine: Engine, trace: Trace, source: TraceSource, mesh: MeshLayout | None = None) -> RankComparison:
    """Compare all ranks of a trace; see ``memtrace.analysis.ranks``. Only ranks without a kept report are analyzed."""
    return compare_reported_ranks(analyze_reports(trace, engine.analyzer(source)), mesh)


def check_rank(trace: Trace, limits: MemoryLimits) -> LimitReport:
    """Compare a single-rank trace with memory limits."""
    return check_limits(trace, limits, rank=trace.ranks[0])


def check_ranks(
    engine: Engine, trace: Trace, source: TraceSource, limits: MemoryLimits, rank: int | None = None
) -> LimitReport:
    """Compare the ranks of a trace with memory limits; see ``memtrace.analysis.check``.

    Args:
        engine: where the ranks are analyzed.
        trace: the trace.
        source: how workers open it.
        limits: the limits, which apply to every rank.
        rank: the only rank to check; None: all.

    Raises:
        MemtraceError: a rank cannot be read, which must not pass.
    """
    unreadable = {} if rank is not None else trace.unreadable
    if unreadable:
        raise MemtraceError(next(iter(unreadable.values())))
    checks: list[LimitCheck] = []
    for _, answer in engine.map_ranks(trace, source, check_rank, limits, task="checking"):
        if isinstance(answer, RankError):
            raise MemtraceError(answer.reason)
        checks += answer.limits
    return LimitReport(all(check.passed for check in checks), tuple(checks))
