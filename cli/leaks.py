"""``memtrace leaks``: which sites retain more memory from step to step, and when a capacity is exhausted."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, escape, plain_table, print_json
from memtrace.cli.quantities import BYTES
from memtrace.cli.tabular import print_csv
from memtrace.cli.workers import Workers, takes_workers

from memtrace.analysis.leaks import LeakAnalysis, find_leaks
from memtrace.analysis.thresholds import MIN_GROWING_STEPS
from memtrace.format.schema import NO_BLOCKS
from memtrace.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.analysis.leaks import Leak, LongLivedSignature

RESULT: Final = LeakAnalysis
CSV_COLUMNS: Final = ("site", "category", "bytes_per_step", "num_growing_steps", "num_blocks", "live_bytes",
                      "gc_freed_bytes")  # fmt: skip


@click.command("leaks")
@selects_traces
@takes_workers
@click.option("--min-steps", type=click.IntRange(2), default=MIN_GROWING_STEPS, show_default=True, metavar="STEPS",
              help="Minimum number of growing steps before growth is reported as a leak.")  # fmt: skip
@click.option("--capacity", type=BYTES, metavar="SIZE",
              help="Memory capacity (e.g. 16GiB); estimates how many steps until it is exhausted.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, one row per leak.")
def command(
    selection: Selection, workers: Workers, min_steps: int, capacity: int | None, as_json: bool, as_csv: bool
) -> None:
    """Find memory of TRACE that grows from step to step, and the lines that allocate it.

    \b
    Example:
      memtrace leaks run.memtrace --capacity 16GiB
    """
    trace = selection.open_rank()
    find = partial(find_leaks, min_growing_steps=min_steps, capacity_bytes=capacity)
    result = workers.ask([(trace, selection.source)], find)
    if as_json:
        print_json(result)
    elif as_csv:
        print_csv(CSV_COLUMNS, map(asdict, result.leaks))
    elif not trace.has_blocks:
        console().print(f"[bold]{escape(selection.name)}[/]: leaks unavailable: {NO_BLOCKS}")
    else:
        _print(console(), selection.name, result)


def _print(out: Console, name: str, result: LeakAnalysis) -> None:
    if result.bytes_per_step is None:
        needed = format_count(result.num_required_steps, "step")
        out.print(f"[bold]{escape(name)}[/]: too few steps to find leaks (at least {needed} are needed)")
        return
    excluded = format_count(result.num_warm_up_steps, "warm-up step")
    steps = f"{format_count(result.num_steps, 'step')}; {excluded} excluded"
    if result.bytes_per_step:
        out.print(f"[bold]{escape(name)}: grows by {format_bytes(result.bytes_per_step)} per step[/] ({steps})")
        if result.leaks:
            _print_leaks(out, result.leaks)
        if result.unattributed_bytes_per_step:
            spread = format_bytes(result.unattributed_bytes_per_step)
            out.print(f"{spread} per step are spread over allocation sites that do not keep growing themselves.")
    else:
        out.print(f"[bold]{escape(name)}[/]: no leaks ({steps})")
    if result.steps_to_capacity is not None:
        more = format_count(result.steps_to_capacity, "more step")
        out.print(f"Capacity of {format_bytes(result.capacity_bytes)} is exhausted after {more}.")
    if result.gc_freed_bytes:
        out.print(
            f"Reference cycles: {format_bytes(result.gc_freed_bytes)} were freed only by Python's garbage collector."
        )
    _print_long_lived(out, result.long_lived)


def _print_leaks(out: Console, leaks: tuple[Leak, ...]) -> None:
    table = plain_table("per step", "live", "blocks", "category", "allocation site")
    for row in leaks:
        table.add_row(
            format_bytes(row.bytes_per_step),
            format_bytes(row.live_bytes),
            f"{row.num_blocks:,}",
            row.category,
            escape(row.site or "unknown (no stack recorded)"),
        )
    out.print(table)


def _print_long_lived(out: Console, signatures: tuple[LongLivedSignature, ...]) -> None:
    if not signatures:
        return
    table = plain_table("bytes", "blocks", "usual", "longest", "allocation site and operator")
    for row in signatures:
        table.add_row(
            format_bytes(row.bytes),
            f"{row.num_blocks:,}",
            format_count(row.usual_steps, "step"),
            format_count(row.longest_steps, "step"),
            escape(row.site),
        )
    out.print("\n[bold]Blocks that live longer than usual for their allocation site[/]")
    out.print(table)
