"""``memtrace plan``: a group of commands that predict the effect of a change. Each is imported when it is called."""

from __future__ import annotations

from typing import ClassVar

import click
from memtrace.cli import LazyGroup

PLANS: dict[str, tuple[str, str]] = {
    "auto": ("memtrace.cli.plan_auto", "Mix changes so that a step fits a capacity."),
    "recompute": ("memtrace.cli.plan_recompute", "Choose the modules to recompute in backward."),
    "offload": ("memtrace.cli.plan_offload", "Choose saved tensors that wait in host memory until backward."),
    "spill": (
        "memtrace.cli.plan_spill",
        "Cut the model into shards that fit a memory budget; schedule several models.",
    ),
    "whatif": ("memtrace.cli.plan_whatif", "Predict a step with another batch, precision, optimizer or sharding."),
    "allocator": ("memtrace.cli.plan_allocator", "Predict reserved memory under other CUDA allocator settings."),
    "pipeline": ("memtrace.cli.plan_pipeline", "Compare pipeline schedules and partitions of the model."),
    "show": ("memtrace.cli.plan_show", "Print a plan."),
    "diff": ("memtrace.cli.plan_diff", "Compare two plans."),
}


class _PlanGroup(LazyGroup):
    table: ClassVar[dict[str, tuple[str, str]]] = PLANS


@click.group("plan", cls=_PlanGroup)
def command() -> None:
    """Plan a change from a recorded trace, predict its effect, and prove it by a second run."""
