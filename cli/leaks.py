"""``memtrace leaks``: what grows from step to step, how fast, and when the memory is full."""

from __future__ import annotations

from typing import Any

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, missing_blocks_reason, plain_table, print_json
from memtrace.cli.quantities import BYTES
from memtrace.cli.tabular import print_csv
from rich.console import Console
from rich.markup import escape

from memtrace.units import format_bytes, format_count

CSV_COLUMNS = ("site", "category", "bytes_per_step", "num_growing_steps", "num_blocks", "bytes_live", "cycle_bytes")


@click.command("leaks")
@selects_traces
@click.option("--steps", "min_steps", type=click.IntRange(2), default=3, show_default=True,
              help="Growth in fewer steps is none.")  # fmt: skip
@click.option("--capacity", type=BYTES, help="Bytes there are, such as 16GiB: says after how many steps they are used.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print one line a leak.")
def command(selection: Selection, min_steps: int, capacity: int | None, as_json: bool, as_csv: bool) -> None:
    """Tell which lines of TRACE keep more memory after every step."""
    from memtrace.analysis.leaks import leaks

    one = selection.open_rank()
    found = leaks(one, min_steps, capacity).as_dict()
    if as_json:
        print_json(found)
    elif as_csv:
        print_csv(CSV_COLUMNS, found["leaks"])
    elif reason := missing_blocks_reason(one):
        console().print(f"[bold]{escape(selection.name)}[/]: what grows {reason}")
    else:
        _print(console(), selection.name, found)


def _print(out: Console, name: str, found: dict[str, Any]) -> None:
    if not found["num_steps"]:
        out.print(f"[bold]{escape(name)}[/]: too few steps to tell what grows")
        return
    if not found["leaks"]:
        out.print(f"[bold]{escape(name)}[/]: no leaks in {format_count(found['num_steps'], 'step')} after warm-up")
    else:
        out.print(
            f"[bold]{escape(name)}: grows by {format_bytes(round(found['bytes_per_step']))} a step[/] "
            f"({format_count(found['num_steps'], 'step')} after warm-up)"
        )
        table = plain_table("a step", "live", "blocks", "category", "line")
        for row in found["leaks"]:
            table.add_row(format_bytes(round(row["bytes_per_step"])), format_bytes(row["bytes_live"]),
            f"{row['num_blocks']:,}",
                          row["category"], escape(row["site"] or "(no stack was taken)"))  # fmt: skip
        out.print(table)
    if found["steps_to_capacity"] is not None:
        out.print(
            f"{format_bytes(found['capacity_bytes'])} are reached after "
            f"{format_count(found['steps_to_capacity'], 'more step')}"
        )
    if found["cycle_bytes"]:
        out.print(
            f"reference cycles: {format_bytes(found['cycle_bytes'])} were freed only by Python's garbage collector"
        )
    if found["outliving"]:
        table = plain_table("outlives its usual life", "bytes", "blocks", "usual", "longest", "")
        for row in found["outliving"]:
            table.add_row(escape(row["site"]), format_bytes(row["bytes"]), f"{row['num_blocks']:,}",
                          format_count(row["usual_steps"], "step"), format_count(row["longest_steps"], "step"),
                          "")  # fmt: skip
        out.print()
        out.print(table)
