"""``memtrace plan``: what would happen if. Each plan is a command of its own, imported when it is called."""

from __future__ import annotations

from typing import ClassVar

import click
from memtrace.cli import LazyGroup

PLANS: dict[str, tuple[str, str]] = {
    "allocator": ("memtrace.cli.plan_allocator", "Would another setting of the CUDA allocator have fitted?"),
    "pipeline": ("memtrace.cli.plan_pipeline", "Which pipeline schedule and which cut of the model?"),
}


class _Plans(LazyGroup):
    table: ClassVar[dict[str, tuple[str, str]]] = PLANS


@click.group("plan", cls=_Plans)
def command() -> None:
    """Predict what a change would give, from the tables of a trace."""
