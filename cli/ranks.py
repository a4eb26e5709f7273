"""``memtrace ranks``: the ranks of one job side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, plain_table, print_json, working
from rich.markup import escape

from memtrace.units import UNKNOWN, format_bytes, format_duration

if TYPE_CHECKING:
    from memtrace.analysis.ranks import RankRow, Ranks

_CATEGORIES = ("parameter", "gradient", "optimizer_state", "activation", "temporary")


@click.command("ranks")
@selects_traces
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON; unknown values are null.")
def command(selection: Selection, as_json: bool) -> None:
    """Compare the ranks of TRACE: peaks and what held them, who is slow, which rank to look at first.

    Several traces or files are the ranks of one job.
    """
    from memtrace.analysis.ranks import ranks

    opened = selection.open()
    with working(f"comparing {len(opened.ranks)} ranks"):
        found = ranks(opened)
    if as_json:
        print_json(found.as_dict())
    else:
        _print(found, selection.name)


def _print(found: Ranks, trace: str) -> None:
    out = console()
    held = (name.replace("_state", "") for name in _CATEGORIES)
    table = plain_table("rank", "peak", *held, "other", "step", "works", "phase")
    for row in found.rows:
        table.add_row(*_cells(row))
    out.print(table)
    for row in found.rows:
        if row.problem:
            out.print(f"rank {row.rank}: {escape(row.problem)}")
    if found.missing:
        out.print(f"[bold]missing[/]: rank {', '.join(map(str, found.missing))} of the job is not in the trace")
    errors = [row.clock_error_ns for row in found.rows if row.clock_error_ns is not None]
    drifts = [abs(row.clock_drift_ns) for row in found.rows if row.clock_drift_ns is not None]
    if errors:
        drift = format_duration(max(drifts)) if drifts else UNKNOWN
        out.print(f"clocks agree to {format_duration(max(errors))}, drift over the recording {drift}")
    imbalance = UNKNOWN if found.imbalance is None else f"{found.imbalance:.2f}"
    slowest = "none stands out" if found.slowest is None else f"rank {found.slowest}"
    out.print(f"\nimbalance (highest peak over the mean): {imbalance}; slowest: {slowest}")
    if found.look_at is not None:
        out.print(f"[bold]look at rank {found.look_at} first[/]: {escape(found.why)}")
        out.print(f"\nNext: memtrace summary {escape(trace)} --rank {found.look_at}", style="dim")


def _cells(row: RankRow) -> list[str]:
    known = row.peak_bytes is not None
    held = [format_bytes(row.by_category.get(name, 0)) if known else UNKNOWN for name in _CATEGORIES]
    other = sum(held for name, held in row.by_category.items() if name not in _CATEGORIES) if known else None
    return [f"{row.rank} {row.device or ''}".strip(), format_bytes(row.peak_bytes), *held, format_bytes(other),
            format_duration(row.step_ns), format_duration(row.working_ns), row.phase or UNKNOWN]  # fmt: skip
