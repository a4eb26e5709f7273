"""Every rank and device of a job at a glance: what each holds at its peak, the peaks of its steps, and outliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.rank_reports import rank_reports
from memtrace.analysis.rank_summary import DeviceLoad
from memtrace.analysis.ranks import RankComparison, compare_ranks
from memtrace.analysis.timeline import select_plot_points
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True)
class RankOverview(Displayed):
    """All ranks and devices of a job."""

    comparison: RankComparison
    loads: tuple[DeviceLoad, ...]
    """Every device of every readable rank that has memory events, by rank."""

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
    """Return the memory of every rank and device of a trace, and which ranks differ from their peers (cached)."""
    return trace.cached(_survey_ranks)


def _survey_ranks(trace: Trace) -> RankOverview:
    loads = tuple(load for report in rank_reports(trace) for load in report.loads)
    return RankOverview(compare_ranks(trace), loads)


def choose_loads(overview: RankOverview, max_ranks: int) -> tuple[DeviceLoad, ...]:
    """Return the fullest device of at most ``max_ranks`` ranks, peers beside each other.

    Of a larger job these are the ranks that differ from their peers, and of neighboring ranks the one with the highest
    peak.
    """
    stages = {rank: place for place, group in enumerate(overview.comparison.groups) for rank in group.ranks}
    loads = sorted(overview.main_loads, key=lambda load: (stages.get(load.rank, -1), load.rank))
    if len(loads) <= max_ranks:
        return tuple(loads)
    outliers = list(dict.fromkeys(outlier.rank for outlier in overview.comparison.outliers))[: max_ranks // 2]
    kept = select_plot_points(np.array([load.peak_bytes for load in loads]), max_ranks - len(outliers))
    ranks = {loads[place].rank for place in kept.tolist()} | set(outliers)
    return tuple(load for load in loads if load.rank in ranks)


def step_peak_grid(loads: Sequence[DeviceLoad], max_steps: int) -> StepPeakGrid:
    """Return the peaks of at most ``max_steps`` steps of some ranks; the highest peak of all is always included."""
    steps = np.unique(np.concatenate([np.empty(0, np.int64), *(load.step for load in loads)]))
    peaks = np.full((len(loads), len(steps)), np.nan)
    for row, load in enumerate(loads):
        peaks[row, np.searchsorted(steps, load.step)] = load.step_peak_bytes
    highest = np.nanmax(peaks, axis=0, initial=0) if len(steps) and len(loads) else np.empty(0)
    kept = select_plot_points(highest, max_steps)
    return StepPeakGrid(tuple(load.rank for load in loads), steps[kept], peaks[:, kept], len(steps))
