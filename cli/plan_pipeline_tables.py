"""The tables that ``memtrace plan pipeline`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from memtrace.cli.output import escape, plain_table

from memtrace.units import UNKNOWN, format_bytes, format_duration, format_share

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.pipeline.plan_report import PipelinePlanReport, ScheduleSummary

_MAX_ROWS: Final = 20
_BASIS_MARKS: Final = {"measured": "", "interpolated": " i", "extrapolated": " e", "proportional": " p"}
_BASIS_TEXTS: Final = {
    "interpolated": "interpolated between two measured sizes",
    "extrapolated": "extrapolated from two measured sizes",
    "proportional": "taken in proportion to the measured size",
}


def _format_seconds(seconds: float) -> str:
    return format_duration(seconds * 1e9)


def print_stages(out: Console, report: PipelinePlanReport) -> None:
    """Print the stages of the best schedule with one stage per worker."""
    table = plain_table("stage", "forward", "backward", "parameters", "model state", "activations", "layers")
    for stage in report.stages:
        first, last, count = stage.layers[0], stage.layers[-1], len(stage.layers)
        table.add_row(
            str(stage.stage),
            _format_seconds(stage.forward_s),
            _format_seconds(stage.backward_s),
            format_bytes(stage.parameter_bytes),
            format_bytes(stage.state_bytes),
            format_bytes(stage.activation_bytes),
            escape(first if count == 1 else f"{first} to {last} ({count})"),
        )
    schedule = next(row for row in report.schedules if len(row.first_layers) == len(report.stages))
    recompute = " with recomputation" if schedule.recompute else ""
    out.print(f"[bold]Stages for {escape(schedule.name)}[/]{recompute}")
    out.print(table)
    out.print(
        "Model state: parameters, gradients and optimizer state. Times and activations are per micro-batch.",
        style="dim",
    )


def print_schedules(out: Console, report: PipelinePlanReport, capacity: int | None) -> None:
    """Print the schedules of a plan."""
    table = plain_table("schedule", "step", "bubbles", "max peak", "min peak", "fits", "in flight")
    for row in report.schedules[:_MAX_ROWS]:
        table.add_row(
            escape(_table_name(row)),
            _format_seconds(row.step_time_s),
            format_share(row.bubble_ratio),
            format_bytes(row.max_peak_bytes),
            format_bytes(row.min_peak_bytes),
            _format_fits(row),
            str(max(worker.in_flight_peak for worker in row.workers)),
        )
    limit = "" if capacity is None else f" (capacity {format_bytes(capacity)} per worker)"
    out.print(f"\n[bold]Schedules by step time[/]{limit}")
    out.print(table)
    out.print("Max and min peak: over the workers. In flight: most micro-batches on a worker.", style="dim")
    _print_remarks(out, report.schedules)
    for skipped in report.skipped:
        out.print(f"Skipped {escape(skipped.schedule)}: {escape(skipped.reason)}", style="dim")


def print_configurations(out: Console, report: PipelinePlanReport) -> None:
    """Print the result of a search."""
    table = plain_table("schedule", "DP", "stages", "mb x size", "samples/s", "max peak", "fits")
    for row in report.schedules[:_MAX_ROWS]:
        table.add_row(
            escape(_table_name(row)),
            str(row.data_parallel),
            str(row.num_workers),
            f"{row.num_microbatches} x {row.microbatch_size}{_BASIS_MARKS[row.costs_basis]}",
            UNKNOWN if row.samples_per_s is None else f"{row.samples_per_s:,.1f}",
            format_bytes(row.max_peak_bytes),
            _format_fits(row),
        )
    out.print("[bold]Configurations by throughput[/]")
    out.print(table)
    out.print(
        "DP: data-parallel degree. mb x size: micro-batches per step of one pipeline x samples per micro-batch. "
        "Max peak: over the workers.",
        style="dim",
    )
    marked = {row.costs_basis for row in report.schedules[:_MAX_ROWS]}
    for basis, mark in _BASIS_MARKS.items():
        if mark and basis in marked:
            out.print(f"{mark.strip()}: costs of this micro-batch size are {_BASIS_TEXTS[basis]}.", style="dim")
    _print_remarks(out, report.schedules)


def _table_name(row: ScheduleSummary) -> str:
    return f"{row.name} *" if row.recompute else row.name


def _format_fits(row: ScheduleSummary) -> str:
    """No only where no partition at all fits."""
    if row.fits:
        return "yes"
    return "no" if row.exact else "unknown"


def _print_remarks(out: Console, rows: Sequence[ScheduleSummary]) -> None:
    """Print what the figures of some schedules rest on."""
    shown = rows[:_MAX_ROWS]
    remarks = {
        "Steps follow each other without a flush": [row for row in shown if row.asynchronous],
        "Each worker begins its next step when its own work is done": [row for row in shown if row.free_running],
        "Too many partitions to try all; a better one may exist": [row for row in shown if not row.exact],
    }
    if len(rows) > _MAX_ROWS:
        out.print(f"{len(rows) - _MAX_ROWS} slower schedules are not shown; --json contains all of them.")
    if any(row.recompute for row in shown):
        out.print("* with recomputation: stages keep only their inputs and repeat their forward.", style="dim")
    for remark, remarked in remarks.items():
        if remarked:
            names = ", ".join(dict.fromkeys(_table_name(row) for row in remarked))
            out.print(f"{remark}: {escape(names)}.", style="dim")


def print_efficiency(out: Console, report: PipelinePlanReport) -> None:
    """Print how the costs per sample depend on the micro-batch size, where several sizes were measured."""
    if sum(row.basis == "measured" for row in report.efficiency) < 2:
        return
    table = plain_table("samples", "time per sample", "efficiency", "activations per sample", "costs")
    for row in report.efficiency:
        table.add_row(
            str(row.microbatch_size),
            _format_seconds(row.seconds_per_sample),
            format_share(row.efficiency),
            format_bytes(row.activation_bytes_per_sample),
            row.basis,
        )
    out.print("[bold]Efficiency by micro-batch size[/]")
    out.print(table)
    out.print(
        "Forward and backward of the whole model on one worker. Efficiency: samples per second relative to the most "
        "efficient of these sizes.\n",
        style="dim",
    )


def print_assumptions(out: Console, report: PipelinePlanReport) -> None:
    """Print what the ranking rests on."""
    for assumption in report.assumptions:
        out.print(f"[bold]Assumption[/]: {escape(assumption)}")
