"""``memtrace ranks``: compare the ranks of one job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, escape, plain_table, print_json, print_next_command, working

from memtrace.analysis.ranks import RankComparison, RankSummary, compare_ranks
from memtrace.units import UNKNOWN, format_bytes, format_duration

if TYPE_CHECKING:
    from memtrace.cli.tables import PlainTable
    from rich.console import Console

RESULT: Final = RankComparison
_CATEGORIES: Final = ("parameter", "gradient", "optimizer_state", "activation", "temporary")


@click.command("ranks")
@selects_traces
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables; unknown values are null.")
def command(selection: Selection, as_json: bool) -> None:
    """Compare the ranks of a job by peak memory and step time.

    TRACE is the trace of a job with several ranks. Several traces, or memory files of other tools, are compared as the
    ranks of one job. The result names the rank to inspect first.

    \b
    Examples:
      memtrace ranks job.memtrace
      memtrace ranks snapshots/*.pickle
    """
    trace = selection.open()
    with working(f"comparing {len(trace.ranks)} ranks"):
        comparison = compare_ranks(trace)
    if as_json:
        print_json(comparison)
    else:
        _print_comparison(comparison, selection.name)


def _print_comparison(comparison: RankComparison, trace_name: str) -> None:
    out = console()
    out.print("[bold]Peak memory by rank and category[/]")
    out.print(_peak_table(comparison.ranks))
    out.print("\n[bold]Step time by rank[/] (median; compute time excludes torch.distributed)")
    out.print(_time_table(comparison.ranks))
    _print_problems(out, comparison)
    imbalance = UNKNOWN if comparison.imbalance is None else f"{comparison.imbalance:.2f}"
    slowest = "none stands out" if comparison.slowest_rank is None else f"rank {comparison.slowest_rank}"
    out.print(f"\nImbalance (highest peak / mean peak): {imbalance}")
    out.print(f"Slowest rank: {slowest}")
    if comparison.rank_to_inspect is not None:
        out.print(f"[bold]Inspect rank {comparison.rank_to_inspect} first[/]: {escape(comparison.reason)}.")
        print_next_command(out, f"memtrace summary {trace_name} --rank {comparison.rank_to_inspect}")


def _peak_table(summaries: tuple[RankSummary, ...]) -> PlainTable:
    headers = (name.replace("_state", "") for name in _CATEGORIES)
    table = plain_table("rank", "peak", *headers, "other")
    for summary in summaries:
        sizes = summary.bytes_by_category
        other = sum(size for name, size in sizes.items() if name not in _CATEGORIES)
        known = summary.peak_bytes is not None
        cells = [sizes.get(name, 0) if known else None for name in _CATEGORIES] + [other if known else None]
        table.add_row(str(summary.rank), *(_short_bytes(value) for value in (summary.peak_bytes, *cells)))
    return table


def _short_bytes(num_bytes: int | None) -> str:
    return format_bytes(num_bytes, unknown="-")


def _time_table(summaries: tuple[RankSummary, ...]) -> PlainTable:
    table = plain_table("rank", "device", "steps", "step", "compute", "phase of peak")
    for summary in summaries:
        table.add_row(
            str(summary.rank),
            summary.device or UNKNOWN,
            UNKNOWN if summary.num_steps is None else str(summary.num_steps),
            format_duration(summary.step_ns),
            format_duration(summary.compute_ns),
            summary.peak_phase or UNKNOWN,
        )
    return table


def _print_problems(out: Console, comparison: RankComparison) -> None:
    for summary in comparison.ranks:
        if summary.problem:
            out.print(f"[bold]Rank {summary.rank}[/]: {escape(summary.problem)}")
    if comparison.missing_ranks:
        missing = ", ".join(map(str, comparison.missing_ranks))
        out.print(f"[bold]Missing ranks[/]: {missing} (part of the job, but not analyzed)")
    errors = [summary.clock_error_ns for summary in comparison.ranks if summary.clock_error_ns is not None]
    drifts = [abs(summary.clock_drift_ns) for summary in comparison.ranks if summary.clock_drift_ns is not None]
    if errors:
        drift = format_duration(max(drifts, default=None))
        out.print(f"Clock error: at most {format_duration(max(errors))} between ranks; drift: {drift}")
