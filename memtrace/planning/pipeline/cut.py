"""Where to cut a model into stages: exact dynamic programmes over all cuts into runs of layers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from memtrace.errors import MemtraceError
from memtrace.planning.pipeline.costs import Layer
from memtrace.planning.pipeline.profile import WorkerProfile, profiles
from memtrace.planning.pipeline.ranges import RangeCosts
from memtrace.planning.pipeline.table import Schedule

Floats = npt.NDArray[np.float64]

TIME: Final = "time"  # the slowest stage as fast as can be, then the fullest worker as empty as can be
MEMORY: Final = "memory"  # the other way round
OBJECTIVES: Final = (TIME, MEMORY)
MAX_PAIRED_LAYERS: Final = 160
"""Most layers for which cuts of workers with two mirrored stages are searched exactly."""


@dataclass(frozen=True)
class Cut:
    """A cut of a model into stages."""

    first_layers: tuple[int, ...]
    """Stage s is the run of layers that begins with ``first_layers[s]``."""
    exact: bool
    """Whether no other cut is better by the peaks that the search assumes. False where several stages that
    are not a mirrored pair share a worker: there each stage is given an equal share of its worker's
    memory."""


def balanced_cut(
    layers: Sequence[Layer],
    schedule: Schedule,
    *,
    objective: str = TIME,
    capacity_bytes: int | None = None,
    recompute: bool = False,
    boundaries: bool = False,
) -> Cut | None:
    """The best cut of ``layers`` into the stages of ``schedule``; None where none fits ``capacity_bytes``.

    ``time``: the smallest maximum over stages of forward plus backward seconds, and of those cuts the one
    with the smallest maximum over workers of peak bytes. ``memory``: the same the other way round. The peak
    is what the schedule's order brings together at the worst: state, activations in flight and the largest
    temporary; an upper bound, as the moments of these need not meet. Raises MemtraceError where there are
    fewer layers than stages.
    """
    if objective not in OBJECTIVES:
        raise MemtraceError(f"unknown objective {objective!r}: choose {', '.join(OBJECTIVES)}")
    if len(layers) < schedule.num_stages:
        raise MemtraceError(f"{len(layers)} layers cannot be cut into {schedule.num_stages} stages")
    costs = RangeCosts(layers, recompute=recompute, boundaries=boundaries)
    search = _search_for(costs, schedule, len(layers))
    limit = float("inf") if capacity_bytes is None else float(capacity_bytes)
    seconds = costs.seconds()
    unlimited = np.full_like(seconds, np.inf)
    if objective == TIME:
        best = search.minimise_time(seconds, limit)
        if best is None:
            return None
        slowest = _worst(seconds, best)
        found = search.minimise_memory(np.where(seconds <= slowest, 0.0, unlimited), limit)
    else:
        best = search.minimise_memory(np.zeros_like(seconds), limit)
        if best is None:
            return None
        found = search.minimise_time(seconds, search.peak(best))
    assert found is not None
    return Cut(found, search.exact)


def _worst(costs: Floats, first_layers: Sequence[int]) -> float:
    bounds = [*first_layers, len(costs) - 1]
    return float(max(costs[begin, end] for begin, end in itertools.pairwise(bounds)))


def smallest_maximum(costs: Sequence[Floats]) -> tuple[int, ...] | None:
    """The cut with the smallest maximum of ``costs[s][begin, end]`` over stages s; None if all are infinite.

    ``costs[s]`` is square, one row and column more than there are layers; entries with end <= begin are not
    used. Exact, in (number of stages) x (number of layers)^2.
    """
    size = costs[0].shape[0]
    empty = np.tri(size, dtype=bool)
    best = np.full(size, np.inf)
    best[0] = 0.0
    choices = []
    for stage in costs:
        candidates = np.maximum(best[:, None], np.where(empty, np.inf, stage))
        choices.append(np.argmin(candidates, axis=0))
        best = candidates.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    first_layers, end = [], size - 1
    for choice in reversed(choices):
        end = int(choice[end])
        first_layers.append(end)
    return tuple(reversed(first_layers))


class _Search:
    """Cuts where every stage has its own memory limit: one stage a worker, or an equal share of it."""

    def __init__(self, costs: RangeCosts, workers: Sequence[WorkerProfile], num_stages: int) -> None:
        self.exact = all(len(worker.stages) == 1 for worker in workers)
        self._peaks: list[Floats] = [np.zeros(())] * num_stages
        for worker in workers:
            for index, stage in enumerate(worker.stages):
                peak = len(worker.stages) * costs.peak(worker, index)
                # A stage may lie on several workers: the fullest decides.
                known = self._peaks[stage]
                self._peaks[stage] = np.maximum(known, peak) if known.ndim else peak

    def minimise_time(self, seconds: Floats, limit_bytes: float) -> tuple[int, ...] | None:
        return smallest_maximum([np.where(peak <= limit_bytes, seconds, np.inf) for peak in self._peaks])

    def minimise_memory(self, barred: Floats, limit_bytes: float) -> tuple[int, ...] | None:
        found = smallest_maximum([peak + barred for peak in self._peaks])
        return found if found is not None and self.peak(found) <= limit_bytes else None

    def peak(self, first_layers: Sequence[int]) -> float:
        bounds = [*first_layers, self._peaks[0].shape[0] - 1]
        return float(max(peak[b, e] for peak, b, e in zip(self._peaks, bounds, bounds[1:], strict=False)))


class _PairSearch:
    """Cuts where stages s and S - 1 - s share a worker: from both ends of the model to its middle."""

    exact = True

    def __init__(self, costs: RangeCosts, workers: Sequence[WorkerProfile], num_stages: int) -> None:
        self._size = costs.num_layers + 1
        self._num_stages = num_stages
        self._costs = costs
        self._workers: list[list[WorkerProfile]] = [[] for _ in range(num_stages // 2)]
        for worker in workers:
            self._workers[worker.stages[0]].append(worker)

    def minimise_time(self, seconds: Floats, limit_bytes: float) -> tuple[int, ...] | None:
        def cost(pair: int, begin: int, end: int) -> Floats:
            inner = slice(begin + 1, end)
            slower = np.maximum(seconds[begin, inner, None], seconds[None, inner, end])
            if np.isinf(limit_bytes):
                return slower
            return np.where(self._pair_peak(pair, begin, end) <= limit_bytes, slower, np.inf)

        return self._sweep(cost)

    def minimise_memory(self, barred: Floats, limit_bytes: float) -> tuple[int, ...] | None:
        def cost(pair: int, begin: int, end: int) -> Floats:
            inner = slice(begin + 1, end)
            peak = self._pair_peak(pair, begin, end) + barred[begin, inner, None] + barred[None, inner, end]
            return np.where(peak <= limit_bytes, peak, np.inf)

        return self._sweep(cost)

    def peak(self, first_layers: Sequence[int]) -> float:
        bounds = [*first_layers, self._size - 1]

        def of(pair: int) -> float:
            begin, i, j, end = bounds[pair], bounds[pair + 1], bounds[-2 - pair], bounds[-1 - pair]
            return float(self._pair_peak(pair, begin, end)[i - begin - 1, j - begin - 1])

        return max(map(of, range(self._num_stages // 2)))

    def _pair_peak(self, pair: int, begin: int, end: int) -> Floats:
        """Peak of the fuller worker of the pair if its stages are layers [begin, i) and [j, end), by i and j from
        begin + 1 to end - 1."""
        peaks = [self._costs.pair_peak(worker, begin, end) for worker in self._workers[pair]]
        peak: Floats = np.maximum.reduce(peaks)
        return peak

    def _sweep(self, cost: Callable[[int, int, int], Floats]) -> tuple[int, ...] | None:
        """The smallest maximum of ``cost`` over pairs; state (i, j): layers before i and from j on are
        given."""
        size, half = self._size, self._num_stages // 2
        best = np.full((size, size), np.inf)
        best[0, size - 1] = 0.0
        origins = []
        for pair in range(half):
            following = np.full((size, size), np.inf)
            origin = np.zeros((size, size), dtype=np.int64)
            for begin, end in np.argwhere(np.isfinite(best)):
                inner = slice(begin + 1, end)
                reached = np.maximum(best[begin, end], cost(pair, begin, end))
                better = reached < following[inner, inner]
                following[inner, inner][better] = reached[better]
                origin[inner, inner][better] = begin * size + end
            # The two halves must not cross; in the innermost pair they must meet.
            meet = np.eye(size, dtype=bool) if pair == half - 1 else np.tri(size, k=-1, dtype=bool).T
            best = np.where(meet, following, np.inf)
            origins.append(origin)
        if not np.isfinite(best).any():
            return None
        i, j = divmod(int(np.argmin(best)), size)
        left, right = [], []
        for origin in reversed(origins):
            right.append(j)
            i, j = divmod(int(origin[i, j]), size)
            left.append(i)
        return (*reversed(left), *right)


def _search_for(costs: RangeCosts, schedule: Schedule, num_layers: int) -> _Search | _PairSearch:
    workers = profiles(schedule)
    num_stages = schedule.num_stages
    mirrored = all(len(worker.stages) == 2 and sum(worker.stages) == num_stages - 1 for worker in workers)
    if mirrored and num_layers <= MAX_PAIRED_LAYERS:
        return _PairSearch(costs, workers, num_stages)
    return _Search(costs, workers, num_stages)
