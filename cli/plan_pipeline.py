"""``memtrace plan pipeline``: rank pipeline schedules and partitions for a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import click
from memtrace.cli.arguments import RANK, WINDOW, Selection
from memtrace.cli.output import console, escape, print_json, print_line, working
from memtrace.cli.pages import check_output_folder, output_errors
from memtrace.cli.plan_pipeline_tables import (
    print_assumptions,
    print_configurations,
    print_efficiency,
    print_schedules,
    print_stages,
)
from memtrace.cli.quantities import BYTES

from memtrace.errors import MemtraceError
from memtrace.pipeline.plan_report import PipelinePlanReport, report_plan, report_search
from memtrace.pipeline.schedules.registry import SCHEDULE_FAMILIES
from memtrace.units import format_bytes

if TYPE_CHECKING:
    from memtrace.pipeline.layer_costs import MeasuredLayers
    from memtrace.pipeline.memory_rules import MemoryModel
    from memtrace.pipeline.microbatch_costs import MicrobatchCosts
    from memtrace.pipeline.plan import PlanSettings, SchedulePrediction
    from memtrace.pipeline.schedules.registry import ScheduleChoice

RESULT: Final = PipelinePlanReport
NamedPrediction = tuple[str, "SchedulePrediction"]
"""Name of a schedule on the page, and its prediction."""
_COUNT: Final = click.IntRange(min=1)
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
        click.option("--all-reduce-share", type=click.FloatRange(0, 1), default=0.5, metavar="SHARE",
                     help="Share of a worker's speed that an all-reduce takes from computation beside it; default: "
                          "0.5."),
        click.option("--all-reduce-launch", type=click.FloatRange(min=0), default=0.0, metavar="SECONDS",
                     help="Computation that a worker loses by launching an all-reduce of one stage before its work is "
                          "done, in seconds; default: 0."),
        click.option("--overlap", type=click.FloatRange(0.1, 1.0), default=1.0, metavar="SHARE",
                     help="Time of an overlapped forward and backward (DualPipe), as a share of both; default: 1."),
        click.option("--balance", type=click.Choice(["time", "memory", "equal"]), default="time",
                     help="What the partition balances first; equal: the number of layers, as in papers; default: "
                          "time."),
        click.option("--recompute", type=click.Choice(list(_RECOMPUTE)), default="off",
                     help="Recomputation: stages keep only their inputs and repeat their forward; default: off."),
    ):  # fmt: skip
        function = option(function)
    return function


@click.command("pipeline")
@click.argument("traces", metavar="[TRACE]...", nargs=-1, type=click.Path())
@RANK
@WINDOW[0]
@WINDOW[1]
@click.option("--costs", multiple=True, type=click.Path(), metavar="FILE",
              help="Read layer costs from JSON instead of TRACE; repeatable like TRACE.")  # fmt: skip
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
              help="Samples per micro-batch; with --workers repeatable, to try several; default: the measured "
                   "sizes.")  # fmt: skip
@click.option("--measured-size", "measured_sizes", type=_COUNT, multiple=True, metavar="N",
              help="Samples per micro-batch of TRACE or --costs; give one for each of them, in their order; default "
                   "for a single one: 1.")  # fmt: skip
@click.option("--rule", type=click.Choice(["fastest", "chimera"]), default="fastest",
              help="With --workers: rank all micro-batch sizes, or for every degree and number of stages only the "
                   "largest that fits (the rule of the Chimera paper); default: fastest.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(dir_okay=False),
              help="Also write an HTML page that shows the schedules and the memory of their workers; it works "
                   "offline.")  # fmt: skip
@click.option("--show-schedule", is_flag=True, help="Also print the action table of the best schedule.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables; unknown values are null.")
def command(
    traces: tuple[str, ...],
    rank: int | None,
    from_step: int | None,
    to_step: int | None,
    costs: tuple[str, ...],
    layers: tuple[str, ...],
    stages: int | None,
    microbatches: int | None,
    schedules: tuple[str, ...],
    workers: int | None,
    batch: int | None,
    sizes: tuple[int, ...],
    measured_sizes: tuple[int, ...],
    rule: str,
    output: str | None,
    show_schedule: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Rank pipeline schedules for a model by predicted step time and memory.

    TRACE is a trace of one process that trained the whole model on one micro-batch per step; --costs replaces it. Every
    schedule gets its best partition into stages and is simulated. Schedules that fit the capacity come first.

    Give --stages and --microbatches, or --workers and --batch to search for them. Several traces with different
    micro-batch sizes show how efficient each size is; with a single one costs of other sizes are taken in proportion.

    \b
    Examples:
      memtrace plan pipeline single.memtrace --stages 4 --microbatches 8
      memtrace plan pipeline single.memtrace --workers 32 --batch 512
      memtrace plan pipeline single.memtrace --workers 4 --batch 8 -o plan.html
    """
    if output is not None:
        check_output_folder(output)
    selections = [Selection((trace,), rank, from_step, to_step) for trace in traces]
    _check_options(workers is not None, stages, microbatches, options["data_parallel"], batch, sizes, rule)
    measured = _measure_layers(selections, costs, layers, measured_sizes)
    settings, recompute = _settings(measured.model, options), _RECOMPUTE[options["recompute"]]
    if workers is not None:
        with working(f"searching pipelines over {workers} workers"):
            report, planned = _search(measured, workers, batch, sizes, schedules, recompute, settings, rule)
    else:
        report, planned = _plan(measured, stages, microbatches, sizes, schedules, recompute, settings)
    if output is not None:
        _write_page(planned, output, settings.capacity_bytes, (*report.notes, *report.assumptions))
    if as_json:
        print_json(report)
        return
    out = console()
    for note in report.notes:
        out.print(f"[bold]Note[/]: {escape(note)}")
    print_efficiency(out, report)
    if workers is None:
        print_stages(out, report)
        print_schedules(out, report, settings.capacity_bytes)
    else:
        print_configurations(out, report)
    print_assumptions(out, report)
    if show_schedule:
        out.print(f"\n{planned[0][1].schedule}", soft_wrap=True, markup=False)


