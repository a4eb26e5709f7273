"""Plans: what would change in a training program, and what that is predicted to give."""

from memtrace.planning.offload import plan_offload
from memtrace.planning.plan import Plan, PlanAction, StepCost, read_plan, write_plan
from memtrace.planning.recorded_step import choose_step
from memtrace.planning.spill import SpillPlan, plan_spill

__all__ = [
    "Plan",
    "PlanAction",
    "SpillPlan",
    "StepCost",
    "choose_step",
    "plan_offload",
    "plan_spill",
    "read_plan",
    "write_plan",
]
