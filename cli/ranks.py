"""``memtrace ranks``: compare the ranks of one job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, escape, plain_table, print_json, print_next_command, working
from memtrace.cli.workers import Workers, takes_workers

from memtrace.analysis.rank_groups import MeshLayout, RankGroup, describe_outliers, parse_mesh
from memtrace.analysis.rank_summary import RankSummary
from memtrace.analysis.ranks import RankComparison
from memtrace.engine.questions import compare_ranks
from memtrace.errors import MemtraceError
from memtrace.units import UNKNOWN, format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from memtrace.cli.tables import PlainTable
    from rich.console import Console

RESULT: Final = RankComparison
MAX_ROWS: Final = 64
"""Largest number of ranks that are all listed; of more, those that stand out."""
MAX_LISTED: Final = 24
"""Largest number of ranks that are listed because they stand out or have a problem."""
MIN_LISTED: Final = 8
"""Number of ranks up to which others are listed with those that stand out."""
_CATEGORIES: Final = ("parameter", "gradient", "optimizer_state", "activation", "temporary")


class _Mesh(click.ParamType[MeshLayout]):
    """The layout of the ranks of a job, such as ``pp=4,dp=16,tp=8``."""

    name = "mesh"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> MeshLayout:
        try:
            return parse_mesh(str(value))
        except MemtraceError as error:
            self.fail(str(error), param, ctx)


@click.command("ranks")
@selects_traces
@takes_workers
@click.option(
    "--mesh",
    type=_Mesh(),
    metavar="NAME=SIZE,...",
    help="How the ranks are laid out, the last dimension varying fastest, for traces that do not contain it: "
    "pp=4,dp=16,tp=8.",
)
@click.option("--all", "lists_all", is_flag=True, help=f"List every rank of a job with more than {MAX_ROWS}.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables; unknown values are null.")
def command(selection: Selection, workers: Workers, mesh: MeshLayout | None, lists_all: bool, as_json: bool) -> None:
    """Compare the ranks of a job by peak memory and step time.

    TRACE is the trace of a job with several ranks. Several traces, or memory files of other tools, are compared as the
    ranks of one job. The result names the rank to inspect first. Ranks of one pipeline stage are compared with each
    other: their places come from torch's device mesh, Megatron-Core or --mesh.

    \b
    Examples:
      memtrace ranks job.memtrace
      memtrace ranks snapshots/*.pickle --mesh pp=4,dp=2
    """
    trace = selection.open()
    with working(f"comparing {len(trace.ranks)} ranks"), workers.engine(trace, selection.source) as engine:
        comparison = compare_ranks(engine, trace, selection.source, mesh)
    if as_json:
        print_json(comparison)
    else:
        _print_comparison(comparison, selection.name, lists_all or len(comparison.ranks) <= MAX_ROWS)


def _print_comparison(comparison: RankComparison, trace_name: str, lists_all: bool) -> None:
    out = console()
    if comparison.groups:
        out.print("[bold]Peak memory by pipeline stage[/]")
        out.print(_group_table(comparison.groups))
        out.print()
    listed = comparison.ranks if lists_all else _ranks_that_stand_out(comparison)
    out.print("[bold]Peak memory by rank and category[/]")
    out.print(_peak_table(listed))
    out.print("\n[bold]Step time by rank[/] (median; compute time excludes torch.distributed)")
    out.print(_time_table(listed))
    if len(listed) < len(comparison.ranks):
        hidden = format_count(len(comparison.ranks) - len(listed), "more rank")
        out.print(f"{hidden} not listed; --all lists every rank")
    _print_outliers(out, comparison)
    _print_problems(out, comparison)
    imbalance = UNKNOWN if comparison.imbalance is None else f"{comparison.imbalance:.2f}"
    slowest = "none stands out" if comparison.slowest_rank is None else f"rank {comparison.slowest_rank}"
    out.print(f"\nImbalance (highest peak / mean peak): {imbalance}")
    out.print(f"Slowest rank: {slowest}")
    if comparison.rank_to_inspect is not None:
        out.print(f"[bold]Inspect rank {comparison.rank_to_inspect} first[/]: {escape(comparison.reason)}.")
        print_next_command(out, f"memtrace summary {trace_name} --rank {comparison.rank_to_inspect}")


def _ranks_that_stand_out(comparison: RankComparison) -> list[RankSummary]:
    """Return the ranks to list of a large job: the one to inspect, outliers, the fullest of each stage, problems."""
    chosen: dict[int, None] = {}
    if comparison.rank_to_inspect is not None:
        chosen[comparison.rank_to_inspect] = None
    chosen |= dict.fromkeys(outlier.rank for outlier in comparison.outliers)
    chosen |= dict.fromkeys(group.highest_rank for group in comparison.groups if group.highest_rank is not None)
    chosen |= dict.fromkeys(summary.rank for summary in comparison.ranks if summary.problem)
    # Without ranks that stand out, the first ones are as good as any.
    chosen |= dict.fromkeys(summary.rank for summary in comparison.ranks[: max(MIN_LISTED - len(chosen), 0)])
    kept = set(list(chosen)[:MAX_LISTED])
    return [summary for summary in comparison.ranks if summary.rank in kept]


def _group_table(groups: Sequence[RankGroup]) -> PlainTable:
    table = plain_table("stage", "ranks", "median", "lowest", "highest", "highest rank")
    for group in groups:
        table.add_row(
            escape(group.label),
            f"{len(group.ranks):,}",
            *map(_short_bytes, (group.median_peak_bytes, group.lowest_peak_bytes, group.highest_peak_bytes)),
            UNKNOWN if group.highest_rank is None else str(group.highest_rank),
        )
    return table


def _peak_table(summaries: Sequence[RankSummary]) -> PlainTable:
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


def _time_table(summaries: Sequence[RankSummary]) -> PlainTable:
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


def _print_outliers(out: Console, comparison: RankComparison) -> None:
    if not comparison.outliers:
        return
    coordinates = {summary.rank: summary.coordinates for summary in comparison.ranks}
    out.print("\n[bold]Ranks that differ from their peers[/]")
    sentences = describe_outliers(comparison.outliers)
    for rank in list(sentences)[:MAX_LISTED]:
        place = ", ".join(f"{name}={index}" for name, index in coordinates[rank].items())
        out.print(f"[bold]Rank {rank}[/]{escape(f' ({place})') if place else ''}: {escape(sentences[rank])}")
    _print_number_left_out(out, len(sentences))


def _print_problems(out: Console, comparison: RankComparison) -> None:
    problems = [summary for summary in comparison.ranks if summary.problem]
    for summary in problems[:MAX_LISTED]:
        out.print(f"[bold]Rank {summary.rank}[/]: {escape(summary.problem or '')}")
    _print_number_left_out(out, len(problems))
    if comparison.missing_ranks:
        missing = _format_ranges(comparison.missing_ranks)
        out.print(f"[bold]Missing ranks[/]: {missing} (part of the job, but not analyzed)")
    errors = [summary.clock_error_ns for summary in comparison.ranks if summary.clock_error_ns is not None]
    drifts = [abs(summary.clock_drift_ns) for summary in comparison.ranks if summary.clock_drift_ns is not None]
    if errors:
        drift = format_duration(max(drifts, default=None))
        out.print(f"Clock error: at most {format_duration(max(errors))} between ranks; drift: {drift}")


def _print_number_left_out(out: Console, num_ranks: int) -> None:
    if num_ranks > MAX_LISTED:
        out.print(f"and {format_count(num_ranks - MAX_LISTED, 'more rank')}; --json contains all of them")


def _format_ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as text, runs as ranges: ``3, 8-15``."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda item: item[1] - item[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
