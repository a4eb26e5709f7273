"""``memtrace plan pipeline``: rank pipeline schedules and partitions for a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click
from memtrace.cli.arguments import RANK, WINDOW, Selection
from memtrace.cli.output import console, escape, plain_table, print_json, working
from memtrace.cli.quantities import BYTES

from memtrace.errors import MemtraceError
from memtrace.pipeline.plan_report import PipelinePlanReport, ScheduleSummary, report_plan, report_search
from memtrace.pipeline.schedules.registry import SCHEDULE_FAMILIES
from memtrace.units import UNKNOWN, format_bytes, format_duration, format_share

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.pipeline.layer_costs import MeasuredLayers
    from memtrace.pipeline.plan import PlanSettings
    from memtrace.pipeline.schedules.registry import ScheduleChoice

RESULT: Final = PipelinePlanReport
_COUNT: Final = click.IntRange(min=1)
_MAX_ROWS: Final = 20
_RECOMPUTE: Final = {"off": (False,), "on": (True,), "both": (False, True)}


def _add_hardware_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options that describe workers, the network between them, and preferences."""
    for option in (
        click.option("--capacity", type=BYTES, help="Memory of one worker (e.g. 16GiB); default: unlimited."),
        click.option("--latency", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS",
                     help="Latency of a message between workers, in seconds; default: 0."),
        click.option("--bandwidth", type=BYTES,
                     help="Bandwidth between workers, in bytes per second (e.g. 10GB); default: unlimited."),
        click.option("--data-parallel", type=_COUNT, default=1, metavar="N",
                     help="Data-parallel degree: copies of the pipeline, joined by all-reduce; default: 1."),
        click.option("--sync", type=click.Choice(["after", "eager", "eager-opt"]), default="eager",
                     help="When to all-reduce gradients: after all work of a worker, eagerly after the last backward "
                          "of a stage, or eagerly only where a bubble follows; default: eager."),
        click.option("--overlap", type=click.FloatRange(0.1, 1.0), default=1.0, metavar="SHARE",
                     help="Time of an overlapped forward and backward (DualPipe), as a share of both; default: 1."),
        click.option("--balance", type=click.Choice(["time", "memory"]), default="time",
                     help="What the partition balances first; default: time."),
        click.option("--recompute", type=click.Choice(list(_RECOMPUTE)), default="off",
                     help="Recomputation: stages keep only their inputs and repeat their forward; default: off."),
    ):  # fmt: skip
        function = option(function)
    return function


@click.command("pipeline")
@click.argument("trace", type=click.Path(), required=False)
@RANK
@WINDOW[0]
@WINDOW[1]
@click.option("--costs", type=click.Path(), metavar="FILE", help="Read layer costs from JSON instead of TRACE.")
@click.option("--layer", "layers", multiple=True, metavar="PATTERN",
              help="Modules of TRACE that are layers (e.g. 'blocks.*'); repeatable; default: its repeated "
                   "blocks.")  # fmt: skip
@click.option("--stages", type=_COUNT, metavar="N",
              help="Workers of one pipeline; one stage each, unless a schedule puts several on a worker.")  # fmt: skip
@click.option("--microbatches", type=_COUNT, metavar="N", help="Micro-batches of one pipeline per step.")
@click.option("--schedule", "schedules", multiple=True, default=["all"], metavar="NAME[:OPTIONS]",
              help="Schedule to try, with options (e.g. chimera:f=2,method=doubling); repeatable; default: all of "
                   f"{', '.join(SCHEDULE_FAMILIES)}.")  # fmt: skip
@_add_hardware_options
@click.option("--workers", type=_COUNT, metavar="N",
              help="Search: try every data-parallel degree and number of stages for N workers.")  # fmt: skip
@click.option("--batch", type=_COUNT, metavar="N", help="With --workers: samples per step over all workers.")
@click.option("--microbatch-size", "sizes", type=_COUNT, multiple=True, metavar="N",
              help="With --workers: samples per micro-batch to try; repeatable; default: --measured-size.")  # fmt: skip
@click.option("--measured-size", type=_COUNT, default=1, metavar="N",
              help="With --workers: samples per micro-batch of the layer costs; default: 1.")  # fmt: skip
