"""How to partition a model into pipeline stages: searches over all partitions into consecutive layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import LayerCosts
from memtrace.pipeline.layer_ranges import LayerRangeCosts
from memtrace.pipeline.memory_rules import PAPER, MemoryModel
from memtrace.pipeline.peak_moments import PeakMoments, find_peak_moments
from memtrace.pipeline.schedules.schedule import Schedule

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

TIME: Final = "time"
"""Minimize the time of the slowest stage, then the peak of the fullest worker."""
MEMORY: Final = "memory"
"""Minimize the peak of the fullest worker, then the time of the slowest stage."""
EQUAL: Final = "equal"
"""The same number of layers in every stage (as far as possible), as in the measurements of the papers; no search."""
OBJECTIVES: Final = (TIME, MEMORY, EQUAL)
MAX_PAIRED_LAYERS: Final = 160
"""Largest number of layers for which partitions with two mirrored stages per worker are searched exactly."""
MAX_PARTITIONS: Final = 20_000
"""Largest number of partitions that are all evaluated, where stages that are no mirrored pair share a worker."""


@dataclass(frozen=True)
class Partition:
    """A partition of a model into stages of consecutive layers."""

    first_layers: tuple[int, ...]
    """Stage s begins with layer ``first_layers[s]`` and ends before the first layer of stage s + 1."""
    exact: bool
    """Whether no other partition is better (of equal stages there is only one). False where there are too many to
    evaluate all of them."""


def balance_partition(
    layers: Sequence[LayerCosts],
    schedule: Schedule,
    *,
    objective: str = TIME,
    capacity_bytes: int | None = None,
    recompute: bool = False,
    model: MemoryModel = PAPER,
) -> Partition | None:
    """Find the best partition of ``layers`` into the stages of ``schedule``.

    Args:
        layers: costs of the layers in forward order.
        schedule: how many stages there are, and which of them share a worker.
        objective: ``TIME``, ``MEMORY`` or ``EQUAL``. The time of a stage is that of forward and backward of one
            micro-batch; the peak of a worker is that of ``simulation.worker_memory``.
        capacity_bytes: memory of one worker; None: unlimited.
        recompute: stages keep only their inputs and repeat their forward before the backward.
        model: what counts as memory.

    Returns:
        The partition; None where no partition was found that fits the capacity.

    Raises:
        MemtraceError: the objective is unknown, or there are fewer layers than stages.
    """
    if objective not in OBJECTIVES:
        raise MemtraceError(f"unknown objective {objective!r}; choose one of {', '.join(OBJECTIVES)}")
    if len(layers) < schedule.num_stages:
        raise MemtraceError(f"{len(layers)} layers cannot be split into {schedule.num_stages} stages")
    costs = LayerRangeCosts(layers, recompute=recompute)
    workers = find_peak_moments(schedule, model, recompute=recompute, fields=costs.fields)
    search = _search_for(costs, workers, schedule.num_stages)
    limit = math.inf if capacity_bytes is None else float(capacity_bytes)
    if objective == EQUAL:
        equal = tuple(stage * len(layers) // schedule.num_stages for stage in range(schedule.num_stages))
        return Partition(equal, exact=True) if search.peak(equal) <= limit else None
    if objective == TIME:
        best = search.minimize_time(limit)
        refined = None if best is None else search.minimize_memory(_largest_entry(costs.seconds, best), limit)
    else:
        best = search.minimize_memory(math.inf, limit)
        refined = None if best is None else search.minimize_time(search.peak(best))
    return None if best is None else Partition(refined or best, search.exact)


def smallest_maximum(costs: Sequence[Floats]) -> tuple[int, ...] | None:
    """Find the partition with the smallest maximum of ``costs[s][begin, end]`` over stages s; None: all are infinite.

    ``costs[s]`` is square, with one row and column more than there are layers; entries with end <= begin are not used.
    The search is exact and takes time proportional to (number of stages) x (number of layers)^2.
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


def _largest_entry(table: Floats, first_layers: Sequence[int]) -> float:
    return float(max(table[begin, end] for begin, end in itertools.pairwise([*first_layers, len(table) - 1])))


class _Search(Protocol):
    """What ``balance_partition`` needs; None: no partition is within the limits."""

    exact: bool

    def minimize_time(self, limit_bytes: float) -> tuple[int, ...] | None:
        """First layers of the fastest partition whose workers need at most ``limit_bytes``."""
        ...

    def minimize_memory(self, max_seconds: float, limit_bytes: float) -> tuple[int, ...] | None:
        """First layers of the partition with the lowest peak whose stages take at most ``max_seconds``."""
        ...

    def peak(self, first_layers: Sequence[int]) -> float:
        """Bytes of the fullest worker of a partition."""
        ...


