"""Where to cut a model into stages: exact searches over all cuts into runs of layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Layer
from memtrace.pipeline.profile import WorkerProfile, profiles
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation.memory import PAPER, MemoryModel
from memtrace.pipeline.simulation.ranges import RangeCosts

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

TIME: Final = "time"  # the slowest stage as fast as can be, then the fullest worker as empty as can be
MEMORY: Final = "memory"  # the other way round
OBJECTIVES: Final = (TIME, MEMORY)
MAX_PAIRED_LAYERS: Final = 160
"""Most layers for which cuts of workers with two mirrored stages are searched exactly."""
MAX_CUTS: Final = 20_000
"""Most cuts that are looked at one by one, where several stages that are no mirrored pair share a worker."""


@dataclass(frozen=True)
class Cut:
    """A cut of a model into stages."""

    first_layers: tuple[int, ...]
    """Stage s is the run of layers that begins with ``first_layers[s]``."""
    exact: bool
    """Whether no other cut is better. False where several stages share a worker and there are too many cuts."""


def balanced_cut(
    layers: Sequence[Layer],
    schedule: Schedule,
    *,
    objective: str = TIME,
    capacity_bytes: int | None = None,
    recompute: bool = False,
    model: MemoryModel = PAPER,
) -> Cut | None:
    """The best cut of ``layers`` into the stages of ``schedule``; None where none was found that fits
    ``capacity_bytes``.

    ``time``: the smallest maximum over stages of forward plus backward seconds, and of those cuts the one
    with the smallest maximum over workers of peak bytes. ``memory``: the same the other way round. The peak is
    that of ``memory.memory``. Raises MemtraceError where there are fewer layers than stages.
    """
    if objective not in OBJECTIVES:
        raise MemtraceError(f"unknown objective {objective!r}: choose {', '.join(OBJECTIVES)}")
    if len(layers) < schedule.num_stages:
        raise MemtraceError(f"{len(layers)} layers cannot be cut into {schedule.num_stages} stages")
    costs = RangeCosts(layers, recompute=recompute)
    search = _search_for(costs, profiles(schedule, model, recompute=recompute, parts=costs.parts), schedule.num_stages)
    limit = math.inf if capacity_bytes is None else float(capacity_bytes)
    if objective == TIME:
        best = search.minimise_time(limit)
        found = None if best is None else search.minimise_memory(_worst(costs.seconds, best), limit)
    else:
        best = search.minimise_memory(math.inf, limit)
        found = None if best is None else search.minimise_time(search.peak(best))
    return None if best is None else Cut(found or best, search.exact)


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


def _worst(table: Floats, first_layers: Sequence[int]) -> float:
    return float(max(table[begin, end] for begin, end in itertools.pairwise([*first_layers, len(table) - 1])))


class _Search(Protocol):
    """What ``balanced_cut`` asks; None: no cut is within the limits."""

    exact: bool

    def minimise_time(self, limit_bytes: float) -> tuple[int, ...] | None: ...

    def minimise_memory(self, most_seconds: float, limit_bytes: float) -> tuple[int, ...] | None: ...

    def peak(self, first_layers: Sequence[int]) -> float: ...


class _OneByOne:
    """Cuts where every stage has a memory limit of its own: one stage a worker."""

    exact = True

    def __init__(self, costs: RangeCosts, workers: Sequence[WorkerProfile], num_stages: int) -> None:
        self._seconds = costs.seconds
        self._peaks: list[Floats] = [np.zeros_like(costs.seconds)] * num_stages
        for worker in workers:
            for place, stage in enumerate(worker.stages):
                # A stage may lie on several workers: the fullest decides. Where a worker has several, each has a share.
                peak = len(worker.stages) * costs.levels(worker, place).max(axis=0)
                self._peaks[stage] = np.maximum(self._peaks[stage], peak)

    def minimise_time(self, limit_bytes: float) -> tuple[int, ...] | None:
        return smallest_maximum([np.where(peak <= limit_bytes, self._seconds, np.inf) for peak in self._peaks])

    def minimise_memory(self, most_seconds: float, limit_bytes: float) -> tuple[int, ...] | None:
        barred = np.where(self._seconds <= most_seconds, 0.0, np.inf)
        found = smallest_maximum([peak + barred for peak in self._peaks])
        return found if found is not None and self.peak(found) <= limit_bytes else None

    def peak(self, first_layers: Sequence[int]) -> float:
        bounds = itertools.pairwise([*first_layers, len(self._seconds) - 1])
        return float(max(peak[bound] for peak, bound in zip(self._peaks, bounds, strict=True)))


class _Shared:
    """Cuts where several stages share a worker: of all where they are few, else from good ones to better neighbours."""

    def __init__(self, costs: RangeCosts, workers: Sequence[WorkerProfile], num_stages: int) -> None:
        self._costs, self._workers = costs, workers
        self._levels = [[costs.levels(worker, place) for place in range(len(worker.stages))] for worker in workers]
        self.exact = math.comb(costs.num_layers - 1, num_stages - 1) <= MAX_CUTS
        self._rough = _OneByOne(costs, workers, num_stages)
        if self.exact:
            inner = list(itertools.combinations(range(1, costs.num_layers), num_stages - 1))
            self._cuts = np.array(inner, dtype=np.int64).reshape(len(inner), num_stages - 1)
            self._slowest, self._fullest = self._scores(self._cuts)

    def minimise_time(self, limit_bytes: float) -> tuple[int, ...] | None:
        if self.exact:
            return self._best(self._slowest, self._fullest <= limit_bytes)
        starts = [self._rough.minimise_time(limit_bytes), self._rough.minimise_time(math.inf)]
        starts += [self._rough.minimise_memory(math.inf, math.inf)]
        return self._descended(starts, lambda slow, full: (np.maximum(full, limit_bytes), slow), math.inf, limit_bytes)

    def minimise_memory(self, most_seconds: float, limit_bytes: float) -> tuple[int, ...] | None:
        if self.exact:
            return self._best(self._fullest, (self._slowest <= most_seconds) & (self._fullest <= limit_bytes))
        starts = [self._rough.minimise_memory(most_seconds, math.inf), self._rough.minimise_time(math.inf)]
        return self._descended(
            starts, lambda slow, full: (np.maximum(slow, most_seconds), full), most_seconds, limit_bytes
        )

    def peak(self, first_layers: Sequence[int]) -> float:
        return float(self._scores(np.array([first_layers[1:]], dtype=np.int64))[1][0])

    def _best(self, score: Floats, allowed: npt.NDArray[np.bool_]) -> tuple[int, ...] | None:
        if not allowed.any():
            return None
        return (0, *map(int, self._cuts[np.argmin(np.where(allowed, score, np.inf))]))

    def _descended(
        self,
        starts: Sequence[tuple[int, ...] | None],
        order: Callable[[Floats, Floats], tuple[Floats, Floats]],
        most_seconds: float,
        limit_bytes: float,
    ) -> tuple[int, ...] | None:
        """The best that is reached by moving one boundary at a time; by ``order``, lowest first."""
        near = np.array([start[1:] for start in starts if start is not None], dtype=np.int64)
        cut = near[self._first(near, order)]
        while True:
            near = np.concatenate([cut[None], self._neighbours(cut)])
            best = self._first(near, order)
            if best == 0:
                break
            cut = near[best]
        (slow,), (full,) = self._scores(cut[None])
        return (0, *map(int, cut)) if slow <= most_seconds and full <= limit_bytes else None

    def _first(self, cuts: Integers, order: Callable[[Floats, Floats], tuple[Floats, Floats]]) -> int:
        first, second = order(*self._scores(cuts))
        return int(np.lexsort((second, first))[0])

    def _neighbours(self, cut: Integers) -> Integers:
        step = np.eye(len(cut), dtype=np.int64)
        near = cut + np.concatenate([step, -step])
        bounded = np.pad(near, ((0, 0), (1, 1)), constant_values=(0, self._costs.num_layers))
        rising: Integers = near[(np.diff(bounded, axis=1) > 0).all(axis=1)]
        return rising

    def _scores(self, cuts: Integers) -> tuple[Floats, Floats]:
        """Seconds of the slowest stage and bytes of the fullest worker of every cut."""
        bounds = np.pad(cuts, ((0, 0), (1, 1)), constant_values=(0, self._costs.num_layers))
        begins, ends = bounds[:, :-1], bounds[:, 1:]
        fullest = np.zeros(len(cuts))
        for worker, levels in zip(self._workers, self._levels, strict=True):
            moments = sum(
                level[:, begins[:, stage], ends[:, stage]] for stage, level in zip(worker.stages, levels, strict=True)
            )
            fullest = np.maximum(fullest, np.max(moments, axis=0))
        return self._costs.seconds[begins, ends].max(axis=1), fullest


class _Mirrored:
    """Cuts where stages s and S - 1 - s share a worker: from both ends of the model to its middle."""

    exact = True

    def __init__(self, costs: RangeCosts, workers: Sequence[WorkerProfile], num_stages: int) -> None:
        self._size, self._num_stages, self._seconds = costs.num_layers + 1, num_stages, costs.seconds
        self._levels: list[list[tuple[Floats, Floats]]] = [[] for _ in range(num_stages // 2)]
        for worker in workers:
            self._levels[worker.stages[0]].append((costs.levels(worker, 0), costs.levels(worker, 1)))

    def minimise_time(self, limit_bytes: float) -> tuple[int, ...] | None:
        def cost(pair: int, begin: int, left: slice, right: slice, end: int) -> Floats:
            slower = np.maximum(self._seconds[begin, left, None], self._seconds[None, right, end])
            if math.isinf(limit_bytes):
                return slower
            return np.where(self._pair_peak(pair, begin, left, right, end) <= limit_bytes, slower, np.inf)

        free = smallest_maximum([self._seconds] * self._num_stages)
        assert free is not None
        # The search is quick where little time is given; nearly always some cut is nearly as fast as without a limit.
        for slack in (1.0, 1.1, 1.5, math.inf):
            found = self._sweep(cost, slack * _worst(self._seconds, free))
            if found is not None:
                return found
        return None

    def minimise_memory(self, most_seconds: float, limit_bytes: float) -> tuple[int, ...] | None:
        def cost(pair: int, begin: int, left: slice, right: slice, end: int) -> Floats:
            peak = self._pair_peak(pair, begin, left, right, end)
            return np.where(peak <= limit_bytes, peak, np.inf)

        return self._sweep(cost, most_seconds)

    def peak(self, first_layers: Sequence[int]) -> float:
        bounds = [*first_layers, self._size - 1]

        def of(pair: int) -> float:
            begin, i, j, end = bounds[pair], bounds[pair + 1], bounds[-2 - pair], bounds[-1 - pair]
            return float(self._pair_peak(pair, begin, slice(i, i + 1), slice(j, j + 1), end)[0, 0])

        return max(map(of, range(self._num_stages // 2)))

    def _pair_peak(self, pair: int, begin: int, left: slice, right: slice, end: int) -> Floats:
        """Peak of the fuller worker of the pair if its stages are layers [begin, i) and [j, end), by i and j."""
        peak: Floats = np.maximum.reduce(
            [
                one[begin, left, None] + other[None, right, end]
                for first, second in self._levels[pair]
                for one, other in zip(first, second, strict=True)
            ]
        )
        return peak

    def _sweep(
        self, cost: Callable[[int, int, slice, slice, int], Floats], most_seconds: float
    ) -> tuple[int, ...] | None:
        """The smallest maximum of ``cost`` over pairs where no stage takes longer; state (i, j): layers before i and
        from j on are given."""
        size, half = self._size, self._num_stages // 2
        best = np.full((size, size), np.inf)
        best[0, size - 1] = 0.0
        # How far a stage may reach that begins, or ends, with each layer.
        places = np.arange(size)
        short = (self._seconds <= most_seconds) | (places[None] <= places[:, None])
        furthest = np.where(short, places[None], 0).max(axis=1) + 1
        nearest = np.where(short, places[:, None], size).min(axis=0)
        origins = []
        for pair in range(half):
            following = np.full((size, size), np.inf)
            origin = np.zeros((size, size), dtype=np.int64)
            # What is left must be within the reach of the stages that are left, sums of seconds rounded.
            inside = self._seconds <= most_seconds * 2 * (half - pair) * (1 + 1e-9)
            for begin, end in np.argwhere(np.isfinite(best) & inside):
                left, right = slice(begin + 1, min(end, furthest[begin])), slice(max(begin + 1, nearest[end]), end)
                if left.start >= left.stop or right.start >= right.stop:
                    continue
                reached = np.maximum(best[begin, end], cost(pair, begin, left, right, end))
                better = reached < following[left, right]
                following[left, right][better] = reached[better]
                origin[left, right][better] = begin * size + end
            # The two halves must not cross; in the innermost pair they must meet.
            meet = np.eye(size, dtype=bool) if pair == half - 1 else np.tri(size, k=-1, dtype=bool).T
            best = np.where(meet, following, np.inf)
            origins.append(origin)
        if not np.isfinite(best).any():
            return None
        i, j = divmod(int(np.argmin(best)), size)
        left_bounds, right_bounds = [], []
        for origin in reversed(origins):
            right_bounds.append(j)
            i, j = divmod(int(origin[i, j]), size)
            left_bounds.append(i)
        return (*reversed(left_bounds), *right_bounds)


def _search_for(costs: RangeCosts, workers: Sequence[WorkerProfile], num_stages: int) -> _Search:
    if all(len(worker.stages) == 1 for worker in workers):
        return _OneByOne(costs, workers, num_stages)
    mirrored = all(len(worker.stages) == 2 and sum(worker.stages) == num_stages - 1 for worker in workers)
    if mirrored and costs.num_layers <= MAX_PAIRED_LAYERS:
        return _Mirrored(costs, workers, num_stages)
    return _Shared(costs, workers, num_stages)
