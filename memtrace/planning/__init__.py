"""Plans: what would change in a training program, and what that is predicted to give."""

from memtrace.planning.offload import plan_offload
from memtrace.planning.plan import Plan, PlanAction, StepCost, read_plan, write_plan
from memtrace.planning.recorded_step import choose_step

__all__ = ["Plan", "PlanAction", "StepCost", "choose_step", "plan_offload", "read_plan", "write_plan"]
