"""Every rank and device of a job at a glance: what each holds at its peak, the peaks of its steps, and outliers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.peak import find_peak, peak_by_category
from memtrace.analysis.ranks import IMBALANCE_THRESHOLD, RankComparison, RankSummary, compare_summaries, summarize_rank
from memtrace.analysis.steps import device_step_peaks, step_columns
from memtrace.analysis.timeline import select_plot_points
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.trace import Trace

MIN_RANKS: Final = 4
"""Smallest number of ranks of which some can be outliers."""
OUTLIER_DEVIATIONS: Final = 3.5
"""An outlier is at least this many standard deviations from the median, estimated by the median absolute deviation."""
_DEVIATIONS_PER_MAD: Final = 1.4826
"""Standard deviation of normally distributed values, in median absolute deviations."""


@dataclass(frozen=True)
class DeviceLoad:
    """Memory of one device of one rank."""

    rank: int
    device: str
    peak_bytes: int
    """Peak of the requested bytes."""
    bytes_by_category: dict[str, int]
    """Live bytes at the peak by category."""
    step: Array
    """Numbers of the steps."""
    step_peak_bytes: Array
    """Peak of each step."""


@dataclass(frozen=True)
class RankOutlier:
    """A rank that differs from the other ranks."""

    rank: int
    measure: str
    """What differs: ``peak``, ``end``, ``compute``, or a category (live bytes at the peak)."""
    value: int
    """Bytes, or nanoseconds of ``compute``."""
    median: int
    """The same of the median rank."""


@dataclass(frozen=True)
class RankOverview(Displayed):
    """All ranks and devices of a job."""

    comparison: RankComparison
    loads: tuple[DeviceLoad, ...]
    """Every device of every readable rank that has memory events, by rank."""
    outliers: tuple[RankOutlier, ...]
    """Ranks that differ from the others, the largest deviation first."""

    @property
    def main_loads(self) -> tuple[DeviceLoad, ...]:
        """The fullest device of each rank, accelerators before the CPU."""
        devices = {summary.rank: summary.device for summary in self.comparison.ranks}
        return tuple(load for load in self.loads if devices[load.rank] == load.device)


@dataclass(frozen=True)
class StepPeakGrid:
    """The peaks of the steps of many ranks."""

    ranks: tuple[int, ...]
    step: Array
    """Numbers of the steps: of many, the ones in which some rank has the highest peak of its neighbourhood."""
    peak_bytes: Array
    """Ranks x steps, in bytes; NaN where a rank lacks the step."""
    num_steps: int
    """Number of all steps."""


def survey_ranks(trace: Trace) -> RankOverview:
    """Return the memory of every rank and device of a trace, and which ranks differ from the others (cached)."""
    return trace.cached(_survey_ranks)


def _survey_ranks(trace: Trace) -> RankOverview:
    summaries: list[RankSummary] = []
    loads: list[DeviceLoad] = []
    for rank in trace.each_rank():
        summary = summarize_rank(rank)
        summaries.append(summary)
        if summary.peak_bytes is not None:
            loads += _device_loads(rank, summary.rank)
    return RankOverview(compare_summaries(trace, summaries), tuple(loads), tuple(find_outliers(summaries)))


def step_peak_grid(loads: Sequence[DeviceLoad], max_steps: int) -> StepPeakGrid:
    """Return the peaks of at most ``max_steps`` steps of some ranks; the highest peak of all is always included."""
    steps = np.unique(np.concatenate([np.empty(0, np.int64), *(load.step for load in loads)]))
    peaks = np.full((len(loads), len(steps)), np.nan)
    for row, load in enumerate(loads):
        peaks[row, np.searchsorted(steps, load.step)] = load.step_peak_bytes
    highest = np.nanmax(peaks, axis=0, initial=0) if len(steps) and len(loads) else np.empty(0)
    kept = select_plot_points(highest, max_steps)
    return StepPeakGrid(tuple(load.rank for load in loads), steps[kept], peaks[:, kept], len(steps))


def find_outliers(summaries: Sequence[RankSummary]) -> list[RankOutlier]:
    """Return the ranks that differ from the median rank, the largest deviation first.

    An outlier deviates by more than 5 % of the median and by ``OUTLIER_DEVIATIONS`` robust standard deviations.
    """
    outliers: list[tuple[float, RankOutlier]] = []
    for measure, values in _measures(summaries):
        numbers = np.array(list(values.values()), np.float64)
        median = float(np.median(numbers))
        distance = np.abs(numbers - median)
        spread = _DEVIATIONS_PER_MAD * float(np.median(distance))
        largest = max(OUTLIER_DEVIATIONS * spread, (IMBALANCE_THRESHOLD - 1) * median)
        for place in np.flatnonzero(distance > largest).tolist():
            rank = list(values)[place]
            share = distance[place] / median if median else np.inf
            outliers.append((share, RankOutlier(rank, measure, values[rank], round(median))))
    outliers.sort(key=lambda outlier: (-outlier[0], outlier[1].rank))
    return [outlier for _, outlier in outliers]


def _measures(summaries: Sequence[RankSummary]) -> Iterator[tuple[str, dict[int, int]]]:
    """Return the measures that enough ranks have, with the value of each rank."""
    known = [summary for summary in summaries if summary.peak_bytes is not None]
    categories = dict.fromkeys(name for summary in known for name in summary.bytes_by_category)
    columns = {
        "peak": {summary.rank: summary.peak_bytes for summary in known},
        "end": {summary.rank: summary.end_bytes for summary in known},
        "compute": {summary.rank: summary.compute_ns for summary in known},
        **{name: {summary.rank: summary.bytes_by_category.get(name, 0) for summary in known} for name in categories},
    }
    for measure, column in columns.items():
        values = {rank: value for rank, value in column.items() if value is not None}
        if len(values) >= MIN_RANKS:
            yield measure, values


def _device_loads(trace: Trace, rank: int) -> Iterator[DeviceLoad]:
    for device in trace.devices:
        peak_bytes = find_peak(trace, device).requested.bytes
        if peak_bytes:
            categories = {group.name or "unknown": group.bytes for group in peak_by_category(trace, device)}
            yield DeviceLoad(
                rank, device, peak_bytes, categories, step_columns(trace).step, device_step_peaks(trace, device)
            )
