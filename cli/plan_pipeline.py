"""``memtrace plan pipeline``: which schedule, where to cut the model, what every worker would hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click
from memtrace.cli.output import console, plain_table, print_json, working
from memtrace.cli.quantities import BYTES
from rich.markup import escape

from memtrace.errors import MemtraceError
from memtrace.units import format_bytes, format_duration, format_share

if TYPE_CHECKING:
    from memtrace.pipeline.costs import Layer
    from memtrace.pipeline.plan import Plan, Prediction, Setting
    from memtrace.pipeline.schedules.registry import Choice
    from memtrace.pipeline.search import Configuration
    from memtrace.pipeline.simulation.memory import MemoryModel

_COUNT = click.IntRange(min=1)
_SHOWN = 20
_RECOMPUTE = {"off": (False,), "on": (True,), "both": (False, True)}


def _cost_options(function: Callable[..., None]) -> Callable[..., None]:
    """What a worker and the network between workers are like."""
    for option in (
        click.option("--capacity", type=BYTES, help="Memory of one worker, such as 16GiB; without it all fit."),
        click.option(
            "--latency", type=click.FloatRange(min=0), default=0.0, help="Seconds that an empty message takes."
        ),
        click.option("--bandwidth", type=BYTES, help="Bytes a second between workers; else messages are free."),
        click.option("--width", type=_COUNT, default=1, help="Copies of the pipeline, joined by all-reduce."),
        click.option(
            "--sync",
            type=click.Choice(["after", "eager", "eager-opt"]),
            default="eager",
            help="When gradients of a stage with several copies are summed.",
        ),
        click.option(
            "--overlap",
            type=click.FloatRange(0.1, 1.0),
            default=1.0,
            help="DualPipe's forward and backward together, as a share of both.",
        ),
        click.option("--cut", type=click.Choice(["time", "memory"]), default="time", help="What to balance first."),
        click.option(
            "--recompute",
            type=click.Choice(list(_RECOMPUTE)),
            default="off",
            help="Keep only the inputs of stages and run forwards again.",
        ),
    ):
        function = option(function)
    return function


@click.command("pipeline")
@click.argument("trace", type=click.Path(), required=False)
@click.option("--costs", type=click.Path(), help="A JSON list of layers instead of a trace.")
@click.option("--stages", type=_COUNT, help="Workers of one pipeline.")
@click.option("--microbatches", type=_COUNT, help="Micro-batches of one pipeline in a step.")
@click.option("--schedule", "schedules", multiple=True, default=["all"], show_default=True,
              help="all, or a name with options: chimera:f=2,method=doubling. Repeat for more.")  # fmt: skip
@_cost_options
@click.option("--workers", type=_COUNT, help="Search width, stages and micro-batch for so many workers instead.")
@click.option("--batch", type=_COUNT, help="With --workers: samples in a step over all workers.")
@click.option("--microbatch-size", "sizes", type=_COUNT, multiple=True,
              help="With --workers: samples in a micro-batch to try. Repeat for more.")  # fmt: skip
@click.option("--measured-size", type=_COUNT, default=1, help="With --workers: samples that the costs are of.")
@click.option("--layer", "layers", multiple=True, help="Modules of TRACE that are layers, as patterns.")
@click.option("--rank", type=int, help="One rank of a trace of several; without it the first.")
@click.option("--show", is_flag=True, help="Print the best schedule's table as text as well.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON; unknown values are null.")
def command(
    trace: str | None,
    costs: str | None,
    stages: int | None,
    microbatches: int | None,
    schedules: tuple[str, ...],
    workers: int | None,
    batch: int | None,
    sizes: tuple[int, ...],
    measured_size: int,
    layers: tuple[str, ...],
    rank: int | None,
    show: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Rank pipeline schedules for the model of TRACE (one process, one micro-batch a step) or of --costs.

    Every schedule is cut, simulated and ranked by its step time, those first that fit the capacity.
    """
    from memtrace.pipeline.plan import plan

    _check(workers is not None, stages, microbatches, options["width"], batch, sizes)
    model_layers, model, notes = _costs(trace, costs, layers, rank)
    setting = _setting(model, options)
    recompute = _RECOMPUTE[options["recompute"]]
    if workers is not None:
        with working(f"searching pipelines over {workers} workers"):
            found = _search(
                model_layers,
                workers,
                batch,
                sizes or (measured_size,),
                measured_size,
                schedules,
                recompute,
                setting,
            )
        if as_json:
            print_json({"configurations": [one.as_dict() for one in found], "notes": notes})
        else:
            _print_notes(notes)
            _print_configurations(found)
        return
    if stages is None or microbatches is None:
        raise MemtraceError("give --stages and --microbatches, or --workers and --batch to search for them")
    chosen = _choices(schedules, stages, microbatches)
    with working(f"cutting and simulating {len(chosen)} schedules"):
        result = plan(model_layers, stages, microbatches, choices=chosen, recompute=recompute, setting=setting)
    if not result.predictions:
        reasons = dict.fromkeys(reason for _, reason in result.skipped)
        raise MemtraceError("; ".join(reasons))
    if as_json:
        print_json({**result.as_dict(), "notes": notes})
        return
    _print_notes(notes)
    _print_stages(result)
    _print_schedules(result, setting.capacity_bytes)
    if show:
        console().print("\n" + escape(str(result.predictions[0].schedule)), soft_wrap=True)


