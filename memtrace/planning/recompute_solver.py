"""Chooses what to recompute: the least added time under a given peak, or the least peak.

The optimum is found by integer programming (SciPy's ``milp``, the solver HiGHS) with constraints that are added as they
are needed: the peak of a solution is replayed, and the positions above the target become constraints of the next
program, until the replay confirms the solution. The memory at a position is linear in the options, with auxiliary
variables for the blocks that several holders keep, so that the result is exact.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from memtrace.format.arrays import Array
from memtrace.planning.recompute_model import LevelTerms, MemoryLevels, RecomputeModel

MAX_EXACT_OPTIONS: Final = 2_000
"""Largest number of options of which an optimum is searched; for more the choice is greedy."""
MAX_SECONDS: Final = 30.0
"""Time for one optimum; then the best choice found so far is taken, or the greedy one."""
NUM_WINDOWS: Final = 32
"""In this many parts of the timeline the highest position above the target becomes a constraint."""


@dataclass(frozen=True)
class Choice:
    """A choice of options."""

    chosen: Array
    """For each option whether it is chosen."""
    peak_bytes: int
    cost_ns: int
    """Time added to the step."""
    is_optimal: bool
    """Whether no other choice is better."""


def minimize_cost(model: RecomputeModel, target_bytes: int, *, max_seconds: float = MAX_SECONDS) -> Choice | None:
    """Return the choice of least added time with a peak of at most ``target_bytes``; None if no choice is found."""
    return _solve(model, target_bytes, max_seconds, np.array(model.cost_ns, float))


def minimize_peak(model: RecomputeModel, *, max_seconds: float = MAX_SECONDS) -> Choice:
    """Return the choice with the lowest peak, and of these the one of least added time."""
    least = _solve(model, None, max_seconds, np.zeros(model.num_options))
    assert least is not None  # a program without a target always has a solution
    return minimize_cost(model, least.peak_bytes, max_seconds=max_seconds) or least


def choose_greedily(model: RecomputeModel, target_bytes: int | None) -> Choice:
    """Return a choice with a peak of at most ``target_bytes`` (None: as low as possible), option by option.

    Each round takes the option that removes the most bytes per time from the highest position, as far as one lowers
    the peak. Options that have become unnecessary are dropped at the end. The target may be missed.
    """
    chosen = np.zeros(model.num_options, bool)
    levels = model.replay(chosen)
    target = -1 if target_bytes is None else target_bytes
    while levels.peak_bytes > target:
        better = next(_improvements(model, chosen, levels), None)
        if better is None:
            break
        chosen, levels = better
    for option in sorted(np.flatnonzero(chosen).tolist(), key=lambda number: -int(model.cost_ns[number])):
        without = chosen.copy()
        without[option] = False
        if model.replay(without).peak_bytes <= max(target, levels.peak_bytes):
            chosen = without
    return _choice(model, chosen, is_optimal=False)


def _choice(model: RecomputeModel, chosen: Array, *, is_optimal: bool) -> Choice:
    return Choice(chosen, model.replay(chosen).peak_bytes, int(model.cost_ns[chosen].sum()), is_optimal)


def _improvements(model: RecomputeModel, chosen: Array, levels: MemoryLevels) -> Iterator[tuple[Array, MemoryLevels]]:
    """Yield choices with one more option and a lower peak, those that remove most bytes per time first."""
    relief = _relief(model, chosen, float(levels.positions[int(levels.bytes.argmax())]))
    rate = np.where(chosen, 0, relief) / np.maximum(model.cost_ns, 1)
    for option in np.argsort(-rate, kind="stable").tolist():
        if rate[option] <= 0:
            return
        changed = chosen.copy()
        changed[list(model.conflicts(option))] = False
        changed[option] = True
        changed_levels = model.replay(changed)
        if changed_levels.peak_bytes < levels.peak_bytes:
            yield changed, changed_levels


def _relief(model: RecomputeModel, chosen: Array, position: float) -> Array:
    """Return the bytes that each option removes at a position, of blocks that only one holder keeps there."""
    held = (model.node_end > position) & (model.begin <= position)[model.node_block]
    held[model.release_node[chosen[model.release_option]]] = False
    keeps = chosen[model.kept_option] & (model.kept_end > position)
    num_holders = np.bincount(model.node_block[held], minlength=len(model.size))
    num_holders += np.bincount(model.kept_block[keeps], minlength=len(model.size))
    num_holders += model.program_end > position
    releases = held[model.release_node]
    block = model.node_block[model.release_node[releases]]
    option = model.release_option[releases]
    alone = num_holders[block] == 1
    relief = np.bincount(option[alone], model.size[block[alone]], minlength=model.num_options)
    adds = (model.added_begin <= position) & (model.added_end > position)
    return relief - np.bincount(model.added_option[adds], model.added_bytes[adds], minlength=model.num_options)


def _solve(model: RecomputeModel, target: int | None, max_seconds: float, cost: Array) -> Choice | None:
    """Return the choice of least cost under a target, or of least peak without one."""
    if model.num_options > MAX_EXACT_OPTIONS:
        return _fall_back(model, target)
    program = _Program(model, cost, target)
    deadline = time.monotonic() + max_seconds
    best: Choice | None = None
    while (remaining := deadline - time.monotonic()) > 0:
        solution = program.solve(remaining)
        if solution is None:
            break
        if not solution.is_feasible:
            return best
        choice = _choice(model, solution.chosen, is_optimal=solution.is_optimal)
        if target is None and (best is None or choice.peak_bytes < best.peak_bytes):
            best = choice
        bound = solution.peak_bound if target is None else target
        if target is None and best is not None and best.peak_bytes <= bound + 1:
            return best
        if target is not None and choice.peak_bytes <= target:
            return choice
        program.add_constraints(model.replay(solution.chosen), bound, solution.chosen)
    fallback = _fall_back(model, target)
    candidates = [each for each in (best, fallback) if each is not None]
    return min(candidates, key=lambda each: each.peak_bytes, default=None)


def _fall_back(model: RecomputeModel, target: int | None) -> Choice | None:
    choice = choose_greedily(model, target)
    return choice if target is None or choice.peak_bytes <= target else None


@dataclass(frozen=True)
class _Solution:
    is_feasible: bool
    is_optimal: bool
    chosen: Array
    peak_bound: float
    """Bytes that no choice can go below, as far as the constraints so far tell."""


@dataclass
class _Program:
    """The integer program: variables are the options, the peak, and auxiliary ones for blocks with several holders."""

    model: RecomputeModel
    cost: Array
    target: int | None
    rows: list[dict[int, float]] = field(default_factory=list)
    """Coefficients of each constraint by variable."""
    upper: list[float] = field(default_factory=list)
    """Each constraint: the sum is at most this."""
    num_variables: int = 0
    seen: set[float] = field(default_factory=set)
    auxiliary: dict[frozenset[tuple[int, ...]], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_variables = self.model.num_options + 1
        self.unit = max(self.model.replay([]).peak_bytes, 1) / 1e5
        self.scale = 1e4 / max(float(self.cost.sum()), 1.0)
        for group in self.model.groups:
            self._add(dict.fromkeys(group, 1.0), 1.0)
        self.add_constraints(self.model.replay([]), -1 if self.target is None else self.target, None)

    @property
    def _peak(self) -> int:
        return self.model.num_options

    def _add(self, row: dict[int, float], upper: float) -> None:
        self.rows.append(row)
        self.upper.append(upper)

    def add_constraints(self, levels: MemoryLevels, bound: float, chosen: Array | None) -> None:
        """Require that the positions with a level above ``bound`` stay below the target; exclude ``chosen`` if none."""
        added = False
        for window in np.array_split(np.arange(len(levels.bytes)), NUM_WINDOWS):
            if not len(window):
                continue
            top = int(window[int(levels.bytes[window].argmax())])
            position = float(levels.positions[top])
            if levels.bytes[top] > bound and position not in self.seen:
                self.seen.add(position)
                self._limit(self.model.level_terms(position))
                added = True
        if not added and chosen is not None:
            # Rounding let a solution pass that the replay rejects.
            row = {option: 1.0 if is_chosen else -1.0 for option, is_chosen in enumerate(chosen.tolist())}
            self._add(row, float(chosen.sum()) - 1)

    def _limit(self, terms: LevelTerms) -> None:
        row: dict[int, float] = {option: float(terms.added[option]) for option in np.flatnonzero(terms.added).tolist()}
        constant = float(terms.constant)
        for condition, size in terms.conditional.items():
            alternatives = list(condition)
            if len(alternatives) > 1:
                variable = self._auxiliary(condition)
                row[variable] = row.get(variable, 0.0) + size
                continue
            constant += size if alternatives[0][0] < 0 else 0
            for number in alternatives[0]:
                option, sign = (-1 - number, -1) if number < 0 else (number, 1)
                row[option] = row.get(option, 0.0) + sign * size
        row = {variable: value / self.unit for variable, value in row.items()}
        if self.target is None:
            row[self._peak] = -1.0
        self._add(row, ((self.target or 0) - constant) / self.unit)

    def _auxiliary(self, condition: frozenset[tuple[int, ...]]) -> int:
        """Return the variable that is at least 1 where any alternative of a condition holds."""
        if condition not in self.auxiliary:
            variable = self.auxiliary[condition] = self.num_variables
            self.num_variables += 1
            for alternative in condition:
                row, upper = {variable: -1.0}, 0.0
                for number in alternative:
                    row[-1 - number if number < 0 else number] = -1.0 if number < 0 else 1.0
                    upper = -1.0 if number < 0 else 0.0
                self._add(row, upper)
        return self.auxiliary[condition]

    def solve(self, max_seconds: float) -> _Solution | None:
        """Return the best solution under the constraints so far; None if none was found in the time."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        num_options = self.model.num_options
        entries = [(row, column, value) for row, terms in enumerate(self.rows) for column, value in terms.items()]
        data: Any = list(zip(*entries, strict=True)) or [(), (), ()]
        shape = (len(self.rows), self.num_variables)
        # HiGHS takes indices of 32 bits, and older versions of SciPy do not convert them.
        places = (np.array(data[0], np.int32), np.array(data[1], np.int32))
        matrix = csr_array((np.array(data[2], float), places), shape=shape)
        objective = np.zeros(self.num_variables)
        objective[:num_options] = self.cost * self.scale
        objective[self._peak] = 0.0 if self.target is not None else 1.0
        integrality = np.zeros(self.num_variables)
        integrality[:num_options] = 1
        upper = np.ones(self.num_variables)
        upper[self._peak] = np.inf
        result = milp(
            objective,
            constraints=LinearConstraint(matrix, ub=np.array(self.upper)),
            integrality=integrality,
            bounds=Bounds(np.zeros(self.num_variables), upper),
            options={"time_limit": max_seconds, "mip_rel_gap": 0.0},
        )
        if result.status == 2:
            return _Solution(False, True, np.zeros(num_options, bool), 0.0)
        if result.x is None:
            return None
        bound = getattr(result, "mip_dual_bound", None)
        peak_bound = float(result.x[self._peak] if result.status == 0 or bound is None else bound) * self.unit
        return _Solution(True, result.status == 0, result.x[:num_options] > 0.5, peak_bound)
