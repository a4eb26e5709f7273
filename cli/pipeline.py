"""``memtrace pipeline``: stages and workers of a recorded pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.feedback import FEEDBACK
from memtrace.cli.output import console, plain_table, print_json, working
from memtrace.cli.quantities import BYTES
from memtrace.cli.workers import Workers, takes_workers

from memtrace.errors import MemtraceError
from memtrace.pipeline.prediction import PipelineComparison, PipelineReport, predict_recorded_pipeline
from memtrace.units import UNKNOWN, format_bytes, format_duration, format_share

if TYPE_CHECKING:
    from memtrace.cli.tables import PlainTable
    from rich.console import Console

    from memtrace.engine import Engine
    from memtrace.pipeline.layer_costs import MeasuredLayers
    from memtrace.pipeline.measured import MeasuredPipeline
    from memtrace.pipeline.measured_stages import MeasuredStage
    from memtrace.pipeline.schedules.schedule import Schedule
    from memtrace.trace import Trace

RESULT: Final = PipelineReport


@click.command("pipeline")
@selects_traces
@takes_workers
@click.option("--capacity", type=BYTES, help="Memory of one worker (e.g. 16GiB); shows the headroom.")
@click.option("--predict", type=click.Path(), metavar="TRACE",
              help="Trace of one process that trained the whole model, one micro-batch per step; compares the peaks "
                   "predicted from it.")  # fmt: skip
@click.option("--schedule", metavar="NAME[:OPTIONS]",
              help="With --predict: simulate this schedule (e.g. 1f1b); default: the recorded order.")  # fmt: skip
@click.option("--partition", metavar="LAYER,...",
              help="With --predict: first layer of every stage (e.g. 0,4,8,12); default: inferred from the parameters "
                   "of the stages.")  # fmt: skip
@click.option("--layer", "layers", multiple=True, metavar="PATTERN",
              help="With --predict: modules that are layers (e.g. 'blocks.*'); repeatable; default: the repeated "
                   "blocks of the model.")  # fmt: skip
@click.option("--show-schedule", is_flag=True, help="Also print the recorded order of actions.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables; unknown values are null.")
def command(
    selection: Selection,
    workers: Workers,
    capacity: int | None,
    predict: str | None,
    schedule: str | None,
    partition: str | None,
    layers: tuple[str, ...],
    show_schedule: bool,
    as_json: bool,
) -> None:
    """Show memory, micro-batches in flight and bubbles of a recorded pipeline.

    TRACE contains the ranks of a pipeline-parallel job. Actions of torch.distributed.pipelining are recorded
    automatically; other programs mark them with rec.stage(...) and rec.microbatch(...).

    \b
    Example:
      memtrace pipeline job.memtrace --capacity 16GiB
    """
    from memtrace.pipeline.measured import analyze_pipeline, measure_pipeline
    from memtrace.pipeline.recorded_versions import recorded_schedule_with_updates

    if predict is None and (schedule or partition or layers):
        raise MemtraceError("--schedule, --partition and --layer need --predict TRACE, the trace to predict from.")
    trace = selection.open()
    with working(f"measuring {selection.name}"), workers.engine(trace, selection.source) as engine:
        trace = analyze_pipeline(trace, engine.analyzer(selection.source))
        measured = measure_pipeline(trace, capacity)
        predicted = None if predict is None else _predict(engine, trace, predict, schedule, partition, layers)
    for left_out in measured.unreadable:
        FEEDBACK.note(f"rank {left_out.rank} is left out: {left_out.reason}")
    if as_json:
        print_json(PipelineReport(measured=measured, predicted=predicted))
        return
    out = console()
    _print_stages(out, measured)
    _print_workers(out, measured, predicted)
    if show_schedule:
        out.print("\n" + str(recorded_schedule_with_updates(trace)), soft_wrap=True, markup=False)


def _predict(
    engine: Engine, trace: Trace, path: str, schedule: str | None, partition: str | None, layers: tuple[str, ...]
) -> PipelineComparison:
    prediction = predict_recorded_pipeline(
        trace,
        measure_layers(engine, path, layers),
        schedule=_build_schedule(trace, schedule),
        first_layers=_parse_partition(partition),
    )
    return prediction.comparison


def measure_layers(engine: Engine, path: str, layers: tuple[str, ...] = ()) -> MeasuredLayers:
    """Return the costs of the layers of a model by the trace of a single process that trains it whole.

    Args:
        engine: where the trace is analyzed.
        path: the trace.
        layers: names of the layers; empty: see ``measure_layer_costs``.
    """
    from memtrace.engine import TraceSource
    from memtrace.pipeline.layer_costs import measure_layer_costs
    from memtrace.trace import load

    trace = load(path)
    number = trace.ranks[0]
    return engine.ask([(trace.rank(number), TraceSource.of((path,), number))], measure_layer_costs, layers)


def _build_schedule(trace: Trace, text: str | None) -> Schedule | None:
    """The schedule named on the command line, for the sizes of the recorded pipeline."""
    from memtrace.pipeline.recorded import first_pipeline, recorded_actions, recorded_schedule
    from memtrace.pipeline.schedules.registry import parse_schedule_choice

    if text is None:
        return None
    ranks = recorded_actions(trace)
    return parse_schedule_choice(text).build(len(first_pipeline(ranks)), recorded_schedule(ranks).num_microbatches)


def _parse_partition(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise MemtraceError(
            f"--partition {text}: invalid partition. Give the index of the first layer of every stage, such as "
            "0,4,8,12."
        )
    return [int(part) for part in parts]


def _print_stages(out: Console, measured: MeasuredPipeline) -> None:
    stages = sorted(measured.stages, key=lambda stage: (stage.pipeline, stage.stage))
    has_pipelines = any(stage.pipeline for stage in stages)
    table = plain_table("stage", "rank", "pipeline" if has_pipelines else "parameters", "model state", "activations",
                        "in flight", "forward", "backward")  # fmt: skip
    for stage in stages:
        table.add_row(
            str(stage.stage),
            str(stage.rank),
            str(stage.pipeline) if has_pipelines else format_bytes(stage.parameter_bytes),
            format_bytes(_state_bytes(stage)),
            format_bytes(stage.activation_bytes),
            str(stage.in_flight_peak),
            format_duration(stage.forward_ns),
            format_duration(stage.backward_ns),
        )
    program = f"torch {measured.torch_schedule}" if measured.torch_schedule else "marked by the program"
    out.print(f"[bold]Pipeline stages[/] ({program})")
    out.print(table)
    out.print(
        "Model state: parameters, gradients and optimizer state. Activations and times are per micro-batch. In flight: "
        "peak number of micro-batches.",
        style="dim",
    )


def _state_bytes(stage: MeasuredStage) -> int | None:
    parts = (stage.parameter_bytes, stage.gradient_bytes, stage.optimizer_bytes)
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _print_workers(out: Console, measured: MeasuredPipeline, predicted: PipelineComparison | None) -> None:
    out.print("\n[bold]Pipeline workers[/]")
    out.print(_worker_table(measured, predicted))
    if any(worker.gradient_sync_ns is not None for worker in measured.workers):
        out.print(
            "Gradient sync: from the launch of all-reduces to the first use of a reduced gradient. Exposed: the part "
            "after the last action of the rank.",
            style="dim",
        )
    imbalance = UNKNOWN if measured.imbalance is None else f"{measured.imbalance:.2f}"
    out.print(f"\nImbalance (highest peak / mean peak): {imbalance}")
    if predicted is not None:
        out.print(f"Largest prediction error: {format_share(predicted.largest_error)} of the measured peak")
        out.print(f"Partition (first layer of each stage): {','.join(map(str, predicted.first_layers))}")
    if measured.missing_ranks:
        missing = ", ".join(map(str, measured.missing_ranks))
        out.print(f"[bold]Missing ranks[/]: {missing} (part of the job, but not analyzed)")


def _worker_table(measured: MeasuredPipeline, predicted: PipelineComparison | None) -> PlainTable:
    comparisons = {} if predicted is None else {worker.rank: worker for worker in predicted.workers}
    has_capacity = any(worker.headroom_bytes is not None for worker in measured.workers)
    headers = ["rank", "stages", "peak", *(["headroom"] if has_capacity else [])]
    headers += ["predicted", "of measured"] if comparisons else []
    has_versions = any((worker.weight_versions or 0) > 1 for worker in measured.workers)
    headers += ["weight versions"] if has_versions else []
    has_sync = any(worker.gradient_sync_ns is not None for worker in measured.workers)
    table = plain_table(*headers, "in flight", "bubbles", *(["gradient sync", "exposed"] if has_sync else []))
    for worker in measured.workers:
        cells = [str(worker.rank), " ".join(map(str, worker.stages)), format_bytes(worker.peak_bytes)]
        cells += [format_bytes(worker.headroom_bytes)] if has_capacity else []
        comparison = comparisons.get(worker.rank)
        versions = [str(worker.weight_versions or UNKNOWN)] if has_versions else []
        in_flight = str(worker.in_flight_peak)
        if comparison is not None:
            share = format_share(comparison.predicted_peak_bytes, worker.peak_bytes)
            cells += [format_bytes(comparison.predicted_peak_bytes), share]
            if comparison.predicted_in_flight != worker.in_flight_peak:
                in_flight += f" (predicted {comparison.predicted_in_flight})"
        sync = [format_duration(worker.gradient_sync_ns), format_duration(worker.exposed_sync_ns)] if has_sync else []
        table.add_row(*cells, *versions, in_flight, format_share(worker.bubble_ratio), *sync)
    return table
