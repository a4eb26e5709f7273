"""``plan auto``: the cheapest mix of changes with which a step fits a capacity.

Changes of the program that the user makes are combined with recomputation and offloads, which ``memtrace.apply``
carries out. For every combination of the former, recomputation is chosen exactly, and offloads are added to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Final

import numpy as np

from memtrace.analysis.bandwidth import CopyBandwidths
from memtrace.display import Displayed
from memtrace.planning.auto_allocator import AllocatorChoice, choose_allocator
from memtrace.planning.auto_autocast import autocast_options
from memtrace.planning.auto_changes import (
    LevelChange,
    ProgramChange,
    optimizer_in_backward,
    shard_optimizer_state,
)
from memtrace.planning.pareto import pareto_front
from memtrace.planning.plan import Plan, PlanAction
from memtrace.planning.recompute import make_plan, recompute_options
from memtrace.planning.recompute_model import RecomputeModel
from memtrace.planning.recompute_offload import JointPlanner
from memtrace.planning.recompute_options import RecomputeOptions
from memtrace.planning.recompute_solver import Choice, minimize_cost, minimize_peak
from memtrace.planning.recorded_step import RecordedStep, main_device
from memtrace.trace import Trace

NUM_TARGETS: Final = 4
"""Peaks between the lowest and the highest one for which recomputation is chosen."""
SOLVER_SECONDS: Final = 5.0
"""Time for one choice."""
UNKNOWN_NS: Final = 10**15
"""Stands for a time that is unknown: such a plan is chosen only where no other one reaches its peak."""
LINK_BYTES_PER_S: Final = 10e9
"""Bandwidth between ranks where none is given."""


@dataclass(frozen=True)
class AutoOption:
    """One plan of the Pareto front."""

    peak_bytes: int
    """Peak of the requested bytes."""
    step_ns: int | None
    """Duration of the step; None: unknown."""
    actions: tuple[PlanAction, ...]
    """What ``memtrace.apply`` carries out."""
    changes: tuple[str, ...]
    """Changes that the user makes, by name."""
    fits: bool | None
    """Whether the plan fits the capacity; None: no capacity was given."""


@dataclass(frozen=True)
class AutoPlan(Displayed):
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
    """A plan after changes of the program, which its prediction includes."""

    plan: Plan
    cost_ns: int
    """Time added to the step; bytes that are computed again where the trace has no times."""
    changes: tuple[ProgramChange, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return self.plan.predicted.peak_bytes


@dataclass(frozen=True)
class _Limits:
    """What has to fit where."""

    capacity_bytes: int | None
    allocator: AllocatorChoice

    @property
    def peak_bytes(self) -> int | None:
        """Highest requested bytes with which the step fits; None: no limit."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.allocator.unused_bytes

    def fits(self, candidate: _Candidate) -> bool | None:
        return None if self.peak_bytes is None else candidate.peak_bytes <= self.peak_bytes

    def targets(self, lowest: int, highest: int) -> list[int]:
        """Return the peaks to plan for between the lowest and the highest one."""
        targets = [int(target) for target in np.linspace(lowest, highest, NUM_TARGETS + 2)[1:-1]]
        if self.peak_bytes is not None and lowest < self.peak_bytes < highest:
            targets.append(self.peak_bytes)
        return targets


def plan_auto(
    trace: Trace,
    device: str | None = None,
    *,
    capacity_bytes: int | None = None,
    num_ranks: int | None = None,
    link_bytes_per_s: float = LINK_BYTES_PER_S,
    only_applicable: bool = False,
    bandwidths: CopyBandwidths | None = None,
    autocast_to: str | None = None,
) -> AutoPlan:
    """Return the cheapest mix of changes with which a step of the trace fits a capacity.

    Args:
        trace: A single-rank trace with module calls and reads.
        device: The device whose peak is planned; None: the first GPU, or the CPU.
        capacity_bytes: Memory of the device for the process; None: the plan is the one of the lowest peak.
        num_ranks: Data-parallel ranks over which optimizer state can be sharded; None: those of the recording.
        link_bytes_per_s: Bandwidth between ranks.
        only_applicable: Whether to consider only what ``memtrace.apply`` carries out.
        bandwidths: Cost of copies between the device and the host, to offload saved tensors; None: nothing is
            offloaded. Nothing is offloaded either where the trace has no times.
        autocast_to: Type in which forward can compute under ``torch.autocast``, ``bfloat16`` or ``float16``; None: the
            numbers of the program are not changed.

    Raises:
        MemtraceError: The trace has no steps, no module calls or no reads.
    """
    device = device or main_device(trace)
    step, found = recompute_options(trace, device)
    changes = [] if only_applicable else _level_changes(trace, step, device, num_ranks, link_bytes_per_s)
    limits = _Limits(capacity_bytes, choose_allocator(trace, device, change_settings=not only_applicable))
    joint = None
    if bandwidths is not None and step.cost.step_ns is not None:
        joint = JointPlanner(trace, device, step, found, bandwidths)
    recomputation = _Recomputation(trace, device, step, found, limits, joint)
    subsets = [chosen for count in range(len(changes) + 1) for chosen in combinations(changes, count)]
    candidates = [each for chosen in subsets for each in recomputation.candidates(chosen)]
    if autocast_to is not None and not only_applicable:
        half, change = autocast_options(trace, step, device, autocast_to)
        recomputation = _Recomputation(trace, device, step, half, limits, None)
        candidates += [each for chosen in subsets for each in recomputation.candidates((change, *chosen))]
    front = pareto_front(candidates, lambda each: (each.peak_bytes, each.cost_ns))
    return _report(_choose(candidates, limits), front, limits)


