"""Plans: what would change in a training program, and what that is predicted to give.

Attributes are imported on first use: reading a plan does not import the planners.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrace.planning.auto import AutoOption, AutoPlan, plan_auto
    from memtrace.planning.offload import plan_offload
    from memtrace.planning.plan import Plan, PlanAction, StepCost, read_plan, write_plan
    from memtrace.planning.recompute import RecomputedModule, RecomputePlan, plan_recompute
    from memtrace.planning.recorded_step import choose_step
    from memtrace.planning.spill import SpillPlan, plan_spill
    from memtrace.planning.whatif import WhatIf, plan_whatif

__all__ = [
    "AutoOption",
    "AutoPlan",
    "Plan",
    "PlanAction",
    "RecomputePlan",
    "RecomputedModule",
    "SpillPlan",
    "StepCost",
    "WhatIf",
    "choose_step",
    "plan_auto",
    "plan_offload",
    "plan_recompute",
    "plan_spill",
    "plan_whatif",
    "read_plan",
    "write_plan",
]

_HOMES = {
    "AutoOption": "memtrace.planning.auto",
    "AutoPlan": "memtrace.planning.auto",
    "Plan": "memtrace.planning.plan",
    "PlanAction": "memtrace.planning.plan",
    "RecomputePlan": "memtrace.planning.recompute",
    "RecomputedModule": "memtrace.planning.recompute",
    "SpillPlan": "memtrace.planning.spill",
    "StepCost": "memtrace.planning.plan",
    "WhatIf": "memtrace.planning.whatif",
    "choose_step": "memtrace.planning.recorded_step",
    "plan_auto": "memtrace.planning.auto",
    "plan_offload": "memtrace.planning.offload",
    "plan_recompute": "memtrace.planning.recompute",
    "plan_spill": "memtrace.planning.spill",
    "plan_whatif": "memtrace.planning.whatif",
    "read_plan": "memtrace.planning.plan",
    "write_plan": "memtrace.planning.plan",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memtrace.planning' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
