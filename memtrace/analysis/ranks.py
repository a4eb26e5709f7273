"""Comparison of the ranks of one job: peak memory, step times, and which rank to inspect first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memtrace.analysis.attribution import KIND
from memtrace.analysis.coverage import compute_coverage
from memtrace.analysis.peak import Peak, find_peak, peak_by_category
from memtrace.analysis.steps import step_columns
from memtrace.display import Displayed
from memtrace.errors import TraceError
from memtrace.format.arrays import Array
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

IMBALANCE_THRESHOLD: Final = 1.05
"""Peaks are balanced while the highest is below this multiple of their mean."""
SLOW_RANK_THRESHOLD: Final = 1.2
"""A rank is slow if its step takes more than this multiple of the median step."""


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """Memory and time of one rank. None: unknown."""

    rank: int
    device: str | None = None
    """The device with the highest peak; accelerators come before the CPU."""
    peak_bytes: int | None = None
    """Peak of requested bytes on that device."""
    peak_phase: str | None = None
    """Phase in which the peak was reached."""
    bytes_by_category: dict[str, int] = field(default_factory=dict)
    """Live bytes at the peak by category."""
    end_bytes: int | None = None
    """Live bytes at the end of the recording."""
    num_steps: int | None = None
    step_ns: int | None = None
    """Median duration of a step; ranks that wait for each other have equal steps."""
    compute_ns: int | None = None
    """Median time per step in operators other than those of torch.distributed."""
    clock_error_ns: int | None = None
    """Upper bound of the error of the rank's clock against that of rank 0."""
    clock_drift_ns: int | None = None
    """Change of the clock offset against rank 0 over the recording."""
    num_oom: int | None = None
    """Number of allocations that failed."""
    finished: bool | None = None
    """Whether the recording was closed properly."""
    ended_epoch_ns: int | None = None
    """Wall-clock time of the last event."""
    problem: str | None = None
    """Why the recording ended early, or why it cannot be read."""


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


def compare_ranks(trace: Trace) -> RankComparison:
    """Compare all ranks of a trace. A rank that cannot be read has a summary with its problem.

    Source: events, ops, spans and labels of every rank, and the manifests.
    """
    return compare_summaries(trace, [summarize_rank(rank) for rank in trace.each_rank()])


