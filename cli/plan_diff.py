"""``memtrace plan diff``: compares two plans."""

from __future__ import annotations

from typing import Final

import click
from memtrace.cli.output import console, escape, plain_table, print_json
from memtrace.cli.paths import PathOrUrl

from memtrace.format.storage import AnyPath
from memtrace.planning.compare import PlanDifference, compare_plans
from memtrace.planning.plan import read_plan
from memtrace.units import format_bytes, format_duration

RESULT: Final = PlanDifference


@click.command("diff")
@click.argument("plan", type=PathOrUrl())
@click.argument("other", type=PathOrUrl())
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON; unknown values are null.")
def command(plan: AnyPath, other: AnyPath, as_json: bool) -> None:
    """Compare PLAN with OTHER: what only one of them changes, and the costs that they predict.

    \b
    Example:
      memtrace plan diff plan.json other.json
    """
    difference = compare_plans(read_plan(plan), read_plan(other))
    if as_json:
        print_json(difference)
        return
    out = console()
    table = plain_table("", "Peak", "Step time")
    for name, cost in ((str(plan), difference.predicted), (str(other), difference.other_predicted)):
        table.add_row(escape(name), format_bytes(cost.peak_bytes), format_duration(cost.step_ns))
    out.print(table)
    for path, changes in ((plan, difference.only_in_plan), (other, difference.only_in_other)):
        out.print(f"Only in {escape(str(path))}:{'' if changes else ' nothing'}")
        for change in changes:
            out.print(f"  {escape(change)}")
    if difference.note is not None:
        out.print(escape(difference.note), style="dim")
