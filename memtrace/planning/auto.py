"""``plan auto``: the cheapest mix of changes with which a step fits a capacity.

Changes of the program that the user makes are combined with recomputation, which ``memtrace.apply`` carries out. For
every combination of the former, the latter is chosen exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np

from memtrace.planning.auto_allocator import AllocatorChoice, choose_allocator
from memtrace.planning.auto_changes import (
    LevelChange,
    ProgramChange,
    optimizer_in_backward,
    shard_optimizer_state,
)
from memtrace.planning.pareto import pareto_front
from memtrace.planning.plan import Plan, StepCost
from memtrace.planning.recompute import main_device, make_plan, recompute_options
from memtrace.planning.recompute_model import RecomputeModel
from memtrace.planning.recompute_options import RecomputeOptions
from memtrace.planning.recompute_solver import Choice, minimize_cost, minimize_peak
from memtrace.planning.recorded_step import RecordedStep
from memtrace.trace import Trace

NUM_TARGETS: Final = 4
"""Peaks between the lowest and the highest one for which recomputation is chosen."""
SOLVER_SECONDS: Final = 5.0
"""Time for one choice."""
LINK_BYTES_PER_S: Final = 10e9
"""Bandwidth between ranks where none is given."""


@dataclass(frozen=True)
class AutoOption:
    """One plan of the Pareto front."""

    peak_bytes: int
    """Peak of the requested bytes."""
    step_ns: int | None
    """Duration of the step; None: unknown."""
    recomputed_modules: int
    """Number of modules that are recomputed."""
    changes: tuple[str, ...]
    """Changes that the user makes, by name."""
    fits: bool | None
    """Whether the plan fits the capacity; None: no capacity was given."""


@dataclass(frozen=True)
class AutoPlan:
    """The cheapest plan that fits, and the plans that trade memory for time."""

    plan: Plan
    """What ``memtrace.apply`` carries out. Its prediction includes ``changes``."""
    changes: tuple[ProgramChange, ...]
    """What the user has to do for the prediction to hold."""
    capacity_bytes: int | None
    """Memory of the device for the process; None: not given."""
    unused_bytes: int
    """Memory that the allocator reserves beyond the requested bytes, counted against the capacity."""
    fits: bool | None
    """Whether the plan fits; if not, it is the plan of the lowest peak. None: no capacity was given."""
    front: tuple[AutoOption, ...]
    """The Pareto front by peak: no other plan is better in both peak and step time."""


@dataclass(frozen=True)
class _Candidate:
    """Recomputation after changes of the program."""

    changes: tuple[ProgramChange, ...]
    choice: Choice

    @property
    def cost_ns(self) -> int:
        return self.choice.cost_ns + sum(change.cost_ns or 0 for change in self.changes)

    @property
    def peak_bytes(self) -> int:
        return self.choice.peak_bytes


def plan_auto(
    trace: Trace,
    device: str | None = None,
    *,
    capacity_bytes: int | None = None,
    num_ranks: int | None = None,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
    only_applicable: bool = False,
) -> AutoPlan:
    """Return the cheapest mix of changes with which a step of the trace fits a capacity.

    Args:
        trace: A single-rank trace with module calls and reads.
        device: The device whose peak is planned; None: the first GPU, or the CPU.
        capacity_bytes: Memory of the device for the process; None: the plan is the one of the lowest peak.
        num_ranks: Data-parallel ranks over which optimizer state can be sharded; None: those of the recording.
        link_bytes_per_s: Bandwidth between ranks.
        only_applicable: Whether to consider only what ``memtrace.apply`` carries out.

    Raises:
        MemtraceError: The trace has no steps, no module calls or no reads.
    """
    device = device or main_device(trace)
    step, found = recompute_options(trace, device)
    changes = [] if only_applicable else _level_changes(trace, step, device, num_ranks, link_bytes_per_s)
    allocator = choose_allocator(trace, device, change_settings=not only_applicable)
    limit = None if capacity_bytes is None else capacity_bytes - allocator.unused_bytes
    subsets = [chosen for count in range(len(changes) + 1) for chosen in combinations(changes, count)]
    candidates = [each for chosen in subsets for each in _candidates(found.model, chosen, limit)]
    front = pareto_front(candidates, lambda each: (each.peak_bytes, each.cost_ns))
    planned = _Planned(trace, device, step, found, allocator, capacity_bytes, limit)
    return planned.report(_choose(candidates, limit), front)


def _level_changes(
    trace: Trace, step: RecordedStep, device: str, num_ranks: int | None, link_bytes_per_s: float
) -> list[LevelChange]:
    ranks = num_ranks or trace.manifest.world_size
    changes = (
        optimizer_in_backward(trace, step, device),
        shard_optimizer_state(trace, step, device, ranks, link_bytes_per_s),
    )
    return [change for change in changes if change is not None]


def _candidates(model: RecomputeModel, changes: tuple[LevelChange, ...], limit: int | None) -> Iterator[_Candidate]:
    """Yield what recomputation reaches after changes: nothing, the lowest peak, the capacity, and peaks between."""
    for change in changes:
        model = model.with_fixed_changes(change.positions, change.bytes)
    names = tuple(change.change for change in changes)
    nothing = np.zeros(model.num_options, bool)
    highest = model.replay(nothing).peak_bytes
    yield _Candidate(names, Choice(nothing, highest, 0, is_optimal=True))
    lowest = minimize_peak(model, max_seconds=SOLVER_SECONDS)
    yield _Candidate(names, lowest)
    targets = [int(target) for target in np.linspace(lowest.peak_bytes, highest, NUM_TARGETS + 2)[1:-1]]
    if limit is not None and lowest.peak_bytes < limit < highest:
        targets.append(limit)
    for target in targets:
        choice = minimize_cost(model, target, max_seconds=SOLVER_SECONDS)
        if choice is not None:
            yield _Candidate(names, choice)


def _choose(candidates: list[_Candidate], limit: int | None) -> _Candidate:
    """Return the cheapest plan that fits, or the one of the lowest peak; of several the one with the fewest changes."""
    fitting = [each for each in candidates if limit is not None and each.peak_bytes <= limit]
    if fitting:
        return min(fitting, key=lambda each: (each.cost_ns, len(each.changes), each.peak_bytes))
    return min(candidates, key=lambda each: (each.peak_bytes, each.cost_ns, len(each.changes)))


@dataclass(frozen=True)
class _Planned:
    """Everything that the report of a plan needs."""

    trace: Trace
    device: str
    step: RecordedStep
    found: RecomputeOptions
    allocator: AllocatorChoice
    capacity_bytes: int | None
    limit: int | None
    """Highest requested bytes with which the step fits."""

    def report(self, chosen: _Candidate, front: list[_Candidate]) -> AutoPlan:
        plan = make_plan(self.trace, self.device, self.step, self.found, chosen.choice, None).plan
        changes = (*chosen.changes, *self.allocator.changes)
        notes = tuple(change.note for change in changes)
        if changes:
            names = ", ".join(change.name for change in changes)
            notes = (f"The prediction includes changes that memtrace.apply does not carry out: {names}.", *notes)
        predicted = StepCost(chosen.peak_bytes, self._step_ns(chosen))
        return AutoPlan(
            plan=replace(plan, predicted=predicted, assumptions=(*plan.assumptions, *notes)),
            changes=changes,
            capacity_bytes=self.capacity_bytes,
            unused_bytes=self.allocator.unused_bytes,
            fits=self._fits(chosen),
            front=tuple(self._option(each) for each in front),
        )

    def _option(self, candidate: _Candidate) -> AutoOption:
        options = np.flatnonzero(candidate.choice.chosen).tolist()
        return AutoOption(
            candidate.peak_bytes,
            self._step_ns(candidate),
            len({self.found.options[number].module for number in options}),
            tuple(change.name for change in (*candidate.changes, *self.allocator.changes)),
            self._fits(candidate),
        )

    def _fits(self, candidate: _Candidate) -> bool | None:
        return None if self.limit is None else candidate.peak_bytes <= self.limit

    def _step_ns(self, candidate: _Candidate) -> int | None:
        return None if self.step.cost.step_ns is None else self.step.cost.step_ns + candidate.cost_ns
