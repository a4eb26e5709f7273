"""``memtrace diff``: what changed between two traces."""

from __future__ import annotations

from dataclasses import asdict, fields
from itertools import groupby
from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import RANK, WINDOW, Selection
from memtrace.cli.compare import label_traces, write_page
from memtrace.cli.output import console, escape, plain_table, print_json
from memtrace.cli.pages import check_output_folder
from memtrace.cli.tabular import print_csv
from memtrace.cli.workers import Workers, takes_workers

from memtrace.analysis.diff import GROUPINGS, MEASURES, MemoryChange, TraceComparison, TraceTotals
from memtrace.format.schema import NO_BLOCKS
from memtrace.units import UNKNOWN, format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console

RESULT: Final = TraceComparison
"""The type of what ``--json`` prints."""
MAX_ROWS: Final = 15
"""Most changes in each table on the terminal."""
_MEASURE_TITLES: Final = {"live_at_peak": "Live at the peak", "allocated_per_step": "Allocated per step (median)"}
_GROUPING_TITLES: Final = {"category": "category", "module": "module", "site": "allocation site"}


@click.command("diff")
@click.argument("before", type=click.Path())
@click.argument("after", type=click.Path())
@click.option("-o", "--output", type=click.Path(dir_okay=False),
              help="Also write an HTML page with both traces on one axis; it works offline.")  # fmt: skip
@RANK
@WINDOW[0]
@WINDOW[1]
@takes_workers
@click.option("--json", "as_json", is_flag=True, help="Print JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV row per change.")
def command(
    before: str,
    after: str,
    output: str | None,
    rank: int | None,
    from_step: int | None,
    to_step: int | None,
    workers: Workers,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Compare two traces.

    Shows how memory changed from trace BEFORE to trace AFTER, by category, module and allocation site: what is live at
    the peak, and what a median step allocates. Allocation sites whose line numbers moved are matched; addresses are
    ignored.

    \b
    Examples:
      memtrace diff before.memtrace after.memtrace
      memtrace diff before.memtrace after.memtrace -o diff.html
    """
    from memtrace.engine.comparisons import compare_matched_runs, compare_two, match_compared_runs

    if from_step is not None and to_step is not None and from_step > to_step:
        raise click.UsageError(f"--from-step {from_step} is after --to-step {to_step}")
    if output is not None:
        check_output_folder(output)
        jobs = [Selection((path,), None, from_step, to_step) for path in (before, after)]
        opened = [(job.open(), job.source) for job in jobs]
        with workers.engine(*opened[0]) as engine:
            runs = match_compared_runs(engine, opened, label_traces((before, after)), rank, None)
            comparison = compare_matched_runs(engine, runs, [job.source for job in jobs])
        write_page(runs, comparison, output)
    sides = [Selection((path,), rank, from_step, to_step) for path in (before, after)]
    old, new = (side.open_rank() for side in sides)
    with workers.engine(old, sides[0].source) as engine:
        result = compare_two(engine, (old, sides[0].source), (new, sides[1].source))
    if as_json:
        print_json(result)
    elif as_csv:
        print_csv([field.name for field in fields(MemoryChange)], map(asdict, result.changes))
    else:
        out = console()
        for name, trace in ((before, old), (after, new)):
            if not trace.has_blocks:
                out.print(f"{escape(name)}: steps, modules and allocation sites are unknown ({NO_BLOCKS}).")
        _print_totals(out, result.before, result.after)
        _print_changes(out, result)


def _print_totals(out: Console, before: TraceTotals, after: TraceTotals) -> None:
    table = plain_table("", "before", "after", "change")
    for title, old, new, text in (
        ("peak memory", before.peak_bytes, after.peak_bytes, format_bytes),
        ("number of steps", before.num_steps, after.num_steps, _format_number),
        ("peak of a step (median)", before.median_step_peak_bytes, after.median_step_peak_bytes, format_bytes),
        (
            "allocated per step (median)",
            before.median_step_allocated_bytes,
            after.median_step_allocated_bytes,
            format_bytes,
        ),
        (
            "allocations per step (median)",
            before.median_step_allocations,
            after.median_step_allocations,
            _format_number,
        ),
        ("duration of a step (median)", before.median_step_duration_ns, after.median_step_duration_ns, format_duration),
    ):
        table.add_row(title, text(old), text(new), _format_change(old, new))
    out.print(table)


def _print_changes(out: Console, result: TraceComparison) -> None:
    if not result.changes:
        out.print("\nNo category, module or allocation site changed.")
        return

    def table_order(change: MemoryChange) -> tuple[int, int]:
        return MEASURES.index(change.measure), GROUPINGS.index(change.grouping)

    for (measure, grouping), group in groupby(sorted(result.changes, key=table_order), key=table_order):
        changes = list(group)
        group_title = _GROUPING_TITLES[GROUPINGS[grouping]]
        out.print(f"\n[bold]{_MEASURE_TITLES[MEASURES[measure]]}, by {group_title}[/]")
        table = plain_table("change", "before", "after", group_title)
        for change in changes[:MAX_ROWS]:
            sign = "+" if change.change_bytes > 0 else ""
            note = f" ({change.kind})" if change.kind in ("appeared", "disappeared") else ""
            table.add_row(
                f"{sign}{format_bytes(change.change_bytes)}",
                format_bytes(change.before_bytes or 0),
                format_bytes(change.after_bytes or 0),
                escape(f"{change.name or UNKNOWN}{note}"),
            )
        out.print(table)
        if len(changes) > MAX_ROWS:
            out.print(f"{len(changes) - MAX_ROWS} more are in the output of --json and --csv.")


def _format_number(number: int | None) -> str:
    return UNKNOWN if number is None else f"{number:,}"


def _format_change(before: int | None, after: int | None) -> str:
    """Return the relative change, such as ``+12.5 %``."""
    if not before or after is None:
        return UNKNOWN
    if before == after:
        return "0 %"
    return f"{(after - before) / before:+.1%}".replace("%", " %")
