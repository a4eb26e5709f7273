"""``memtrace access``: access intervals, and the blocks that could be swapped out during them."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.bandwidths import takes_bandwidths
from memtrace.cli.output import console, escape, plain_table, print_json
from memtrace.cli.quantities import BYTES_OR_ZERO
from memtrace.cli.tabular import print_csv
from memtrace.cli.workers import Workers, takes_workers

from memtrace.analysis.access import AccessAnalysis, analyze_access
from memtrace.analysis.bandwidth import CopyBandwidths
from memtrace.analysis.thresholds import MIN_SWAP_BYTES
from memtrace.format.schema import NO_BLOCKS
from memtrace.units import UNKNOWN, format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.analysis.access import IntervalGroup
    from memtrace.analysis.swap import SwapCandidate

RESULT: Final = AccessAnalysis
CSV_COLUMNS: Final = ("site", "category", "bytes", "num_intervals", "median_ns", "clock", "swap_ns", "bytes_at_peak")


@click.command("access")
@selects_traces
@takes_workers
@takes_bandwidths
@click.option("--min-bytes", type=BYTES_OR_ZERO, default=MIN_SWAP_BYTES, metavar="SIZE",
              help="Smallest block to swap; default: 1MiB.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, one row per swap candidate.")
def command(
    selection: Selection,
    workers: Workers,
    bandwidths: CopyBandwidths | None,
    min_bytes: int,
    as_json: bool,
    as_csv: bool,
) -> None:
    """Show the access intervals of TRACE and the swap candidates.

    An access interval is the time between two accesses of a block. A block is a swap candidate if it can be copied to
    the host and back within one. Intervals on a GPU are measured there if TRACE was recorded with device_time=True,
    otherwise between the launches on the host. Without --bandwidth, --card, or --d2h and --h2d, bandwidths are those
    of the recorded card if memtrace knows it, otherwise of a TITAN Xp (6.4 GB/s).

    \b
    Examples:
      memtrace doctor --bandwidth --json > bandwidths.json
      memtrace access run.memtrace --bandwidth bandwidths.json
    """
    trace = selection.open_rank()
    result = workers.ask([(trace, selection.source)], partial(analyze_access, min_bytes=min_bytes), bandwidths)
    if as_json:
        print_json(result)
    elif as_csv:
        print_csv(CSV_COLUMNS, map(asdict, result.candidates))
    elif not trace.has_blocks:
        console().print(f"[bold]{escape(selection.name)}[/]: access intervals unavailable: {NO_BLOCKS}")
    else:
        _print(console(), selection.name, result)


def _print(out: Console, name: str, result: AccessAnalysis) -> None:
    if not result.num_intervals:
        unknown = "reads and writes, or their times, were not recorded"
        reason = unknown if result.num_intervals is None else "no block is accessed twice"
        out.print(f"[bold]{escape(name)}[/]: no access intervals ({reason})")
        return
    out.print(f"[bold]{escape(name)}[/]: {format_count(result.num_intervals, 'access interval')}")
    out.print(result.clock_note)
    out.print("\nPercentiles of the interval length")
    table = plain_table(*(f"{percent} %" for percent in result.percentiles_ns), "")
    table.add_row(*map(format_duration, result.percentiles_ns.values()))
    out.print(table)
    _print_groups(out, "category", result.by_category)
    _print_groups(out, "block size", result.by_size)
    _print_swap_totals(out, result)
    _print_candidates(out, result.candidates)


def _print_groups(out: Console, header: str, groups: tuple[IntervalGroup, ...]) -> None:
    table = plain_table(header, "intervals", "median", "p90", "")
    for row in groups:
        table.add_row(row.name, f"{row.num_intervals:,}", format_duration(row.median_ns), format_duration(row.p90_ns))
    out.print()
    out.print(table)


def _print_swap_totals(out: Console, result: AccessAnalysis) -> None:
    costs = result.bandwidths
    out.print(
        f"\n[bold]Swap candidates[/] of at least {format_bytes(result.min_bytes)}, at {costs.d2h.gb_per_s:.2f} GB/s to "
        f"the host (D2H) and {costs.h2d.gb_per_s:.2f} GB/s back (H2D), {escape(costs.source)}"
    )
    table = plain_table("copy time", "intervals", "blocks", "at peak", "")
    for label, totals in (("latency + size / bandwidth", result.swappable),
                          ("size / bandwidth", result.swappable_bandwidth_only)):  # fmt: skip
        table.add_row(
            label, f"{totals.num_intervals:,}", format_bytes(totals.bytes), format_bytes(totals.bytes_at_peak)
        )
    out.print(table)


def _print_candidates(out: Console, candidates: tuple[SwapCandidate, ...]) -> None:
    if not candidates:
        return
    table = plain_table("at peak", "block", "intervals", "median", "clock", "D2H + H2D", "allocation site (category)")
    for row in candidates:
        table.add_row(
            format_bytes(row.bytes_at_peak),
            format_bytes(row.bytes),
            f"{row.num_intervals:,}",
            format_duration(row.median_ns),
            row.clock,
            format_duration(row.swap_ns),
            escape(f"{row.site or UNKNOWN} ({row.category})"),
        )
    out.print()
    out.print(table)
