"""Plans: what would change in a training program, and what that is predicted to give."""

from memtrace.planning.plan import Plan, PlanAction, StepCost, read_plan, write_plan
from memtrace.planning.whatif import WhatIf, plan_whatif

__all__ = ["Plan", "PlanAction", "StepCost", "WhatIf", "plan_whatif", "read_plan", "write_plan"]
