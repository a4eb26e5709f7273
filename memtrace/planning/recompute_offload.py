"""Plans that recompute some modules and offload tensors that are still saved then, inputs of these modules included.

The order of the two choices matters, so both are made. For a choice of modules the tensors to offload are found in the
step as it is with the repetitions: what it saves, how high its memory is, and how long copies can take beside them. For
a choice of tensors the modules to recompute are those that save others, which gives a further choice of modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from memtrace.analysis.bandwidth import CopyBandwidths
from memtrace.format.arrays import Array
from memtrace.planning.actions import Offload
from memtrace.planning.offload import MIN_OFFLOAD_BYTES, OffloadModel, name_tensors, offload_assumptions
from memtrace.planning.offload_candidates import StepSaves, find_step_saves
from memtrace.planning.offload_problem import ChangedStep, OffloadProblem, build_problem
from memtrace.planning.offload_schedule import OffloadSchedule
from memtrace.planning.offload_search import choose_tensors, least_peak_bytes
from memtrace.planning.plan import Plan, StepCost
from memtrace.planning.recompute_model import MemoryLevels, RecomputeModel
from memtrace.planning.recompute_options import RecomputeOptions
from memtrace.planning.recompute_solver import minimize_cost, minimize_peak
from memtrace.planning.recorded_step import RecordedStep
from memtrace.planning.repeated_calls import BEFORE_REPETITION
from memtrace.trace import Trace

MAX_SCHEDULES: Final = 24
"""Number of schedules of copies that are computed for one choice of modules and one peak."""
POSITIONAL: Final = "The inputs of recomputed modules that are offloaded are passed as positional arguments."


@dataclass(frozen=True)
class JointPlanner:
    """Offloads beside recomputation in one recorded step."""

    trace: Trace
    device: str
    step: RecordedStep
    found: RecomputeOptions
    bandwidths: CopyBandwidths
    min_bytes: int = MIN_OFFLOAD_BYTES
    _saves: dict[bytes, StepSaves] = field(default_factory=dict)

    def problem(self, levels: MemoryLevels, chosen: Array) -> tuple[OffloadModel, OffloadProblem]:
        """Return the offload problem of the step with a choice of modules.

        Args:
            levels: The memory of the step with the choice.
            chosen: The options of recomputation, a mask.
        """
        repeated = self.found.repeated(self.trace, chosen)
        key = chosen.tobytes()
        if key not in self._saves:
            self._saves[key] = find_step_saves(
                self.trace, self.device, self.step, min_bytes=self.min_bytes, repeated=repeated
            )
        order = np.argsort(repeated.repeat_row, kind="stable")
        changed = ChangedStep(
            levels.positions, levels.bytes, repeated.repeat_row[order] - BEFORE_REPETITION, repeated.cost_ns[order]
        )
        saves = self._saves[key]
        problem = build_problem(self.trace, self.device, self.step, saves, changed)
        return OffloadModel(self.step, saves.candidates, problem, self.bandwidths), problem

    def plans(self, model: RecomputeModel, chosen: Array, plan: Plan, targets: Iterable[int]) -> Iterator[Plan]:
        """Yield plans that add an offload to a plan of recomputation: of the lowest peak, and of the targets."""
        levels = model.replay(chosen)
        offload, problem = self.problem(levels, chosen)
        lowest = least_peak_bytes(problem)
        for target in sorted({lowest, *(target for target in targets if lowest < target < levels.peak_bytes)}):
            schedule = choose_tensors(problem, target, self.bandwidths, max_schedules=MAX_SCHEDULES)
            if schedule is not None and len(schedule.tensor):
                yield self._extend(plan, offload, schedule, has_repetitions=bool(chosen.any()))

    def further_choices(self, model: RecomputeModel, targets: Iterable[int], max_seconds: float) -> Iterator[Array]:
        """Yield choices of modules for steps in which tensors are offloaded first."""
        nothing = np.zeros(model.num_options, bool)
        offload, problem = self.problem(model.replay(nothing), nothing)
        lowest = least_peak_bytes(problem)
        for target in sorted({lowest, *(target for target in targets if target > lowest)}):
            schedule = choose_tensors(problem, target, self.bandwidths, max_schedules=MAX_SCHEDULES)
            if schedule is None or not len(schedule.tensor):
                continue
            remaining = self._without_offloaded(model, offload, schedule)
            for choice in (
                minimize_peak(remaining, max_seconds=max_seconds),
                *(minimize_cost(remaining, goal, max_seconds=max_seconds) for goal in targets if goal < target),
            ):
                if choice is not None and choice.chosen.any():
                    yield choice.chosen

    def _without_offloaded(
        self, model: RecomputeModel, offload: OffloadModel, schedule: OffloadSchedule
    ) -> RecomputeModel:
        """Return the model of the step without offloaded tensors, and without the modules that save them."""
        candidates, found = offload.candidates, self.found.found
        row, block = candidates.row[schedule.tensor], candidates.block[schedule.tensor]
        excluded = np.zeros(model.num_options, bool)
        for option, calls in enumerate(self.found.calls):
            first, end = found.calls.first_row[list(calls)], found.calls.end_row[list(calls)]
            saves = (first[:, None] <= row) & (row < end[:, None])
            reads = np.isin(found.inputs[0][np.isin(found.inputs[1], calls)], block)
            excluded[option] = bool(saves.any() or reads.any())
        sizes = offload.problem.size[schedule.tensor]
        positions = np.concatenate([candidates.held_row[schedule.tensor], candidates.read_row[schedule.tensor]])
        changed = model.with_fixed_changes(positions.astype(np.float64), np.concatenate([-sizes, sizes]))
        return changed.without_options(excluded)

    def _extend(self, plan: Plan, offload: OffloadModel, schedule: OffloadSchedule, *, has_repetitions: bool) -> Plan:
        step_ns = plan.predicted.step_ns
        notes = offload_assumptions(self.trace, self.device, offload, schedule)
        return replace(
            plan,
            actions=(*plan.actions, Offload(name_tensors(offload, schedule), self.device)),
            predicted=StepCost(schedule.peak_bytes, None if step_ns is None else step_ns + round(schedule.added_ns)),
            assumptions=(*plan.assumptions, *notes, *((POSITIONAL,) if has_repetitions else ())),
        )