def _write_page(planned: list[NamedPrediction], output: str, capacity_bytes: int | None, notes: Sequence[str]) -> None:
    from memtrace.dashboards.planned_pipeline import PlannedSchedule, write_planned_pipeline

    schedules = [PlannedSchedule(name, prediction) for name, prediction in planned]
    with output_errors(output), working(f"writing {output}"):
        page = write_planned_pipeline(schedules, output, capacity_bytes=capacity_bytes, notes=notes)
    print_line(f"Wrote {page} ({format_bytes(page.stat().st_size)}).", err=True)


def _check_options(
    is_search: bool,
    stages: int | None,
    microbatches: int | None,
    data_parallel: int,
    batch: int | None,
    sizes: tuple[int, ...],
    rule: str,
) -> None:
    """Reject options of a search without one, and options that a search decides."""
    if is_search and (stages or microbatches or data_parallel > 1):
        raise MemtraceError("--workers cannot be combined with --stages, --microbatches or --data-parallel, which it "
                            "searches for.")  # fmt: skip
    if not is_search and (batch or rule != "fastest"):
        raise MemtraceError("--batch and --rule need --workers N, the number of workers to search for.")
    if not is_search and len(sizes) > 1:
        raise MemtraceError("Several --microbatch-size need --workers N, the number of workers to search for.")
    if is_search and batch is None:
        raise MemtraceError("--workers needs --batch N, the samples per step over all workers.")
    if not is_search and (stages is None or microbatches is None):
        raise MemtraceError("Give --stages and --microbatches, or --workers and --batch to search for them.")


@dataclass(frozen=True)
class _Measured:
    """Layer costs of all traces or files on the command line."""

    costs: MicrobatchCosts
    has_sizes: bool
    """Whether the user gave the measured micro-batch sizes; without, the only one counts as 1 sample."""
    model: MemoryModel
    notes: tuple[str, ...]


def _measure_layers(
    selections: list[Selection],
    files: tuple[str, ...],
    patterns: tuple[str, ...],
    measured_sizes: tuple[int, ...],
) -> _Measured:
    from memtrace.pipeline.microbatch_costs import combine_microbatch_sizes

    if bool(selections) == bool(files):
        raise MemtraceError("Give either TRACE or --costs FILE.")
    names = [selection.name for selection in selections] or list(files)
    if len(names) != max(len(measured_sizes), 1):
        raise MemtraceError(
            f"Give --measured-size, the samples per micro-batch, once for each of the {len(names)} traces or files of "
            f"costs, in their order; {len(measured_sizes)} were given."
        )
    measured = [_layer_costs(selection, patterns) for selection in selections] or _read_costs(files, patterns)
    sizes = measured_sizes or (1,)
    costs = combine_microbatch_sizes(
        [(name, size, each.layers) for name, size, each in zip(names, sizes, measured, strict=True)]
    )
    notes = dict.fromkeys(note for each in measured for note in each.notes)
    return _Measured(costs, bool(measured_sizes), measured[0].model, tuple(notes))


def _layer_costs(selection: Selection, patterns: tuple[str, ...]) -> MeasuredLayers:
    from memtrace.pipeline.layer_costs import measure_layer_costs

    return measure_layer_costs(selection.open_rank(), patterns)


