"""``plan recompute``: which modules to recompute in backward for a given peak, at the least added time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from memtrace.analysis.block_accesses import has_accesses
from memtrace.display import Displayed
from memtrace.errors import MemtraceError
from memtrace.planning.actions import Recompute
from memtrace.planning.plan import Plan, StepCost
from memtrace.planning.recompute_options import RecomputeOption, RecomputeOptions, find_options
from memtrace.planning.recompute_solver import Choice, minimize_cost, minimize_peak
from memtrace.planning.recorded_step import RecordedStep, choose_step, main_device
from memtrace.trace import Trace
from memtrace.units import format_bytes, format_names

NO_TIMES: Final = (
    "The trace has no times, so the plan recomputes as few bytes as possible; the time that this takes is unknown."
)
NOT_OPTIMAL: Final = "The search ended before the optimum was proved: a faster choice of modules may exist."
ASYNCHRONOUS: Final = (
    "Times of modules were measured on the host. They are correct only where the program waits for the device."
)


@dataclass(frozen=True)
class RecomputedModule:
    """A module that a plan recomputes."""

    module: str
    num_calls: int
    """Calls of the module in a step."""
    saved_bytes: int
    """Bytes that these calls no longer keep between forward and backward."""
    added_ns: int | None
    """Time that its recomputation adds to the step; None: unknown."""
    kept_operators: tuple[str, ...]
    """Operators whose outputs are kept instead of recomputed."""


@dataclass(frozen=True)
class RecomputePlan(Displayed):
    """A plan that recomputes modules, and how it was chosen."""

    plan: Plan
    modules: tuple[RecomputedModule, ...]
    target_bytes: int | None
    """Peak that was asked for; None: the lowest."""
    is_optimal: bool
    """Whether no other choice of modules is faster for this peak."""


def plan_recompute(
    trace: Trace, device: str | None = None, *, target_bytes: int | None = None, selective: bool = True
) -> RecomputePlan:
    """Return which modules to recompute in backward, so that a step of the trace stays under a peak.

    Args:
        trace: A single-rank trace with module calls and reads.
        device: The device whose peak is planned; None: the one with the highest peak.
        target_bytes: Peak of the requested bytes that must not be exceeded, reached at the least added time; None: the
            lowest peak that recomputation can reach.
        selective: Whether to keep the outputs of some operators of a recomputed module.

    Raises:
        MemtraceError: The trace has no steps, no module calls or no reads, or the target cannot be reached.
    """
    device = device or main_device(trace)
    step, found = recompute_options(trace, device, selective=selective)
    choice = _choose(found, step, device, target_bytes)
    return make_plan(trace, device, step, found, choice, target_bytes)


def recompute_options(trace: Trace, device: str, *, selective: bool = True) -> tuple[RecordedStep, RecomputeOptions]:
    """Return the step that plans start from, and what recomputation can do in it.

    Raises:
        MemtraceError: The trace has no steps, no module calls or no reads.
    """
    step = choose_step(trace, device)
    where = trace.path or "the trace"
    if not has_accesses(trace):
        raise MemtraceError(
            f"{where} has no reads and writes, which show what backward needs. Record with memtrace.record() and "
            "without accesses=False."
        )
    found = find_options(trace, step, device, selective=selective)
    if not found.options:
        raise MemtraceError(
            f"{where}: no module call of step {step.number} saves memory of {device} for backward, so there is nothing "
            "to recompute. Record a training loop whose model is a torch.nn.Module and is not checkpointed already."
        )
    replayed = found.model.replay([]).peak_bytes
    if replayed != step.cost.peak_bytes:
        raise MemtraceError(
            f"{where}: the events of step {step.number} add up to a peak of {format_bytes(replayed)} on {device} "
            f"instead of {format_bytes(step.cost.peak_bytes)}, so that no plan can be made. Record the program again."
        )
    return step, found


def _choose(found: RecomputeOptions, step: RecordedStep, device: str, target_bytes: int | None) -> Choice:
    nothing = np.zeros(found.model.num_options, bool)
    if target_bytes is not None and step.cost.peak_bytes <= target_bytes:
        return Choice(nothing, step.cost.peak_bytes, 0, is_optimal=True)
    if target_bytes is None:
        return minimize_peak(found.model)
    choice = minimize_cost(found.model, target_bytes)
    if choice is None:
        least = minimize_peak(found.model)
        raise MemtraceError(
            f"recomputation cannot reach a peak of {format_bytes(target_bytes)} on {device}: the lowest peak it "
            f"reaches is {format_bytes(least.peak_bytes)} (recorded: {format_bytes(step.cost.peak_bytes)})."
        )
    return choice


def make_plan(
    trace: Trace, device: str, step: RecordedStep, found: RecomputeOptions, choice: Choice, target_bytes: int | None
) -> RecomputePlan:
    """Return the plan of a choice of options."""
    chosen = [found.options[option] for option in np.flatnonzero(choice.chosen).tolist()]
    step_ns = step.cost.step_ns
    predicted = StepCost(choice.peak_bytes, None if step_ns is None else step_ns + choice.cost_ns)
    return RecomputePlan(
        plan=Plan(
            device=device,
            actions=make_actions(chosen),
            recorded=step.cost,
            predicted=predicted,
            assumptions=_assumptions(trace, device, found, choice),
            trace=str(trace.path) if trace.path else None,
        ),
        modules=tuple(
            RecomputedModule(
                option.module,
                option.num_calls,
                option.saved_bytes,
                option.cost_ns if step_ns is not None else None,
                option.kept_operators,
            )
            for option in chosen
        ),
        target_bytes=target_bytes,
        is_optimal=choice.is_optimal,
    )


def make_actions(chosen: list[RecomputeOption]) -> tuple[Recompute, ...]:
    """Return the actions of chosen options: one for all modules that keep the outputs of the same operators."""
    by_kept: dict[tuple[str, ...], Recompute] = {}
    for option in chosen:
        action = by_kept.setdefault(option.kept_operators, Recompute((), option.kept_operators))
        by_kept[option.kept_operators] = replace(action, modules=(*action.modules, option.module))
    return tuple(by_kept.values())


def _assumptions(trace: Trace, device: str, found: RecomputeOptions, choice: Choice) -> tuple[str, ...]:
    notes = []
    if not trace.has_times:
        notes.append(NO_TIMES)
    elif device != "cpu":
        notes.append(ASYNCHRONOUS)
    if not choice.is_optimal:
        notes.append(NOT_OPTIMAL)
    if found.checkpointed_modules:
        notes.append(
            f"The program already recomputes in {format_names(found.checkpointed_modules)}: these modules and those "
            "around them are left as they are."
        )
    return tuple(notes)
