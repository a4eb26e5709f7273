"""``memtrace compare``: any number of runs side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import RANK, WINDOW, Selection
from memtrace.cli.output import (
    console,
    escape,
    plain_table,
    print_json,
    print_line,
    working,
)
from memtrace.cli.pages import check_output_folder, output_errors
from memtrace.cli.tabular import print_csv
from memtrace.cli.workers import Workers, takes_workers

from memtrace.analysis.compare import GroupComparison, Run, RunComparison, RunSummary
from memtrace.analysis.diff import GROUPINGS
from memtrace.categories import CATEGORY_LABELS
from memtrace.format.storage import to_path
from memtrace.units import format_bytes, format_count, format_duration, format_share

if TYPE_CHECKING:
    from rich.console import Console

RESULT: Final = RunComparison
"""The type of what ``--json`` prints."""
MAX_ROWS: Final = 6
"""Most differences of each grouping on the terminal."""
_GROUPING_TITLES: Final = {"category": "category", "module": "module", "site": "allocation site"}


@click.command("compare")
@click.argument("traces", metavar="TRACE TRACE...", nargs=-1, required=True, type=click.Path())
@click.option("-o", "--output", type=click.Path(dir_okay=False),
              help="HTML file to write: the runs on one axis, and what differs. It works offline.")  # fmt: skip
@click.option("--label", "labels", multiple=True, metavar="TEXT",
              help="Name of a run, such as its batch size; give one for each TRACE, in their order.  [default: file "
              "names]")  # fmt: skip
@RANK
@click.option("--device", help="Device to compare (e.g. cuda:0).  [default: the accelerator that all runs have]")
@WINDOW[0]
@WINDOW[1]
@takes_workers
@click.option("--json", "as_json", is_flag=True, help="Print JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV row per run.")
def command(
    traces: tuple[str, ...],
    output: str | None,
    labels: tuple[str, ...],
    rank: int | None,
    device: str | None,
    from_step: int | None,
    to_step: int | None,
    workers: Workers,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Compare runs side by side, such as batch sizes, models or data sets.

    Shows for each TRACE its peak, steps, access intervals and swap candidates, and which categories, modules and
    allocation sites differ at the peak. The first TRACE is the baseline. Of jobs with several ranks the same rank is
    compared.

    \b
    Examples:
      memtrace compare b8.memtrace b16.memtrace b32.memtrace
      memtrace compare old.memtrace new.memtrace -o compare.html
      memtrace compare a.memtrace b.memtrace --label SGD --label Adam
    """
    if len(traces) < 2:
        raise click.UsageError("Give at least two traces to compare.")
    if labels and len(labels) != len(traces):
        raise click.UsageError(f"Give --label once for each of the {len(traces)} traces; {len(labels)} were given.")
    if from_step is not None and to_step is not None and from_step > to_step:
        raise click.UsageError(f"--from-step {from_step} is greater than --to-step {to_step}.")
    if output is not None:
        check_output_folder(output)
    from memtrace.engine.comparisons import compare_matched_runs, match_compared_runs

    sides = [Selection((trace,), None, from_step, to_step) for trace in traces]
    opened = [(side.open(), side.source) for side in sides]
    with working("comparing"), workers.engine(*opened[0]) as engine:
        runs = match_compared_runs(engine, opened, label_traces(traces, labels), rank, device)
        result = compare_matched_runs(engine, runs, [side.source for side in sides])
    if output is not None:
        write_page(runs, result, output)
    if as_json:
        print_json(result)
    elif as_csv:
        print_csv([field.name for field in fields(RunSummary)], map(asdict, result.runs))
    else:
        _print_comparison(console(), result)


def label_traces(traces: Sequence[str], labels: Sequence[str] = ()) -> tuple[str, ...]:
    """Return a label for each trace: those that the user chose, else the ends of the paths that differ."""
    from memtrace.analysis.compare import label_paths, unique_labels

    return unique_labels(labels) if labels else label_paths([to_path(trace) for trace in traces])


def write_page(runs: Sequence[Run], result: RunComparison, output: str) -> None:
    """Write the page of a comparison, and report its size on stderr."""
    from memtrace.dashboards.comparison import write_comparison

    with output_errors(output), working(f"writing {output}"):
        page = write_comparison(runs, output, result)
    print_line(f"Wrote {page} ({format_bytes(page.stat().st_size)}).", err=True)


def _print_comparison(out: Console, result: RunComparison) -> None:
    table = plain_table("run", "peak", "change", "step", "intervals", "median", "swappable")
    first = result.runs[0]
    for run in result.runs:
        table.add_row(
            escape(run.label),
            format_bytes(run.peak_bytes),
            "" if run is first else _signed_share(run.peak_bytes - first.peak_bytes, first.peak_bytes),
            format_duration(run.median_step_duration_ns, unknown="-"),
            "-" if run.num_intervals is None else f"{run.num_intervals:,}",
            format_duration(run.median_interval_ns, unknown="-"),
            format_bytes(run.swappable_at_peak_bytes, unknown="-"),
        )
    out.print(table)
    out.print(
        "Change: of the peak, against the first run. Step: median duration. Intervals: access intervals, with their "
        "median. Swappable: bytes that can be in host memory at the peak.",
        style="dim",
    )
    for grouping in GROUPINGS:
        _print_groups(out, result, [group for group in result.groups if group.grouping == grouping])
    for note in result.notes:
        out.print(f"[bold]Note[/]: {escape(note)}")


def _print_groups(out: Console, result: RunComparison, groups: Sequence[GroupComparison]) -> None:
    """Print the largest differences between the first and the last run of one grouping."""
    if not groups:
        return
    first, last = result.runs[0].label, result.runs[-1].label
    title = _GROUPING_TITLES[groups[0].grouping]
    out.print(f"\n[bold]Differences by {title}[/] at the peak, {escape(first)} to {escape(last)}")
    table = plain_table("difference", "before", "after", title)
    for group in groups[:MAX_ROWS]:
        name = CATEGORY_LABELS.get(group.name or "", group.name or "unknown")
        table.add_row(
            f"{'+' if group.change_bytes >= 0 else '-'}{format_bytes(abs(group.change_bytes))}",
            format_bytes(group.bytes_by_run[0], unknown="-"),
            format_bytes(group.bytes_by_run[-1], unknown="-"),
            escape(name),
        )
    out.print(table)
    if len(groups) > MAX_ROWS:
        out.print(f"{format_count(len(groups) - MAX_ROWS, 'smaller difference')} not shown.", style="dim")


def _signed_share(change: int, whole: int) -> str:
    return f"{'+' if change >= 0 else '-'}{format_share(abs(change), whole)}" if whole else "-"
