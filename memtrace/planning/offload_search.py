"""Which tensors to offload: those that reach a peak with the least added time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np

from memtrace.analysis.bandwidth import CopyBandwidths
from memtrace.format.arrays import Array
from memtrace.planning.bus import free_time_ns
from memtrace.planning.offload_problem import OffloadProblem
from memtrace.planning.offload_schedule import OffloadSchedule, schedule_copies

EXHAUSTIVE_GROUPS: Final = 10
"""Up to this many groups of tensors, all combinations are tried."""
MAX_SCHEDULES: Final = 300
"""Number of schedules that the search computes for more groups."""


def least_peak_bytes(problem: OffloadProblem) -> int:
    """Return the least peak that offloading can reach, however long the copies take."""
    return int(problem.lowest_level(np.ones(len(problem.size), bool)).max())


def choose_tensors(
    problem: OffloadProblem,
    limit_bytes: int,
    bandwidths: CopyBandwidths | None,
    *,
    max_schedules: int = MAX_SCHEDULES,
) -> OffloadSchedule | None:
    """Return the schedule with the least added time whose peak is at most ``limit_bytes``; None: cannot be reached.

    Of schedules that add the same time, the one that copies the fewest bytes. All combinations are tried where there
    are few; otherwise tensors are added as Capuchin does (those first that swap without overhead, the longest free time
    first), then single tensors are removed, added and exchanged as long as that helps.

    Args:
        problem: The step.
        limit_bytes: The peak to reach.
        bandwidths: Cost of copies; None: unknown.
        max_schedules: Number of schedules to compute; below ``MAX_SCHEDULES`` not all combinations are tried.
    """
    search = _Search(problem, limit_bytes, bandwidths, max_schedules)
    if problem.num_groups <= EXHAUSTIVE_GROUPS and max_schedules >= MAX_SCHEDULES:
        return search.try_all()
    start = _cover(problem, limit_bytes, bandwidths)
    if start is None:
        return None
    search.attempt(start)
    if search.best is None:
        search.attempt(np.ones(problem.num_groups, bool))
    search.improve()
    return search.best


@dataclass
class _Search:
    problem: OffloadProblem
    limit_bytes: int
    bandwidths: CopyBandwidths | None
    max_schedules: int
    best: OffloadSchedule | None = None
    groups: Array = field(default_factory=lambda: np.zeros(0, bool))
    """The groups of ``best``, a mask."""
    num_schedules: int = 0

    def attempt(self, groups: Array) -> bool:
        """Compute the schedule of some groups (a mask), and return whether it is the best so far."""
        self.num_schedules += 1
        schedule = schedule_copies(self.problem, groups[self.problem.group], self.limit_bytes, self.bandwidths)
        if schedule is None or (self.best is not None and self._cost(schedule) >= self._cost(self.best)):
            return False
        self.best, self.groups = schedule, groups.copy()
        return True

    def _cost(self, schedule: OffloadSchedule) -> tuple[int, int]:
        return round(schedule.added_ns), int(self.problem.size[schedule.tensor].sum())

    def try_all(self) -> OffloadSchedule | None:
        """Return the best schedule of all combinations of groups."""
        num_groups = self.problem.num_groups
        for code in range(1 << num_groups):
            self.attempt((code >> np.arange(num_groups)) & 1 == 1)
        return self.best

    def improve(self) -> None:
        """Remove, add and exchange single groups until nothing helps, or enough schedules have been computed."""
        weight = np.bincount(self.problem.group, self.problem.size, minlength=self.problem.num_groups)
        order = np.argsort(-weight, kind="stable").tolist()
        improves = self.best is not None
        while improves:
            improves = self._flip_each(order)
            if not improves and self.best is not None and self.best.added_ns > 0:
                improves = self._exchange_each(order)

    def _flip_each(self, order: list[int]) -> bool:
        improves = False
        for group in order:
            # Another tensor can help only where time is lost.
            if self.groups[group] or (self.best is not None and self.best.added_ns > 0):
                improves |= self._attempt_flip(group)
        return improves

    def _exchange_each(self, order: list[int]) -> bool:
        inside = [group for group in reversed(order) if self.groups[group]]
        outside = [group for group in order if not self.groups[group]]
        return any(self._attempt_flip(one, other) for one in inside for other in outside)

    def _attempt_flip(self, *groups: int) -> bool:
        if self.num_schedules >= self.max_schedules:
            return False
        flipped = self.groups.copy()
        flipped[list(groups)] ^= True
        return self.attempt(flipped)


def _cover(problem: OffloadProblem, limit_bytes: int, bandwidths: CopyBandwidths | None) -> Array | None:
    """Return groups (a mask) without which some piece would exceed the limit, whatever the copies; None: impossible."""
    score = _scores(problem, bandwidths)
    chosen = np.zeros(problem.num_groups, bool)
    while True:
        level = problem.lowest_level(chosen[problem.group])
        piece = int(level.argmax())
        if level[piece] <= limit_bytes:
            return chosen
        covers = (problem.free <= piece) & (piece < problem.back) & ~chosen[problem.group]
        if not covers.any():
            return None
        candidates = np.unique(problem.group[covers])
        chosen[candidates[np.argmax(score[candidates])]] = True


def _scores(problem: OffloadProblem, bandwidths: CopyBandwidths | None) -> Array:
    """Return a number for each group, the highest for the one to offload first: free time, or less than 0 for a stall.

    Source: Capuchin (ASPLOS 2020), candidates in the order of their free time FT.
    """
    if bandwidths is None:
        score = problem.size.astype(np.float64)
    else:
        pairs = zip(problem.size.tolist(), problem.intervals_ns().tolist(), strict=True)
        free_ns = np.array([free_time_ns(size, interval, bandwidths) for size, interval in pairs])
        score = np.where(free_ns >= 0, free_ns, free_ns / np.maximum(problem.size, 1))
    lowest = np.full(problem.num_groups, np.inf)
    np.minimum.at(lowest, problem.group, score)
    return lowest