def _check(
    searching: bool, stages: int | None, microbatches: int | None, width: int, batch: int | None, sizes: tuple[int, ...]
) -> None:
    """What belongs to the search alone, or is searched for, is not given beside the other."""
    if searching and (stages or microbatches or width > 1):
        raise MemtraceError("--workers searches for --stages, --microbatches and --width: give it without them")
    if not searching and (batch or sizes):
        raise MemtraceError("--batch and --microbatch-size belong to --workers")


def _costs(
    trace: str | None, costs: str | None, patterns: tuple[str, ...], rank: int | None
) -> tuple[list[Layer], MemoryModel, tuple[str, ...]]:
    from memtrace.pipeline.costs import read_layers
    from memtrace.pipeline.simulation.memory import PAPER

    if (trace is None) == (costs is None):
        raise MemtraceError("give a trace, or --costs with a JSON list of layers; one of them")
    if costs is not None:
        if patterns or rank is not None:
            raise MemtraceError("--layer and --rank choose from a trace, not from --costs")
        return read_layers(costs), PAPER, ()
    from memtrace.pipeline.from_trace import trace_costs
    from memtrace.trace import load

    assert trace is not None
    opened = load(trace)
    measured = trace_costs(opened.rank(opened.ranks[0] if rank is None else rank), patterns)
    return measured.layers, measured.model, measured.notes


def _setting(model: MemoryModel, options: dict[str, Any]) -> Setting:
    from memtrace.pipeline.costs import Network
    from memtrace.pipeline.plan import Setting

    bandwidth = options["bandwidth"]
    return Setting(
        network=Network(latency_s=options["latency"], seconds_per_byte=0.0 if bandwidth is None else 1 / bandwidth),
        capacity_bytes=options["capacity"],
        width=options["width"],
        sync=options["sync"],
        overlap=options["overlap"],
        objective=options["cut"],
        model=model,
    )


def _choices(schedules: Iterable[str], stages: int, microbatches: int) -> list[Choice]:
    from memtrace.pipeline.schedules.registry import all_choices, parse_choice

    chosen: list[Choice] = []
    for text in schedules:
        chosen += all_choices(stages, microbatches) if text.lower() == "all" else [parse_choice(text)]
    return chosen


def _search(
    layers: list[Layer],
    workers: int,
    batch: int | None,
    sizes: tuple[int, ...],
    measured_size: int,
    schedules: tuple[str, ...],
    recompute: tuple[bool, ...],
    setting: Setting,
) -> list[Configuration]:
    from memtrace.pipeline.search import search

    if batch is None:
        raise MemtraceError("--workers needs --batch: the samples of one step over all workers")
    return search(
        layers,
        workers,
        batch,
        choices=lambda stages, microbatches: _choices(schedules, stages, microbatches),
        microbatch_sizes=sizes,
        measured_size=measured_size,
        recompute=recompute,
        setting=setting,
    )


