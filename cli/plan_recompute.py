"""``memtrace plan recompute``: chooses the modules to recompute in backward (activation checkpointing)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click
from memtrace.cli.output import escape, plain_table
from memtrace.cli.plan_output import PlanRequest, makes_plan, show_plan
from memtrace.cli.quantities import BYTES

from memtrace.planning.plan import Plan
from memtrace.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.planning.recompute import RecomputedModule
    from memtrace.trace import Trace

RESULT: Final = Plan
MAX_ROWS: Final = 30
"""Modules that the table lists."""


@click.command("recompute")
@makes_plan
@click.option(
    "--target-peak", type=BYTES, help="Highest peak allowed, e.g. 2GiB; default: the lowest that is possible."
)
@click.option("--device", help="Device to plan for; default: the first GPU, or cpu.")
@click.option("--no-selective", is_flag=True, help="Recompute whole modules only: keep no operator outputs.")
def command(request: PlanRequest, target_peak: int | None, device: str | None, no_selective: bool) -> None:
    """Choose the modules to recompute in backward.

    Recomputation (activation checkpointing) discards what the forward calls of a module save for backward, and calls
    the module again when backward needs it. The command finds the modules, and the operators whose outputs are worth
    keeping, that bring the peak below --target-peak at the least added time.

    \b
    Examples:
      memtrace plan recompute run.memtrace --target-peak 2GiB -o plan.json
      memtrace plan recompute --target-peak 2GiB --prove "train.py --epochs 1"
    """
    from memtrace.planning.recompute import RecomputePlan, plan_recompute

    results: list[RecomputePlan] = []

    def make_plan(trace: Trace) -> Plan:
        results.append(plan_recompute(trace, device, target_bytes=target_peak, selective=not no_selective))
        return results[-1].plan

    def print_details(out: Console, _: Plan) -> None:
        if results[-1].modules:
            out.print()
            out.print(_module_table(results[-1].modules))
        if len(results[-1].modules) > MAX_ROWS:
            out.print(f"{len(results[-1].modules) - MAX_ROWS:,} more modules; --json lists all of them.", style="dim")

    show_plan(request, make_plan, print_details)


def _module_table(modules: tuple[RecomputedModule, ...]) -> Any:
    table = plain_table("Module", "Calls", "Saved", "Added time", "Outputs kept of")
    for module in modules[:MAX_ROWS]:
        table.add_row(
            escape(module.module),
            f"{module.num_calls:,}",
            format_bytes(module.saved_bytes),
            format_duration(module.added_ns),
            escape(", ".join(module.kept_operators)),
        )
    total = sum(module.saved_bytes for module in modules)
    added = [module.added_ns for module in modules if module.added_ns is not None]
    name = format_count(len(modules), "module")
    table.add_row(
        name, "", format_bytes(total), format_duration(sum(added) if len(added) == len(modules) else None), ""
    )
    return table