class _SeparateStages:
    """Partitions where every stage has a memory limit of its own: one stage per worker."""

    exact = True

    def __init__(self, costs: LayerRangeCosts, workers: Sequence[PeakMoments], num_stages: int) -> None:
        self._seconds = costs.seconds
        self._peaks: list[Floats] = [np.zeros_like(costs.seconds)] * num_stages
        for worker in workers:
            for place, stage in enumerate(worker.stages):
                # Several workers may hold a stage: the fullest counts. Stages of one worker get equal shares.
                peak = len(worker.stages) * costs.moment_bytes(worker, place).max(axis=0)
                self._peaks[stage] = np.maximum(self._peaks[stage], peak)

    def minimize_time(self, limit_bytes: float) -> tuple[int, ...] | None:
        return smallest_maximum([np.where(peak <= limit_bytes, self._seconds, np.inf) for peak in self._peaks])

    def minimize_memory(self, max_seconds: float, limit_bytes: float) -> tuple[int, ...] | None:
        excluded = np.where(self._seconds <= max_seconds, 0.0, np.inf)
        partition = smallest_maximum([peak + excluded for peak in self._peaks])
        return partition if partition is not None and self.peak(partition) <= limit_bytes else None

    def peak(self, first_layers: Sequence[int]) -> float:
        bounds = itertools.pairwise([*first_layers, len(self._seconds) - 1])
        return float(max(peak[bound] for peak, bound in zip(self._peaks, bounds, strict=True)))


class _SharedWorkers:
    """Partitions where several stages share a worker.

    Evaluates all partitions; if there are too many, descends from good partitions to better neighbours.
    """

    def __init__(self, costs: LayerRangeCosts, workers: Sequence[PeakMoments], num_stages: int) -> None:
        self._costs, self._workers = costs, workers
        self._levels = [
            [costs.moment_bytes(worker, place) for place in range(len(worker.stages))] for worker in workers
        ]
        self.exact = math.comb(costs.num_layers - 1, num_stages - 1) <= MAX_PARTITIONS
        self._approximation = _SeparateStages(costs, workers, num_stages)
        if self.exact:
            inner = list(itertools.combinations(range(1, costs.num_layers), num_stages - 1))
            self._partitions = np.array(inner, dtype=np.int64).reshape(len(inner), num_stages - 1)
            self._slowest, self._fullest = self._scores(self._partitions)

    def minimize_time(self, limit_bytes: float) -> tuple[int, ...] | None:
        if self.exact:
            return self._best(self._slowest, self._fullest <= limit_bytes)
        starts = [self._approximation.minimize_time(limit_bytes), self._approximation.minimize_time(math.inf)]
        starts += [self._approximation.minimize_memory(math.inf, math.inf)]
        return self._descend(starts, lambda slow, full: (np.maximum(full, limit_bytes), slow), math.inf, limit_bytes)

    def minimize_memory(self, max_seconds: float, limit_bytes: float) -> tuple[int, ...] | None:
        if self.exact:
            return self._best(self._fullest, (self._slowest <= max_seconds) & (self._fullest <= limit_bytes))
        starts = [
            self._approximation.minimize_memory(max_seconds, math.inf),
            self._approximation.minimize_time(math.inf),
        ]
        return self._descend(starts, lambda slow, full: (np.maximum(slow, max_seconds), full), max_seconds, limit_bytes)

    def peak(self, first_layers: Sequence[int]) -> float:
        return float(self._scores(np.array([first_layers[1:]], dtype=np.int64))[1][0])

    def _best(self, score: Floats, allowed: npt.NDArray[np.bool_]) -> tuple[int, ...] | None:
        if not allowed.any():
            return None
        return (0, *map(int, self._partitions[np.argmin(np.where(allowed, score, np.inf))]))

    def _descend(
        self,
        starts: Sequence[tuple[int, ...] | None],
        order: Callable[[Floats, Floats], tuple[Floats, Floats]],
        max_seconds: float,
        limit_bytes: float,
    ) -> tuple[int, ...] | None:
        """The best partition that is reached by moving one boundary at a time; ``order`` gives the sort keys."""
        near = np.array([start[1:] for start in starts if start is not None], dtype=np.int64)
        current = near[self._best_index(near, order)]
        while True:
            near = np.concatenate([current[None], self._neighbours(current)])
            best = self._best_index(near, order)
            if best == 0:
                break
            current = near[best]
        (slow,), (full,) = self._scores(current[None])
        return (0, *map(int, current)) if slow <= max_seconds and full <= limit_bytes else None

    def _best_index(self, partitions: Integers, order: Callable[[Floats, Floats], tuple[Floats, Floats]]) -> int:
        first, second = order(*self._scores(partitions))
        return int(np.lexsort((second, first))[0])

    def _neighbours(self, partition: Integers) -> Integers:
        step = np.eye(len(partition), dtype=np.int64)
        near = partition + np.concatenate([step, -step])
        bounded = np.pad(near, ((0, 0), (1, 1)), constant_values=(0, self._costs.num_layers))
        rising: Integers = near[(np.diff(bounded, axis=1) > 0).all(axis=1)]
        return rising

    def _scores(self, partitions: Integers) -> tuple[Floats, Floats]:
        """Seconds of the slowest stage and bytes of the fullest worker, for every partition."""
        bounds = np.pad(partitions, ((0, 0), (1, 1)), constant_values=(0, self._costs.num_layers))
        begins, ends = bounds[:, :-1], bounds[:, 1:]
        fullest = np.zeros(len(partitions))
        for worker, levels in zip(self._workers, self._levels, strict=True):
            moments = sum(
                level[:, begins[:, stage], ends[:, stage]] for stage, level in zip(worker.stages, levels, strict=True)
            )
            fullest = np.maximum(fullest, np.max(moments, axis=0))
        return self._costs.seconds[begins, ends].max(axis=1), fullest