def _seconds(value: float) -> str:
    return format_duration(round(value * 1e9))


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        console().print(f"note: {escape(note)}")


def _print_stages(result: Plan) -> None:
    table = plain_table("stage", "layers", "forward", "backward", "parameters", "state", "activations", "from to")
    for stage in result.as_dict()["stages"]:
        state = stage["parameter_bytes"] + stage["gradient_bytes"] + stage["optimizer_bytes"]
        table.add_row(
            str(stage["stage"]),
            str(stage["num_layers"]),
            _seconds(stage["forward_s"]),
            _seconds(stage["backward_s"]),
            format_bytes(stage["parameter_bytes"]),
            format_bytes(state),
            format_bytes(stage["activation_bytes"]),
            escape(f"{stage['layers'][0]} to {stage['layers'][-1]}"),
        )
    assert result.typical is not None
    out = console()
    out.print(f"[bold]cut for {escape(_named(result.typical))}[/], of one micro-batch")
    out.print(table)


def _named(prediction: Prediction) -> str:
    return f"{prediction.choice}{' with recomputation' if prediction.recompute else ''}"


def _print_schedules(result: Plan, capacity: int | None) -> None:
    table = plain_table("schedule", "step", "bubbles", "fullest", "emptiest", "fits", "in flight on each worker")
    for one in result.predictions[:_SHOWN]:
        peaks = [memory.peak_bytes for memory in one.memories]
        table.add_row(
            escape(_named(one)) + ("  (async)" if one.schedule.asynchronous else ""),
            _seconds(one.step_time_s),
            format_share(one.bubble_ratio, 1),
            format_bytes(max(peaks)),
            format_bytes(min(peaks)),
            _fits(one),
            " ".join(str(memory.in_flight_peak) for memory in one.memories),
        )
    out = console()
    limit = "" if capacity is None else f", {format_bytes(capacity)} a worker"
    out.print(f"\n[bold]schedules by step time{limit}[/]")
    out.print(table)
    if len(result.predictions) > _SHOWN:
        out.print(f"and {len(result.predictions) - _SHOWN} slower ones; --json has them all")
    for note in _notes(result.predictions[:_SHOWN]):
        out.print(escape(note), style="dim")
    for choice, reason in result.skipped:
        out.print(f"left out: {escape(str(choice))}: {escape(reason)}", style="dim")


def _fits(prediction: Prediction) -> str:
    """No only where no cut at all fits."""
    if prediction.fits:
        return "yes"
    return "no" if prediction.cut.exact else "not found"


def _notes(shown: Sequence[Prediction]) -> list[str]:
    """What the figures of some schedules rest on."""
    notes = []
    free = dict.fromkeys(_named(one) for one in shown if one.choice.family.free_running)
    if free:
        notes.append(f"{', '.join(free)}: each worker begins its next step when its own work is done")
    inexact = dict.fromkeys(_named(one) for one in shown if not one.cut.exact)
    if inexact:
        notes.append(f"{', '.join(inexact)}: several stages share a worker and cuts are too many to try all; another "
                     "may be better")  # fmt: skip
    return notes


def _print_configurations(found: list[Configuration]) -> None:
    table = plain_table("schedule", "width", "stages", "micro-batch", "step", "samples/s", "fullest", "fits")
    for one in found[:_SHOWN]:
        table.add_row(
            escape(_named(one.prediction)),
            str(one.width),
            str(one.depth),
            f"{one.num_microbatches} x {one.microbatch_size}",
            _seconds(one.prediction.step_time_s),
            f"{one.samples_per_s:,.1f}",
            format_bytes(one.prediction.peak_bytes),
            _fits(one.prediction),
        )
    console().print(table)
    for note in _notes([one.prediction for one in found[:_SHOWN]]):
        console().print(escape(note), style="dim")
