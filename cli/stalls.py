"""``memtrace stalls``: time that training spends waiting for data."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, plain_table, print_json
from memtrace.cli.tabular import print_csv

from memtrace.analysis.stalls import DataStalls, StallBreakdown, StepWait
from memtrace.errors import MemtraceError
from memtrace.units import format_count, format_duration, format_share

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.trace import Trace

RESULT: Final = DataStalls
"""The type of what ``--json`` prints."""
MAX_ROWS: Final = 20
"""Most steps on the terminal: those that wait longest."""


@click.command("stalls")
@selects_traces
@click.option("--synthetic", type=click.Path(), help="Trace of the same job on data generated in memory.")
@click.option("--cached", type=click.Path(), help="Trace of the same job with all data cached.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV row per step.")
def command(selection: Selection, synthetic: str | None, cached: str | None, as_json: bool, as_csv: bool) -> None:
    """Show how long the steps of TRACE wait for data.

    Given three recordings, the stall is broken down into fetching (from storage) and preprocessing (decoding,
    augmenting): TRACE, recorded with an empty cache, --cached and --synthetic. Recordings with device_time=True are
    measured on the GPU, where a wait is the time without work; others on the host.

    \b
    Examples:
      memtrace stalls run.memtrace
      memtrace stalls cold.memtrace --cached hot.memtrace --synthetic ram.memtrace
    """
    from memtrace.analysis.stalls import measure_stalls

    if (synthetic is None) != (cached is None):
        missing = "--synthetic" if synthetic is None else "--cached"
        raise MemtraceError(f"{missing} is missing: --synthetic and --cached must be given together")
    trace = selection.open_rank()
    result = measure_stalls(trace, synthetic=_open(selection, synthetic), cached=_open(selection, cached))
    if as_json:
        print_json(result)
    elif as_csv:
        print_csv([field.name for field in fields(StepWait)], map(asdict, result.steps))
    else:
        _print(console(), result)


def _open(selection: Selection, path: str | None) -> Trace | None:
    return None if path is None else replace(selection, paths=(path,)).open_rank()


def _print(out: Console, result: DataStalls) -> None:
    num_steps = format_count(len(result.steps), "step")
    if not result.steps:
        out.print("The trace has no steps. Mark them with rec.step() or rec.steps(loader).")
        return
    if result.wait_share is None:
        out.print(f"{num_steps}, median {format_duration(result.median_duration_ns)}; time waiting for data: unknown.")
        out.print("Waits are recorded for a DataLoader and for loaders that are passed to rec.steps(loader).")
        out.print(result.clock_note)
    else:
        out.print(f"[bold]{num_steps} spend {format_share(result.wait_share)} of their time waiting for data[/]")
        out.print(
            f"Median step: {format_duration(result.median_duration_ns)}, of which "
            f"{format_duration(result.median_wait_ns)} waiting for data"
        )
        out.print(result.clock_note)
        _print_steps(out, result)
    if result.breakdown is not None:
        _print_breakdown(out, result.breakdown)


def _print_steps(out: Console, result: DataStalls) -> None:
    by_device = result.clock == "device"
    table = plain_table("step", "duration", "waiting", "share", *(["waiting on the host"] if by_device else []))
    for row in sorted(result.steps, key=lambda row: -(row.data_wait_ns or 0))[:MAX_ROWS]:
        table.add_row(
            str(row.step),
            format_duration(row.duration_ns),
            format_duration(row.data_wait_ns),
            format_share(row.data_wait_ns, row.duration_ns),
            *([format_duration(row.host_wait_ns)] if by_device else []),
        )
    out.print()
    out.print(table)
    if len(result.steps) > MAX_ROWS:
        out.print(f"The {MAX_ROWS} steps that wait longest; --json and --csv list all {len(result.steps):,}.")


def _print_breakdown(out: Console, breakdown: StallBreakdown) -> None:
    table = plain_table("median step", f"duration ({breakdown.clock} time)", "")
    table.add_row("synthetic data", format_duration(breakdown.synthetic_ns), "")
    table.add_row("cached data", format_duration(breakdown.cached_ns), "")
    table.add_row("cold cache", format_duration(breakdown.cold_ns), "")
    table.add_row("prep stall", format_duration(breakdown.prep_stall_ns), "cached - synthetic (preprocessing)")
    table.add_row("fetch stall", format_duration(breakdown.fetch_stall_ns), "cold - cached (fetching from storage)")
    out.print()
    out.print(table)