class _MirroredStages:
    """Partitions where stages s and S - 1 - s share a worker: built from both ends of the model to its middle."""

    exact = True

    def __init__(self, costs: LayerRangeCosts, workers: Sequence[PeakMoments], num_stages: int) -> None:
        self._size, self._num_stages, self._seconds = costs.num_layers + 1, num_stages, costs.seconds
        self._levels: list[list[tuple[Floats, Floats]]] = [[] for _ in range(num_stages // 2)]
        for worker in workers:
            self._levels[worker.stages[0]].append((costs.moment_bytes(worker, 0), costs.moment_bytes(worker, 1)))

    def minimize_time(self, limit_bytes: float) -> tuple[int, ...] | None:
        def cost(pair: int, begin: int, left: slice, right: slice, end: int) -> Floats:
            slower = np.maximum(self._seconds[begin, left, None], self._seconds[None, right, end])
            if math.isinf(limit_bytes):
                return slower
            return np.where(self._pair_peak(pair, begin, left, right, end) <= limit_bytes, slower, np.inf)

        unlimited = smallest_maximum([self._seconds] * self._num_stages)
        assert unlimited is not None
        # A tight time limit makes the search fast, and nearly always some partition is almost as fast as without one.
        for slack in (1.0, 1.1, 1.5, math.inf):
            partition = self._sweep(cost, slack * _largest_entry(self._seconds, unlimited))
            if partition is not None:
                return partition
        return None

    def minimize_memory(self, max_seconds: float, limit_bytes: float) -> tuple[int, ...] | None:
        def cost(pair: int, begin: int, left: slice, right: slice, end: int) -> Floats:
            peak = self._pair_peak(pair, begin, left, right, end)
            return np.where(peak <= limit_bytes, peak, np.inf)

        return self._sweep(cost, max_seconds)

    def peak(self, first_layers: Sequence[int]) -> float:
        bounds = [*first_layers, self._size - 1]

        def pair_peak(pair: int) -> float:
            begin, i, j, end = bounds[pair], bounds[pair + 1], bounds[-2 - pair], bounds[-1 - pair]
            return float(self._pair_peak(pair, begin, slice(i, i + 1), slice(j, j + 1), end)[0, 0])

        return max(map(pair_peak, range(self._num_stages // 2)))

    def _pair_peak(self, pair: int, begin: int, left: slice, right: slice, end: int) -> Floats:
        """``[i, j]``: peak of the fuller worker of the pair if its stages are layers [begin, i) and [j, end)."""
        peak: Floats = np.maximum.reduce(
            [
                early[begin, left, None] + late[None, right, end]
                for first, second in self._levels[pair]
                for early, late in zip(first, second, strict=True)
            ]
        )
        return peak

    def _sweep(
        self, cost: Callable[[int, int, slice, slice, int], Floats], max_seconds: float
    ) -> tuple[int, ...] | None:
        """Minimize the largest ``cost`` over pairs where no stage takes longer than ``max_seconds``.

        The state (i, j) means that the layers before i and from j on belong to stages already.
        """
        size, half = self._size, self._num_stages // 2
        best = np.full((size, size), np.inf)
        best[0, size - 1] = 0.0
        # The last layer of a stage that begins, and the first layer of a stage that ends, with each layer.
        places = np.arange(size)
        short = (self._seconds <= max_seconds) | (places[None] <= places[:, None])
        furthest = np.where(short, places[None], 0).max(axis=1) + 1
        nearest = np.where(short, places[:, None], size).min(axis=0)
        origins = []
        for pair in range(half):
            following = np.full((size, size), np.inf)
            origin = np.zeros((size, size), dtype=np.int64)
            # The remaining layers must fit into the remaining stages; sums of seconds are rounded.
            inside = self._seconds <= max_seconds * 2 * (half - pair) * (1 + 1e-9)
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


def _search_for(costs: LayerRangeCosts, workers: Sequence[PeakMoments], num_stages: int) -> _Search:
    if all(len(worker.stages) == 1 for worker in workers):
        return _SeparateStages(costs, workers, num_stages)
    mirrored = all(len(worker.stages) == 2 and sum(worker.stages) == num_stages - 1 for worker in workers)
    if mirrored and costs.num_layers <= MAX_PAIRED_LAYERS:
        return _MirroredStages(costs, workers, num_stages)
    return _SharedWorkers(costs, workers, num_stages)
