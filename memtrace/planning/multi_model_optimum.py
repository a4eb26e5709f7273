"""The shortest schedule of a few shard units, as a mixed-integer linear program (Hydra, section 4.7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

import numpy as np

from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array
from memtrace.planning.multi_model import ModelJob, MultiModelSchedule, lower_bound_seconds, schedule_models

MAX_UNITS: Final = 60
"""The program grows with the square of the number of units; solvers then find nothing in minutes."""


@dataclass(frozen=True)
class OptimalSchedule:
    """The best schedule that the solver found."""

    schedule: MultiModelSchedule
    lower_bound_s: float
    """No schedule is shorter."""
    time_limit_s: float

    @property
    def gap(self) -> float:
        """How much longer than the lower bound the schedule is, as a share of its length; 0: it is optimal."""
        makespan = self.schedule.makespan_s
        return max(0.0, 1 - self.lower_bound_s / makespan) if makespan else 0.0


def find_optimal_schedule(jobs: Sequence[ModelJob], num_devices: int, *, time_limit_s: float = 10.0) -> OptimalSchedule:
    """Minimise the makespan of the computation of a few models.

    Variables are the start of every unit, its device, and for two units of different models which comes first; a large
    constant switches off the order of two units on different devices. Copies are not part of the program: it is the
    optimum for double buffering that hides them.

    Args:
        jobs: The models, together at most ``MAX_UNITS`` units.
        num_devices: Number of devices.
        time_limit_s: When the solver stops; the gap then says how good its best schedule is. Sharded-LRTF's schedule is
            returned where the solver has found none that is shorter.

    Raises:
        MemtraceError: There are too many units.
    """
    total = sum(job.num_units for job in jobs)
    if total > MAX_UNITS:
        raise MemtraceError(
            f"{total:,} shard units: the optimum can be computed for at most {MAX_UNITS}. Use fewer mini-batches."
        )
    compute_only = [_without_copies(job) for job in jobs]
    start = schedule_models(compute_only, num_devices)
    bound = lower_bound_seconds(jobs, num_devices)
    if start.makespan_s <= bound:
        return OptimalSchedule(_renamed(start), bound, time_limit_s)
    program = _Program(compute_only, num_devices, start.makespan_s, bound)
    solution = program.solve(time_limit_s)
    if solution is None:
        return OptimalSchedule(_renamed(start), max(bound, program.bound_s), time_limit_s)
    best = solution if solution.makespan_s <= start.makespan_s else _renamed(start)
    return OptimalSchedule(best, min(max(bound, program.bound_s), best.makespan_s), time_limit_s)


def _without_copies(job: ModelJob) -> ModelJob:
    return replace(job, units=tuple(replace(unit, load_s=0.0, unload_s=0.0) for unit in job.units))


def _renamed(schedule: MultiModelSchedule) -> MultiModelSchedule:
    return replace(schedule, policy="optimum")


class _Program:
    """Columns: start of each unit, makespan, device of each unit (binary), order of each pair (binary)."""

    def __init__(self, jobs: Sequence[ModelJob], num_devices: int, horizon_s: float, bound_s: float) -> None:
        self._num_devices, self._horizon = num_devices, horizon_s
        self.bound_s = bound_s
        self._model = np.concatenate([np.full(job.num_units, place) for place, job in enumerate(jobs)])
        self._unit = np.concatenate([np.arange(job.num_units) for job in jobs])
        self._seconds = np.array(
            [job.units[unit % len(job.units)].compute_s for job in jobs for unit in range(job.num_units)]
        )
        count = len(self._model)
        self._pairs = [pair for pair in combinations(range(count), 2) if self._model[pair[0]] != self._model[pair[1]]]
        self._makespan = count
        self._first_device = count + 1
        self._first_pair = self._first_device + count * num_devices
        self._num_columns = self._first_pair + len(self._pairs)
        self._rows: list[dict[int, float]] = []
        self._lower: list[float] = []
        self._upper: list[float] = []

    def _add(self, row: dict[int, float], lower: float, upper: float = np.inf) -> None:
        self._rows.append(row)
        self._lower.append(lower)
        self._upper.append(upper)

    def _on(self, unit: int, device: int) -> int:
        return self._first_device + unit * self._num_devices + device

    def _constrain(self) -> None:
        count, large = len(self._model), self._horizon
        for unit in range(count):
            self._add({self._makespan: 1, unit: -1}, self._seconds[unit])
            self._add({self._on(unit, device): 1 for device in range(self._num_devices)}, 1, 1)
            if unit and self._model[unit] == self._model[unit - 1]:
                self._add({unit: 1, unit - 1: -1}, self._seconds[unit - 1])
        for number, (first, second) in enumerate(self._pairs):
            order = self._first_pair + number
            for device in range(self._num_devices):
                same = {self._on(first, device): -large, self._on(second, device): -large}
                self._add({second: 1, first: -1, order: -large} | same, self._seconds[first] - 3 * large)
                self._add({first: 1, second: -1, order: large} | same, self._seconds[second] - 2 * large)

    def solve(self, time_limit_s: float) -> MultiModelSchedule | None:
        """Return the best schedule found; None: none in time."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        self._constrain()
        counts = [len(row) for row in self._rows]
        columns = np.concatenate([list(row) for row in self._rows])
        values = np.concatenate([list(row.values()) for row in self._rows])
        # HiGHS takes indices of 32 bits, and older versions of SciPy do not convert them.
        ends, columns = np.cumsum([0, *counts], dtype=np.int32), columns.astype(np.int32)
        matrix = csr_array((values, columns, ends), shape=(len(counts), self._num_columns))
        upper = np.ones(self._num_columns)
        upper[: self._first_device] = self._horizon
        lower = np.zeros(self._num_columns)
        lower[self._makespan] = self.bound_s
        # The devices are equal: the first unit can be on the first of them.
        lower[self._on(0, 0)] = 1
        is_binary = np.zeros(self._num_columns)
        is_binary[self._first_device :] = 1
        objective = np.zeros(self._num_columns)
        objective[self._makespan] = 1
        result: Any = milp(
            objective,
            constraints=LinearConstraint(matrix, np.array(self._lower), np.array(self._upper)),
            integrality=is_binary,
            bounds=Bounds(lower, upper),
            options={"time_limit": time_limit_s},
        )
        if result.mip_dual_bound is not None and np.isfinite(result.mip_dual_bound):
            self.bound_s = max(self.bound_s, float(result.mip_dual_bound))
        return None if result.x is None else self._read(result.x)

    def _read(self, x: Array) -> MultiModelSchedule:
        count = len(self._model)
        on = x[self._first_device : self._first_pair].reshape(count, self._num_devices)
        device = on.argmax(axis=1)
        order = np.lexsort((self._unit, x[:count]))
        start = np.zeros(count)
        ready, free = np.zeros(int(self._model.max()) + 1), np.zeros(self._num_devices)
        # The solver's times are exact up to a tolerance only: the order and the devices are what it decides.
        for unit in order.tolist():
            start[unit] = max(ready[self._model[unit]], free[device[unit]])
            ready[self._model[unit]] = free[device[unit]] = start[unit] + self._seconds[unit]
        order = np.lexsort((self._unit, start))
        end = start + self._seconds
        return MultiModelSchedule(
            policy="optimum",
            num_devices=self._num_devices,
            model=self._model[order],
            unit=self._unit[order],
            device=device[order],
            start_s=start[order],
            end_s=end[order],
            makespan_s=float(end.max()),
        )