def _read_costs(files: tuple[str, ...], patterns: tuple[str, ...]) -> list[MeasuredLayers]:
    from memtrace.pipeline.costs import read_layers
    from memtrace.pipeline.layer_costs import MeasuredLayers
    from memtrace.pipeline.memory_rules import PAPER

    if patterns:
        raise MemtraceError("--layer chooses layers of a TRACE and cannot be combined with --costs.")
    return [MeasuredLayers(read_layers(path), PAPER, None, 0) for path in files]


def _settings(model: MemoryModel, options: dict[str, Any]) -> PlanSettings:
    from memtrace.pipeline.costs import Network
    from memtrace.pipeline.plan import PlanSettings

    bandwidth = options["bandwidth"]
    return PlanSettings(
        network=Network(
            latency_s=options["latency"],
            seconds_per_byte=0.0 if bandwidth is None else 1 / bandwidth,
            all_reduce_share=options["all_reduce_share"],
            all_reduce_launch_s=options["all_reduce_launch"],
        ),
        capacity_bytes=options["capacity"],
        data_parallel=options["data_parallel"],
        sync=options["sync"],
        overlap=options["overlap"],
        objective=options["balance"],
        model=model,
    )


def _parse_schedules(texts: Iterable[str], num_workers: int, num_microbatches: int) -> list[ScheduleChoice]:
    from memtrace.pipeline.schedules.registry import all_schedule_choices, parse_schedule_choice

    choices: list[ScheduleChoice] = []
    for text in texts:
        is_all = text.lower() == "all"
        choices += all_schedule_choices(num_workers, num_microbatches) if is_all else [parse_schedule_choice(text)]
    return choices


def _plan(
    measured: _Measured,
    stages: int | None,
    microbatches: int | None,
    sizes: tuple[int, ...],
    schedules: tuple[str, ...],
    recompute: tuple[bool, ...],
    settings: PlanSettings,
) -> tuple[PipelinePlanReport, list[NamedPrediction]]:
    """The report, and the predictions with their names."""
    from memtrace.pipeline.plan import plan_pipeline

    assert stages is not None and microbatches is not None
    if not sizes and len(measured.costs.sizes) > 1:
        raise MemtraceError("Several micro-batch sizes were measured. Give --microbatch-size N, the one to plan for.")
    if sizes and not measured.has_sizes:
        raise MemtraceError("--microbatch-size needs --measured-size N, the samples per micro-batch of the trace.")
    size = sizes[0] if sizes else measured.costs.sizes[0]
    choices = _parse_schedules(schedules, stages, microbatches)
    with working(f"simulating {len(choices)} schedules"):
        plan = plan_pipeline(
            measured.costs.at(size), stages, microbatches, choices=choices, recompute=recompute, settings=settings
        )
    if not plan.predictions:
        raise MemtraceError("; ".join(dict.fromkeys(skipped.reason for skipped in plan.skipped)))
    report = report_plan(
        plan,
        microbatches,
        settings,
        measured.costs,
        microbatch_size=size if measured.has_sizes else None,
        notes=measured.notes,
    )
    return report, [(_prediction_name(prediction), prediction) for prediction in plan.predictions]


def _prediction_name(prediction: SchedulePrediction) -> str:
    return f"{prediction.choice}{' with recomputation' if prediction.recompute else ''}"


def _search(
    measured: _Measured,
    workers: int,
    batch: int | None,
    sizes: tuple[int, ...],
    schedules: tuple[str, ...],
    recompute: tuple[bool, ...],
    settings: PlanSettings,
    rule: str,
) -> tuple[PipelinePlanReport, list[NamedPrediction]]:
    """The report, and the configurations with their names."""
    from memtrace.pipeline.search import largest_microbatches, search_configurations

    assert batch is not None
    configurations = search_configurations(
        measured.costs,
        workers,
        batch,
        choices=lambda num_stages, num_microbatches: _parse_schedules(schedules, num_stages, num_microbatches),
        microbatch_sizes=sizes or measured.costs.sizes,
        recompute=recompute,
        settings=settings,
    )
    if rule == "chimera":
        configurations = largest_microbatches(configurations)
        if not configurations:
            raise MemtraceError("No configuration fits the capacity. Try --recompute both or more workers.")
    return report_search(configurations, settings, measured.costs, measured.notes), [
        (
            f"{_prediction_name(each.prediction)}, W={each.data_parallel} D={each.pipeline_workers} "
            f"B={each.microbatch_size}",
            each.prediction,
        )
        for each in configurations
    ]
