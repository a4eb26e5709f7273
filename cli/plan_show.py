"""``memtrace plan show``: prints a plan that another command wrote."""

from __future__ import annotations

from typing import Final

import click
from memtrace.cli.output import print_json
from memtrace.cli.paths import PathOrUrl
from memtrace.cli.plan_output import print_plan

from memtrace.format.storage import AnyPath
from memtrace.planning.plan import Plan, read_plan

RESULT: Final = Plan


@click.command("show")
@click.argument("plan", type=PathOrUrl())
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON; unknown values are null.")
def command(plan: AnyPath, as_json: bool) -> None:
    """Print PLAN, a file that another plan command wrote with -o.

    \b
    Example:
      memtrace plan show plan.json
    """
    found = read_plan(plan)
    if as_json:
        print_json(found)
    else:
        print_plan(found)
