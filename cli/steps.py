"""``memtrace steps``: where the steps are, how similar they are, and which blocks differ."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, escape, plain_table, print_json
from memtrace.cli.tabular import print_csv
from memtrace.cli.workers import Workers, takes_workers

from memtrace.analysis.step_analysis import StepAnalysis, analyze_steps
from memtrace.analysis.thresholds import MIN_MATCHING_BYTES
from memtrace.format.schema import NO_BLOCKS
from memtrace.units import format_bytes, format_count, format_duration, format_share

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.analysis.stability import BlockDifference
    from memtrace.analysis.step_analysis import MarkAgreement

RESULT: Final = StepAnalysis
CSV_COLUMNS: Final = ("step", "start_ns", "duration_ns", "first_event", "end_event", "matching_events",
                      "matching_bytes", "matching_blocks", "is_unusual")  # fmt: skip
MAX_LISTED_STEPS: Final = 8
_SOURCES: Final = {
    "marks": "marked by the program or its optimizer",
    "events": "detected in the events, without marks",
}


@click.command("steps")
@selects_traces
@takes_workers
@click.option("--from-events", is_flag=True, help="Ignore step marks and detect the steps in the events alone.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; unknown values are null.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV, one row per step.")
def command(selection: Selection, workers: Workers, from_events: bool, as_json: bool, as_csv: bool) -> None:
    """Detect the training steps of TRACE and measure how much they vary.

    \b
    Example:
      memtrace steps run.memtrace
    """
    trace = selection.open_rank()
    result = workers.ask([(trace, selection.source)], partial(analyze_steps, from_events=from_events))
    if as_json:
        print_json(result)
    elif as_csv:
        print_csv(CSV_COLUMNS, map(asdict, result.steps))
    elif not trace.has_blocks:
        console().print(f"[bold]{escape(selection.name)}[/]: steps unavailable: {NO_BLOCKS}")
    else:
        _print(console(), selection.name, result)


def _print(out: Console, name: str, result: StepAnalysis) -> None:
    if not result.is_iterative:
        out.print(
            f"[bold]{escape(name)}[/]: not iterative. No sequence of events repeats often enough to be a step "
            f"(confidence {result.confidence:.2f})."
        )
        return
    out.print(f"[bold]{escape(name)}[/]: {format_count(result.num_steps, 'step')}, {_SOURCES[result.source]}")
    duration = "" if result.median_duration_ns is None else f", {format_duration(result.median_duration_ns)}"
    out.print(f"Median step: {format_count(result.median_events or 0, 'event')}{duration}")
    if result.source == "events":
        out.print(f"Detection: confidence {result.confidence:.2f}, from {result.method}")
    if result.marks is not None:
        _print_marks(out, result.marks)
    if result.allocation_fit is not None:
        fit = result.allocation_fit
        quality = "exact in every step after warm-up" if fit.is_exact else "median step; some steps differ"
        out.print(f"Allocations after n steps: {fit.constant:,} + {fit.per_step:,} n ({quality})")
    _print_stability(out, result)
    _print_differences(out, result.differences)


def _print_marks(out: Console, marks: MarkAgreement) -> None:
    out.print(f"Step marks: {format_share(marks.agreement)} of their ends were also detected in the events")
    if marks.is_shifted and marks.shift_events is not None:
        direction = "later" if marks.shift_events > 0 else "earlier"
        events = format_count(abs(marks.shift_events), "event")
        share = format_share(marks.shifted_agreement)
        out.print(f"  {share} were detected exactly {events} {direction} (frees not counted)")


def _print_stability(out: Console, result: StepAnalysis) -> None:
    stability = result.stability
    if stability.blocks is not None:
        num_steady = result.num_steps - stability.num_warm_up_steps
        out.print(
            f"Stability: {format_share(stability.bytes)} of bytes, {format_share(stability.blocks)} of blocks and "
            f"{format_share(stability.events)} of events match the usual step (median of "
            f"{format_count(num_steady, 'step')}; {format_count(stability.num_warm_up_steps, 'warm-up step')} excluded)"
        )
    unusual = [f"{row.step} ({format_share(row.matching_bytes)})" for row in result.steps if row.is_unusual]
    if unusual:
        more = f" and {len(unusual) - MAX_LISTED_STEPS} more" if len(unusual) > MAX_LISTED_STEPS else ""
        steps = f"{format_count(len(unusual), 'step')}: {', '.join(unusual[:MAX_LISTED_STEPS])}{more}"
        out.print(f"Less than {format_share(MIN_MATCHING_BYTES)} of bytes match in {steps}")


def _print_differences(out: Console, differences: tuple[BlockDifference, ...]) -> None:
    if not differences:
        return
    table = plain_table("block", "count", "allocation site and operator, steps that differ")
    for row in differences:
        table.add_row(
            format_bytes(row.size_bytes), f"{row.num_blocks:,}", f"{escape(row.site)}\n{_describe_difference(row)}"
        )
    out.print("\n[bold]Blocks that differ between steps[/]")
    out.print(table)


def _describe_difference(row: BlockDifference) -> str:
    """Return how a block differs between steps, one line for each difference."""
    differences = (
        ("missing in", row.missing_in),
        ("only in", row.only_in),
        ("different size in", row.other_size_in),
        ("different number of accesses in", row.other_accesses_in),
    )
    return "\n".join(f"  {text} {_step_list(steps)}" for text, steps in differences if steps)


def _step_list(steps: tuple[int, ...]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} steps ({', '.join(map(str, steps[:3]))}{', ...' if len(steps) > 3 else ''})"