def compare_summaries(trace: Trace, readable: Sequence[RankSummary]) -> RankComparison:
    """Compare the summaries of all ranks of a trace that can be opened; see ``compare_ranks``."""
    unreadable = [RankSummary(rank=number, problem=problem) for number, problem in trace.unreadable.items()]
    summaries = tuple(sorted([*readable, *unreadable], key=lambda summary: summary.rank))
    peaks = [summary.peak_bytes for summary in summaries if summary.peak_bytes is not None]
    rank_to_inspect, reason = _choose_rank(summaries)
    return RankComparison(
        ranks=summaries,
        missing_ranks=tuple(number for number in find_missing_ranks(trace) if number not in trace.unreadable),
        imbalance=max(peaks) / (sum(peaks) / len(peaks)) if peaks and sum(peaks) else None,
        slowest_rank=_find_slowest(summaries),
        rank_to_inspect=rank_to_inspect,
        reason=reason,
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


def fullest_device_peak(trace: Trace) -> Peak | None:
    """The highest peak of any device of a single-rank trace, accelerators before the CPU; None without events."""
    devices = [device for device in trace.devices if device != "cpu"] or list(trace.devices)
    peaks = (find_peak(trace, device) for device in devices)
    return max(peaks, key=lambda device_peak: device_peak.requested.bytes, default=None)


def step_compute_ns(trace: Trace) -> Array | None:
    """Time of every step in operators other than those of torch.distributed; None where durations are unknown.

    Operators that run at the same time on several threads, or within each other (ranges of a Chrome trace), count once.
    """
    steps = step_columns(trace)
    ops = trace.columns("ops", "start_ns", "duration_ns", "name")
    if not trace.has_times or not len(ops["duration_ns"]) or (ops["duration_ns"] < 0).all():
        return None
    names = {int(name): trace.name(int(name)) or "" for name in np.unique(ops["name"])}
    communication = [name for name, text in names.items() if text.startswith("c10d")]
    computes = (ops["duration_ns"] > 0) & ~np.isin(ops["name"], communication)
    order = np.argsort(ops["start_ns"][computes], kind="stable")
    starts = ops["start_ns"][computes][order]
    ends = starts + ops["duration_ns"][computes][order]
    previous_end = np.concatenate([starts[:1], np.maximum.accumulate(ends)[:-1]])
    total = np.concatenate([[0], np.cumsum(np.maximum(ends - np.maximum(starts, previous_end), 0))])
    begin, end = steps.start_ns, steps.start_ns + steps.duration_ns
    compute: Array = total[np.searchsorted(starts, end)] - total[np.searchsorted(starts, begin)]
    return compute


def summarize_rank(trace: Trace) -> RankSummary:
    """Return the summary of a single-rank trace; where it cannot be read, a summary with its problem."""
    (number,) = trace.ranks
    try:
        return _summarize_readable(trace, number)
    except TraceError as error:
        return RankSummary(rank=number, problem=str(error))


def _summarize_readable(trace: Trace, number: int) -> RankSummary:
    coverage = compute_coverage(trace)
    clock = trace.manifest.clock
    ended_early = "the process died while recording"
    begin_epoch_ns, last_event_ns = trace.manifest.t0_epoch_ns, coverage.last_event_ns
    common: dict[str, Any] = {
        "rank": number,
        "num_steps": coverage.num_steps,
        "clock_error_ns": clock.error_ns if clock else None,
        "clock_drift_ns": clock.drift_ns if clock else None,
        "num_oom": int((trace.columns("events", "kind")["kind"] == KIND["oom"]).sum()),
        "finished": coverage.finished,
        "ended_epoch_ns": None if begin_epoch_ns is None or last_event_ns is None else begin_epoch_ns + last_event_ns,
        "problem": coverage.stop_reason if coverage.stop_reason or coverage.finished else ended_early,
    }
    top = fullest_device_peak(trace)
    if top is None:
        return RankSummary(**common)
    duration = step_columns(trace).duration_ns
    compute = step_compute_ns(trace)
    return RankSummary(
        **common,
        device=top.device,
        peak_bytes=top.requested.bytes,
        peak_phase=top.phase,
        bytes_by_category={
            group.name: group.bytes for group in peak_by_category(trace, top.device) if group.name is not None
        },
        end_bytes=top.end_bytes,
        step_ns=int(np.median(duration)) if len(duration) and trace.has_times else None,
        compute_ns=int(np.median(compute)) if compute is not None and len(compute) else None,
    )


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


def _choose_rank(summaries: Sequence[RankSummary]) -> tuple[int | None, str]:
    """The rank to inspect first, and the reason."""
    measured = [summary for summary in summaries if summary.peak_bytes is not None]
    if not measured:
        return None, "no rank has memory events"
    out_of_memory = [summary for summary in measured if summary.num_oom]
    if out_of_memory:
        return max(out_of_memory, key=lambda summary: summary.peak_bytes or 0).rank, "it ran out of memory"
    if len(summaries) == 1:
        return measured[0].rank, "it is the only rank"
    died = [summary for summary in measured if not summary.finished and summary.problem]
    if died and len(died) < len(summaries):
        # A launcher ends the other ranks when one dies: the rank that ended first is the cause.
        first = min(died, key=lambda summary: math.inf if summary.ended_epoch_ns is None else summary.ended_epoch_ns)
        return first.rank, f"its recording ended before the others: {first.problem}"
    fullest = max(measured, key=lambda summary: summary.peak_bytes or 0)
    peaks = [summary.peak_bytes or 0 for summary in measured]
    mean = sum(peaks) / len(peaks)
    if mean and max(peaks) > IMBALANCE_THRESHOLD * mean:
        return fullest.rank, f"its peak is {max(peaks) / mean:.2f} times the mean peak"
    slowest = _find_slowest(summaries)
    if slowest is not None:
        return slowest, "its steps take longest, and the other ranks wait for it"
    return fullest.rank, "its peak is the highest, but no rank stands out"
