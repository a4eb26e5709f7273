"""``memtrace diff``: what changed between two traces."""

from __future__ import annotations

import click
from memtrace.cli.arguments import RANK, WINDOW, Selection
from memtrace.cli.output import console, missing_blocks_reason, plain_table, print_json
from memtrace.cli.tabular import print_csv
from rich.console import Console
from rich.markup import escape

from memtrace.analysis.diff import Diff
from memtrace.units import UNKNOWN, format_bytes, format_duration

_ROWS = 15


@click.command("diff")
@click.argument("before", type=click.Path())
@click.argument("after", type=click.Path())
@RANK
@WINDOW[0]
@WINDOW[1]
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the changes as CSV.")
def command(
    before: str, after: str, rank: int | None, from_step: int | None, to_step: int | None, as_json: bool, as_csv: bool
) -> None:  # fmt: skip
    """Say what changed from trace BEFORE to trace AFTER: by step, category, module and line, never by address."""
    from memtrace.analysis.diff import diff

    one, two = (Selection((path,), rank, from_step, to_step).open_rank() for path in (before, after))
    found = diff(one, two)
    if as_json:
        print_json(found.as_dict())
    elif as_csv:
        rows = [change.as_dict() for change in found.changes]
        print_csv(("kind", "measure", "grouping", "name", "before_bytes", "after_bytes", "change_bytes",
                   "before_blocks", "after_blocks"), rows)  # fmt: skip
    else:
        out = console()
        for name, trace in ((before, one), (after, two)):
            if reason := missing_blocks_reason(trace):
                out.print(f"[bold]{escape(name)}[/]: steps, modules and lines {reason}")
        _print(out, found)


def _print(out: Console, found: Diff) -> None:
    table = plain_table("", "before", "after", "change")
    for name, (one, two) in found.totals.items():
        show = format_duration if name.endswith("_ns") else format_bytes if name.endswith("_bytes") else _number
        what = name.removesuffix("_ns").removesuffix("_bytes").removeprefix("num_").replace("_", " ")
        table.add_row(what, show(_whole(one)), show(_whole(two)), _ratio(one, two))
    out.print(table)
    for measure in dict.fromkeys(change.measure for change in found.changes):
        for grouping in dict.fromkeys(change.grouping for change in found.changes if change.measure == measure):
            rows = [row for row in found.changes if (row.measure, row.grouping) == (measure, grouping)]
            table = plain_table("change", "before", "after", f"{measure}, by {grouping}")
            for row in rows[:_ROWS]:
                sign = "+" if row.change_bytes > 0 else ""
                name = escape(row.name or UNKNOWN) + ("" if row.kind in ("grew", "shrank") else f" ({row.kind})")
                table.add_row(
                    f"{sign}{format_bytes(row.change_bytes)}",
                    format_bytes(row.before_bytes or 0),
                    format_bytes(row.after_bytes or 0),
                    name,
                )
            out.print()
            out.print(table)
            if len(rows) > _ROWS:
                out.print(f"and {len(rows) - _ROWS} more: --csv has all")
    if not found.changes:
        out.print("\nnothing is held or allocated differently")


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else f"{value:,}"


def _ratio(one: float | None, two: float | None) -> str:
    return f"{(two - one) / one:+.1%}" if one and two is not None else UNKNOWN
