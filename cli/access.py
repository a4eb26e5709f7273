"""``memtrace access``: how long blocks lie untouched, and which could be swapped out meanwhile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, missing_blocks_reason, plain_table, print_json
from memtrace.cli.quantities import BYTES_OR_ZERO
from memtrace.cli.tabular import print_csv
from rich.console import Console
from rich.markup import escape

from memtrace.errors import MemtraceError
from memtrace.units import UNKNOWN, format_bytes, format_duration

if TYPE_CHECKING:
    from memtrace.analysis.access import Bandwidths

CSV_COLUMNS = ("site", "category", "bytes", "num_intervals", "median_ns", "swap_ns", "bytes_at_peak")


@click.command("access")
@selects_traces
@click.option("--bandwidths", type=click.Path(), help="What memtrace doctor --bandwidth --json printed.")
@click.option("--out", "out_gb", type=float, help="Bandwidth out of the device in GB/s; with --in.")
@click.option("--in", "in_gb", type=float, help="Bandwidth into the device in GB/s.")
@click.option("--min-bytes", type=BYTES_OR_ZERO, default=1 << 20, help="Smallest block to swap; default 1MiB.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print one line an outlier.")
def command(
    selection: Selection, bandwidths: str | None, out_gb: float | None, in_gb: float | None,
    min_bytes: int, as_json: bool, as_csv: bool,
) -> None:  # fmt: skip
    """Tell how long the blocks of TRACE lie untouched between accesses, and what could be swapped out meanwhile."""
    from memtrace.analysis.access import access

    costs = _costs(bandwidths, out_gb, in_gb)
    one = selection.open_rank()
    found = access(one, costs, min_bytes)
    if as_json:
        print_json(found)
    elif as_csv:
        print_csv(CSV_COLUMNS, found["outliers"])
    elif reason := missing_blocks_reason(one):
        console().print(f"[bold]{escape(selection.name)}[/]: access intervals {reason}")
    else:
        _print(console(), selection.name, found)


def _costs(file: str | None, out_gb: float | None, in_gb: float | None) -> Bandwidths:
    from memtrace.analysis.access import PUBLISHED, from_dict, given

    if (out_gb is None) != (in_gb is None):
        raise MemtraceError("give both --out and --in, or neither")
    if out_gb is not None and in_gb is not None:
        return given(out_gb, in_gb)
    if file is None:
        return PUBLISHED
    try:
        return from_dict(json.loads(Path(file).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise MemtraceError(f"{file} cannot be read: {error}") from error
    except MemtraceError as error:
        raise MemtraceError(f"{file}: {error}") from error


def _print(out: Console, name: str, found: dict[str, Any]) -> None:
    if not found["num_intervals"]:
        why = "reads and writes were not recorded" if found["num_intervals"] is None else "no block is used twice"
        out.print(f"[bold]{escape(name)}[/]: no access intervals; {why}")
        return
    out.print(f"[bold]{escape(name)}[/]: {found['num_intervals']:,} access intervals")
    out.print(", ".join(f"{p} %: {format_duration(value)}" for p, value in found["percentiles"].items()))
    for title, key in (("by category", "by_category"), ("by size", "by_size")):
        table = plain_table(title, "intervals", "median", "90 %", "")
        for row in found[key]:
            table.add_row(
                row["name"],
                f"{row['num_intervals']:,}",
                format_duration(row["median_ns"]),
                format_duration(row["p90_ns"]),
            )
        out.print()
        out.print(table)
    costs = found["bandwidths"]
    out.print(
        f"\n[bold]swap[/] at {costs['out']['gb_per_s']:.2f} GB/s out and {costs['in']['gb_per_s']:.2f} GB/s in "
        f"({escape(costs['source'])}), blocks from {format_bytes(found['min_bytes'])}:"
    )
    for text, key in (("t = a + b*S", "swappable"), ("bandwidth alone", "swappable_bandwidth_only")):
        row = found[key]
        out.print(
            f"  {text}: {row['num_intervals']:,} intervals are long enough, {format_bytes(row['bytes'])} of blocks, "
            f"{format_bytes(row['bytes_at_peak'])} untouched across the peak"
        )
    if found["outliers"]:
        table = plain_table("size", "intervals", "median", "out and in", "at the peak", "category", "line")
        for row in found["outliers"]:
            table.add_row(format_bytes(row["bytes"]), f"{row['num_intervals']:,}", format_duration(row["median_ns"]),
                          format_duration(row["swap_ns"]), format_bytes(row["bytes_at_peak"]), row["category"],
                          escape(row["site"] or UNKNOWN))  # fmt: skip
        out.print()
        out.print(table)
