"""The difference between two plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from memtrace.display import Displayed
from memtrace.planning.plan import Plan, PlanAction, StepCost


@dataclass(frozen=True)
class PlanDifference(Displayed):
    """What two plans change differently, and what each predicts."""

    predicted: StepCost
    """Cost that the plan predicts."""
    other_predicted: StepCost
    """Cost that the other plan predicts."""
    only_in_plan: tuple[str, ...]
    """What only the plan changes, as sentences."""
    only_in_other: tuple[str, ...]
    """What only the other plan changes."""
    note: str | None
    """Why the costs cannot be compared; None: they start from the same recorded step of one device."""


def compare_plans(plan: Plan, other: Plan) -> PlanDifference:
    """Return the difference between two plans, by the single elements of their actions."""
    note = None
    if plan.device != other.device:
        note = f"The costs are of different devices: {plan.device} and {other.device}."
    elif plan.recorded != other.recorded:
        note = "The plans start from different recorded steps."
    changes = [change for action in plan.actions for change in action.split()]
    other_changes = [change for action in other.actions for change in action.split()]
    return PlanDifference(
        predicted=plan.predicted,
        other_predicted=other.predicted,
        only_in_plan=_describe_missing(changes, other_changes),
        only_in_other=_describe_missing(other_changes, changes),
        note=note,
    )


def _describe_missing(changes: Sequence[PlanAction], others: Sequence[PlanAction]) -> tuple[str, ...]:
    known = frozenset(others)
    return tuple(change.describe() for change in changes if change not in known)
