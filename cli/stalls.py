"""``memtrace stalls``: time that training waits for its data."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, plain_table, print_json
from memtrace.cli.tabular import print_csv
from rich.console import Console

from memtrace.errors import MemtraceError
from memtrace.units import format_count, format_duration, format_share

if TYPE_CHECKING:
    from memtrace.analysis.stalls import Split, Stalls

_ROWS = 20


@click.command("stalls")
@selects_traces
@click.option("--synthetic", type=click.Path(), help="A recording of the same job on data made in memory.")
@click.option("--cached", type=click.Path(), help="A recording of it with all data cached; TRACE is the cold one.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print the steps as CSV.")
def command(selection: Selection, synthetic: str | None, cached: str | None, as_json: bool, as_csv: bool) -> None:
    """Say how long each step of TRACE waits for its data.

    With --synthetic and --cached, TRACE being recorded with an empty cache, the stall is split into fetching (from
    storage) and preparing (decoding, augmenting), by difference.
    """
    from memtrace.analysis.stalls import split, stalls

    if (synthetic is None) != (cached is None):
        raise MemtraceError("--synthetic and --cached go together: the split is by the difference of three recordings")
    one = selection.open_rank()
    found = stalls(one)
    parts = None
    if synthetic is not None and cached is not None:
        parts = split(
            replace(selection, paths=(synthetic,)).open_rank(), one, replace(selection, paths=(cached,)).open_rank()
        )
    if as_json:
        print_json(found.as_dict() | {"split": parts.as_dict() if parts else None})
    elif as_csv:
        print_csv(("step", "duration_ns", "data_wait_ns"), map(asdict, found.steps))
    else:
        _print(found, parts)


def _print(found: Stalls, parts: Split | None) -> None:
    out = console()
    if not found.steps:
        out.print("steps: none found; mark them with rec.step() or rec.steps(loader)")
        return
    if found.share is None:
        out.print(f"{format_count(len(found.steps), 'step')}, a usual one "
                  f"{format_duration(found.median_duration_ns)}; waits for "
                  "data were not seen: they are with rec.steps(loader), and of a DataLoader")  # fmt: skip
    else:
        _print_waits(out, found, found.share)
    if parts is not None:
        out.print(f"a usual step: synthetic {format_duration(parts.synthetic_ns)}, cached "
                  f"{format_duration(parts.cached_ns)}, "
                  f"cold {format_duration(parts.cold_ns)}")  # fmt: skip
        out.print(f"[bold]prep stall {format_duration(parts.prep_stall_ns)}[/] (cached - synthetic), "
                  f"[bold]fetch stall {format_duration(parts.fetch_stall_ns)}[/] (cold - cached)")  # fmt: skip


def _print_waits(out: Console, found: Stalls, waits: float) -> None:
    out.print(f"[bold]{format_count(len(found.steps), 'step')} wait {format_share(waits, 1)} of their time for "
              f"data[/], a usual "
              f"one {format_duration(found.median_wait_ns)} of "
              f"{format_duration(found.median_duration_ns)}")  # fmt: skip
    table = plain_table("step", "takes", "waits", "share")
    for row in sorted(found.steps, key=lambda row: -(row.data_wait_ns or 0))[:_ROWS]:
        table.add_row(str(row.step), format_duration(row.duration_ns), format_duration(row.data_wait_ns),
                      format_share(row.data_wait_ns or 0, row.duration_ns))  # fmt: skip
    out.print(table)