@click.option("--show-schedule", is_flag=True, help="Also print the action table of the best schedule.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables; unknown values are null.")
def command(
    trace: str | None,
    rank: int | None,
    from_step: int | None,
    to_step: int | None,
    costs: str | None,
    layers: tuple[str, ...],
    stages: int | None,
    microbatches: int | None,
    schedules: tuple[str, ...],
    workers: int | None,
    batch: int | None,
    sizes: tuple[int, ...],
    measured_size: int,
    show_schedule: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Rank pipeline schedules for a model by predicted step time and memory.

    TRACE is a trace of one process that trained the whole model on one micro-batch per step; --costs replaces it. Every
    schedule gets its best partition into stages and is simulated. Schedules that fit the capacity come first.

    Give --stages and --microbatches, or --workers and --batch to search for them.

    \b
    Examples:
      memtrace plan pipeline single.memtrace --stages 4 --microbatches 8
      memtrace plan pipeline single.memtrace --workers 32 --batch 512
    """
    selection = None if trace is None else Selection((trace,), rank, from_step, to_step)
    _check_options(workers is not None, stages, microbatches, options["data_parallel"], batch, sizes)
    measured = _layer_costs(selection, costs, layers)
    settings, recompute = _settings(measured, options), _RECOMPUTE[options["recompute"]]
    table = ""
    if workers is not None:
        with working(f"searching pipelines over {workers} workers"):
            report = _search(measured, workers, batch, sizes, measured_size, schedules, recompute, settings)
    else:
        report, table = _plan(measured, stages, microbatches, schedules, recompute, settings)
    if as_json:
        print_json(report)
        return
    out = console()
    for note in report.notes:
        out.print(f"[bold]Note[/]: {escape(note)}")
    if workers is None:
        _print_stages(out, report)
        _print_schedules(out, report, settings.capacity_bytes)
    else:
        _print_configurations(out, report)
    if show_schedule and table:
        out.print("\n" + table, soft_wrap=True, markup=False)


def _check_options(
    is_search: bool,
    stages: int | None,
    microbatches: int | None,
    data_parallel: int,
    batch: int | None,
    sizes: tuple[int, ...],
) -> None:
    """Reject options of a search without one, and options that a search decides."""
    if is_search and (stages or microbatches or data_parallel > 1):
        raise MemtraceError("--workers cannot be combined with --stages, --microbatches or --data-parallel, which it "
                            "searches for.")  # fmt: skip
    if not is_search and (batch or sizes):
        raise MemtraceError("--batch and --microbatch-size need --workers N, the number of workers to search for.")
    if is_search and batch is None:
        raise MemtraceError("--workers needs --batch N, the samples per step over all workers.")
    if not is_search and (stages is None or microbatches is None):
        raise MemtraceError("Give --stages and --microbatches, or --workers and --batch to search for them.")


def _layer_costs(selection: Selection | None, costs: str | None, patterns: tuple[str, ...]) -> MeasuredLayers:
    from memtrace.pipeline.costs import read_layers
    from memtrace.pipeline.layer_costs import MeasuredLayers, measure_layer_costs
    from memtrace.pipeline.memory_rules import PAPER

    if (selection is None) == (costs is None):
        raise MemtraceError("Give either TRACE or --costs FILE.")
    if selection is not None:
        return measure_layer_costs(selection.open_rank(), patterns)
    assert costs is not None
    if patterns:
        raise MemtraceError("--layer chooses layers of a TRACE and cannot be combined with --costs.")
    return MeasuredLayers(read_layers(costs), PAPER, None, 0)


def _settings(measured: MeasuredLayers, options: dict[str, Any]) -> PlanSettings:
    from memtrace.pipeline.costs import Network
    from memtrace.pipeline.plan import PlanSettings

    bandwidth = options["bandwidth"]
    return PlanSettings(
        network=Network(latency_s=options["latency"], seconds_per_byte=0.0 if bandwidth is None else 1 / bandwidth),
        capacity_bytes=options["capacity"],
        data_parallel=options["data_parallel"],
        sync=options["sync"],
        overlap=options["overlap"],
        objective=options["balance"],
        model=measured.model,
    )


def _parse_schedules(texts: Iterable[str], num_workers: int, num_microbatches: int) -> list[ScheduleChoice]:
    from memtrace.pipeline.schedules.registry import all_schedule_choices, parse_schedule_choice

    choices: list[ScheduleChoice] = []
    for text in texts:
        is_all = text.lower() == "all"
        choices += all_schedule_choices(num_workers, num_microbatches) if is_all else [parse_schedule_choice(text)]
    return choices


def _plan(
    measured: MeasuredLayers,
    stages: int | None,
    microbatches: int | None,
    schedules: tuple[str, ...],
    recompute: tuple[bool, ...],
    settings: PlanSettings,
) -> tuple[PipelinePlanReport, str]:
    """The report, and the text of the best schedule."""
    from memtrace.pipeline.plan import plan_pipeline

    assert stages is not None and microbatches is not None
    choices = _parse_schedules(schedules, stages, microbatches)
    with working(f"simulating {len(choices)} schedules"):
        plan = plan_pipeline(
            measured.layers, stages, microbatches, choices=choices, recompute=recompute, settings=settings
        )
    if not plan.predictions:
        raise MemtraceError("; ".join(dict.fromkeys(skipped.reason for skipped in plan.skipped)))
    return report_plan(plan, microbatches, settings, measured.notes), str(plan.predictions[0].schedule)


def _search(
    measured: MeasuredLayers,
    workers: int,
    batch: int | None,
    sizes: tuple[int, ...],
    measured_size: int,
    schedules: tuple[str, ...],
    recompute: tuple[bool, ...],
    settings: PlanSettings,
) -> PipelinePlanReport:
    from memtrace.pipeline.search import search_configurations

    assert batch is not None
    configurations = search_configurations(
        measured.layers,
        workers,
        batch,
        choices=lambda num_stages, num_microbatches: _parse_schedules(schedules, num_stages, num_microbatches),
        microbatch_sizes=sizes or (measured_size,),
        measured_size=measured_size,
        recompute=recompute,
        settings=settings,
    )
    return report_search(configurations, measured.notes)


def _format_seconds(seconds: float) -> str:
    return format_duration(seconds * 1e9)


def _print_stages(out: Console, report: PipelinePlanReport) -> None:
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


def _print_schedules(out: Console, report: PipelinePlanReport, capacity: int | None) -> None:
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


def _print_configurations(out: Console, report: PipelinePlanReport) -> None:
    table = plain_table("schedule", "DP", "stages", "mb x size", "samples/s", "max peak", "fits")
    for row in report.schedules[:_MAX_ROWS]:
        table.add_row(
            escape(_table_name(row)),
            str(row.data_parallel),
            str(row.num_workers),
            f"{row.num_microbatches} x {row.microbatch_size}",
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
