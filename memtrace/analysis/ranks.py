"""Comparison of the ranks of one job: peak memory, step times, and which rank to inspect first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memtrace.analysis.rank_groups import (
    MeshLayout,
    RankGroup,
    RankOutlier,
    find_outliers,
    group_ranks,
    place_ranks,
)
from memtrace.analysis.rank_reports import rank_reports
from memtrace.analysis.rank_standing import find_first_failure
from memtrace.analysis.rank_summary import RankReport, RankSummary
from memtrace.display import Displayed
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

IMBALANCE_THRESHOLD: Final = 1.05
"""Peaks are balanced while the highest is below this multiple of their mean."""
SLOW_RANK_THRESHOLD: Final = 1.2
"""A rank is slow if its step takes more than this multiple of the median step."""


@dataclass(frozen=True)
class RankComparison(Displayed):
    """All ranks of a job, and which of them stand out."""

    ranks: tuple[RankSummary, ...]
    missing_ranks: tuple[int, ...]
    """Ranks of the job (by its world size) that the trace does not contain."""
    imbalance: float | None
    """Highest peak over the mean of all peaks; None without memory events."""
    slowest_rank: int | None
    """The rank with the longest compute time per step; None where none stands out."""
    rank_to_inspect: int | None
    """The rank to inspect first; None without memory events."""
    reason: str
    """Why this rank, as a clause about it."""
    groups: tuple[RankGroup, ...] = ()
    """The pipeline stages of the job, whose ranks are peers; empty: all ranks are peers."""
    outliers: tuple[RankOutlier, ...] = ()
    """Ranks that differ from their peers, the largest deviation first."""


def compare_ranks(trace: Trace, mesh: MeshLayout | None = None) -> RankComparison:
    """Compare all ranks of a trace. A rank that cannot be read has a summary with its problem.

    Source: events, ops, spans and labels of every rank, and the manifests.

    Args:
        trace: the trace of a job.
        mesh: how the ranks are laid out; None: as the manifests name their coordinates.

    Raises:
        MemtraceError: the mesh has another number of ranks than the job.
    """
    reports = rank_reports(trace)
    unreadable = [RankSummary(rank=number, problem=problem) for number, problem in trace.unreadable.items()]
    summaries = sorted([*(report.summary for report in reports), *unreadable], key=lambda summary: summary.rank)
    missing = tuple(number for number in find_missing_ranks(trace) if number not in trace.unreadable)
    if mesh is not None:
        summaries = place_ranks(summaries, mesh, len(summaries) + len(missing))
    peaks = [summary.peak_bytes for summary in summaries if summary.peak_bytes is not None]
    groups = group_ranks(summaries)
    outliers = find_outliers(summaries, groups)
    rank_to_inspect, reason = _find_failure(trace, reports) or _choose_rank(summaries, outliers)
    return RankComparison(
        ranks=tuple(summaries),
        missing_ranks=missing,
        imbalance=max(peaks) / (sum(peaks) / len(peaks)) if peaks and sum(peaks) else None,
        slowest_rank=_find_slowest(summaries),
        rank_to_inspect=rank_to_inspect,
        reason=reason,
        groups=groups,
        outliers=outliers,
    )


def find_missing_ranks(trace: Trace) -> tuple[int, ...]:
    """Ranks of the job (by its world size) that the trace does not contain."""
    manifests = [rank.manifest for rank in trace.each_rank()]
    world_size = max((manifest.world_size for manifest in manifests), default=0)
    if len(manifests) >= world_size:
        return ()
    return tuple(sorted(set(range(world_size)) - set(trace.ranks)))


def ranks_table(trace: Trace) -> pd.DataFrame:
    """One row per rank.

    Columns: the fields of ``RankSummary`` except ``bytes_by_category``, and one column of bytes per category that any
    rank has at its peak. NA: unknown.
    """
    import pandas as pd

    rows: list[dict[str, Any]] = [asdict(summary) for summary in compare_ranks(trace).ranks]
    frame: pd.DataFrame = pd.DataFrame([{**row, **row.pop("bytes_by_category")} for row in rows])
    table: pd.DataFrame = frame.drop(columns="bytes_by_category", errors="ignore").convert_dtypes()
    return table


def _find_slowest(summaries: Sequence[RankSummary]) -> int | None:
    """The rank whose compute time is clearly above the median; its step where compute times are unknown.

    Unreadable ranks are ignored.
    """
    readable = [summary for summary in summaries if summary.finished is not None]
    for name in ("compute_ns", "step_ns"):
        times = {summary.rank: getattr(summary, name) for summary in readable if getattr(summary, name) is not None}
        if len(times) == len(readable) > 1:
            slowest = max(times, key=lambda rank: times[rank])
            return slowest if times[slowest] > SLOW_RANK_THRESHOLD * float(np.median([*times.values()])) else None
    return None


def _find_failure(trace: Trace, reports: Sequence[RankReport]) -> tuple[int, str] | None:
    """The rank that ran out of memory first, and the reason; None where none did."""
    standings = {report.summary.rank: report.standing for report in reports if report.standing is not None}
    manifests = {rank.ranks[0]: rank.manifest for rank in trace.each_rank()}
    first = find_first_failure([*standings.values()], manifests)
    if first is None:
        return None
    if sum(standing.ran_out_of_memory for standing in standings.values()) == 1:
        return first, "it ran out of memory"
    if standings[first].failed_ns is None:
        return first, "it ran out of memory, and has the highest peak of the ranks that did"
    return first, "it ran out of memory before the others"


def _choose_rank(summaries: Sequence[RankSummary], outliers: Sequence[RankOutlier]) -> tuple[int | None, str]:
    """The rank to inspect first, and the reason."""
    measured = [summary for summary in summaries if summary.peak_bytes is not None]
    if not measured:
        return None, "no rank has memory events"
    if len(summaries) == 1:
        return measured[0].rank, "it is the only rank"
    died = [summary for summary in measured if not summary.finished and summary.problem]
    if died and len(died) < len(summaries):
        # A launcher ends the other ranks when one dies: the rank that ended first is the cause.
        first = min(died, key=lambda summary: math.inf if summary.ended_epoch_ns is None else summary.ended_epoch_ns)
        return first.rank, f"its recording ended before the others: {first.problem}"
    if (differing := _fuller_than_its_peers(outliers)) is not None:
        return differing
    fullest = max(measured, key=lambda summary: summary.peak_bytes or 0)
    peaks = [summary.peak_bytes or 0 for summary in measured]
    mean = sum(peaks) / len(peaks)
    if mean and max(peaks) > IMBALANCE_THRESHOLD * mean:
        return fullest.rank, f"its peak is {max(peaks) / mean:.2f} times the mean peak"
    slowest = _find_slowest(summaries)
    if slowest is not None:
        return slowest, "its steps take longest, and the other ranks wait for it"
    return fullest.rank, "its peak is the highest, but no rank stands out"


def _fuller_than_its_peers(outliers: Sequence[RankOutlier]) -> tuple[int, str] | None:
    """The rank whose peak is farthest above those of its pipeline stage; stages themselves differ by design."""
    for outlier in outliers:
        if outlier.peers is not None and outlier.measure == "peak" and outlier.value > outlier.median > 0:
            ratio = outlier.value / outlier.median
            return outlier.rank, f"its peak is {ratio:.2f} times the median of its peers in {outlier.peers}"
    return None