def _level_changes(
    trace: Trace, step: RecordedStep, device: str, num_ranks: int | None, link_bytes_per_s: float
) -> list[LevelChange]:
    ranks = num_ranks or trace.manifest.world_size
    changes = (
        optimizer_in_backward(trace, step, device),
        shard_optimizer_state(trace, step, device, ranks, link_bytes_per_s),
    )
    return [change for change in changes if change is not None]


@dataclass(frozen=True)
class _Recomputation:
    """Recomputation of a step, after changes of the program."""

    trace: Trace
    device: str
    step: RecordedStep
    found: RecomputeOptions
    limits: _Limits
    joint: JointPlanner | None
    """Adds offloads; None: nothing is offloaded."""

    def candidates(self, level_changes: tuple[LevelChange, ...]) -> Iterator[_Candidate]:
        """Yield what is reached with nothing recomputed, at the lowest peak, at the capacity, and between."""
        model = self.found.model
        for change in level_changes:
            model = model.with_fixed_changes(change.positions, change.bytes)
        changes = tuple(change.change for change in level_changes)
        for choice, targets in self._choices(model):
            candidate = self._candidate(choice, changes)
            yield candidate
            if self.joint is not None:
                for plan in self.joint.plans(model, choice.chosen, candidate.plan, targets):
                    added_ns = (plan.predicted.step_ns or 0) - (candidate.plan.predicted.step_ns or 0)
                    yield _Candidate(plan, candidate.cost_ns + added_ns, changes)

    def _choices(self, model: RecomputeModel) -> Iterator[tuple[Choice, list[int]]]:
        """Yield choices of what is recomputed, and the peaks that offloads are to reach beside each."""
        nothing = np.zeros(model.num_options, bool)
        highest = model.replay(nothing).peak_bytes
        lowest = minimize_peak(model, max_seconds=SOLVER_SECONDS)
        targets = self.limits.targets(lowest.peak_bytes, highest)
        goals = [*targets, *([self.limits.peak_bytes] if self.limits.peak_bytes is not None else [])]
        solved = (minimize_cost(model, target, max_seconds=SOLVER_SECONDS) for target in targets)
        choices = [Choice(nothing, highest, 0, is_optimal=True), lowest, *(each for each in solved if each is not None)]
        if self.joint is not None:
            for chosen in self.joint.further_choices(model, goals, SOLVER_SECONDS):
                peak = model.replay(chosen).peak_bytes
                choices.append(Choice(chosen, peak, int(model.cost_ns[chosen].sum()), is_optimal=False))
        seen: set[bytes] = set()
        for choice in choices:
            if choice.chosen.tobytes() not in seen:
                seen.add(choice.chosen.tobytes())
                yield choice, goals

    def _candidate(self, choice: Choice, changes: tuple[ProgramChange, ...]) -> _Candidate:
        plan = make_plan(self.trace, self.device, self.step, self.found, choice, None).plan
        added = sum(UNKNOWN_NS if change.cost_ns is None else change.cost_ns for change in changes)
        known_ns = plan.predicted.step_ns if added < UNKNOWN_NS else None
        predicted = replace(plan.predicted, step_ns=None if known_ns is None else known_ns + added)
        return _Candidate(replace(plan, predicted=predicted), choice.cost_ns + added, changes)


def _choose(candidates: list[_Candidate], limits: _Limits) -> _Candidate:
    """Return the cheapest plan that fits, or the one of the lowest peak; of several the one with the fewest changes."""
    fitting = [each for each in candidates if limits.fits(each)]
    if fitting:
        return min(fitting, key=lambda each: (each.cost_ns, len(each.changes), len(each.plan.actions), each.peak_bytes))
    return min(candidates, key=lambda each: (each.peak_bytes, each.cost_ns, len(each.changes)))


def _report(chosen: _Candidate, front: list[_Candidate], limits: _Limits) -> AutoPlan:
    changes = (*chosen.changes, *limits.allocator.changes)
    notes = tuple(change.note for change in changes)
    if changes:
        names = ", ".join(change.name for change in changes)
        notes = (f"The prediction includes changes that memtrace.apply does not carry out: {names}.", *notes)
    return AutoPlan(
        plan=replace(chosen.plan, assumptions=(*chosen.plan.assumptions, *notes)),
        changes=changes,
        capacity_bytes=limits.capacity_bytes,
        unused_bytes=limits.allocator.unused_bytes,
        fits=limits.fits(chosen),
        front=tuple(
            AutoOption(
                each.peak_bytes,
                each.plan.predicted.step_ns,
                each.plan.actions,
                tuple(change.name for change in (*each.changes, *limits.allocator.changes)),
                limits.fits(each),
            )
            for each in front
        ),
    )
