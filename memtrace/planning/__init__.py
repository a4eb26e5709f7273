"""Plans: what would change in a training program, and what that is predicted to give."""

from memtrace.planning.auto import AutoOption, AutoPlan, plan_auto
from memtrace.planning.plan import Plan, PlanAction, StepCost, read_plan, write_plan
from memtrace.planning.recompute import RecomputedModule, RecomputePlan, plan_recompute

__all__ = [
    "AutoOption",
    "AutoPlan",
    "Plan",
    "PlanAction",
    "RecomputePlan",
    "RecomputedModule",
    "StepCost",
    "plan_auto",
    "plan_recompute",
    "read_plan",
    "write_plan",
]
