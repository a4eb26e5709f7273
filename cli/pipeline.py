"""``memtrace pipeline``: the stages of a recorded pipeline, and what one process predicts for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, plain_table, print_json, working
from memtrace.cli.quantities import BYTES
from rich.console import Console

from memtrace.errors import MemtraceError
from memtrace.units import format_bytes, format_duration, format_share

if TYPE_CHECKING:
    from memtrace.pipeline.compare import Comparison
    from memtrace.pipeline.measured import Measured
    from memtrace.pipeline.schedules.schedule import Schedule


@click.command("pipeline")
@selects_traces
@click.option("--capacity", type=BYTES, help="Memory of one worker, such as 16GiB: what is left of it.")
@click.option("--predict", type=click.Path(), metavar="TRACE1",
              help="A trace of one process, the whole model on one micro-batch: predict from it.")  # fmt: skip
@click.option("--schedule", help="With --predict: the schedule that was to run; without it the recorded order.")
@click.option("--cut", help="With --predict: the first layer of every stage, such as 0,4,8,12.")
@click.option("--layer", "layers", multiple=True, help="With --predict: modules that are layers, as patterns.")
@click.option("--show", is_flag=True, help="Print the recorded order of actions as a table as well.")
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON; unknown values are null.")
def command(
    selection: Selection,
    capacity: int | None,
    predict: str | None,
    schedule: str | None,
    cut: str | None,
    layers: tuple[str, ...],
    show: bool,
    as_json: bool,
) -> None:
    """Compare the stages of the pipeline that the ranks of TRACE ran."""
    from memtrace.pipeline.measured import measured
    from memtrace.pipeline.recorded import recorded_schedule

    if predict is None and (schedule or cut or layers):
        raise MemtraceError("--schedule, --cut and --layer are for --predict: give the trace to predict from")
    with working(f"reading {selection.name}"):
        found = measured(selection.open(), capacity)
        against = None if predict is None else _compare(found, predict, schedule, cut, layers)
    if as_json:
        predicted = {} if against is None else {"predicted": against.as_dict()}
        print_json({**found.as_dict(), **predicted})
        return
    out = console()
    _print_stages(out, found)
    _print_workers(out, found, against)
    if show:
        out.print("\n" + str(recorded_schedule(found.ranks)), soft_wrap=True, markup=False)


def _compare(
    found: Measured, predict: str, schedule: str | None, cut: str | None, layers: tuple[str, ...]
) -> Comparison:
    from memtrace.pipeline.compare import compare
    from memtrace.pipeline.from_trace import trace_costs
    from memtrace.trace import load

    opened = load(predict)
    costs = trace_costs(opened.rank(opened.ranks[0]), layers)
    return compare(found, costs, _schedule(found, schedule), _first_layers(cut))


def _schedule(found: Measured, text: str | None) -> Schedule | None:
    from memtrace.pipeline.recorded import one_pipeline, recorded_schedule
    from memtrace.pipeline.schedules.registry import parse_choice

    if text is None:
        return None
    microbatches = recorded_schedule(found.ranks).num_microbatches
    return parse_choice(text).build(len(one_pipeline(found.ranks)), microbatches)


def _first_layers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise MemtraceError(f"--cut {text}: give the number of the first layer of every stage, such as 0,4,8,12")
    return [int(part) for part in parts]


def _print_stages(out: Console, found: Measured) -> None:
    table = plain_table("stage", "rank", "parameters", "gradients", "optimizer", "activations", "in flight", "forward",
                        "backward")  # fmt: skip
    for one in sorted(found.stages, key=lambda stage: (stage.pipeline, stage.stage)):
        name = f"{one.stage} of pipeline {one.pipeline}" if one.pipeline else str(one.stage)
        table.add_row(name, str(one.rank), format_bytes(one.parameter_bytes), format_bytes(one.gradient_bytes),
                      format_bytes(one.optimizer_bytes), format_bytes(one.activation_bytes), str(one.in_flight_peak),
                      format_duration(one.forward_ns), format_duration(one.backward_ns))  # fmt: skip
    ran = f"torch's {found.torch_schedule}" if found.torch_schedule else "marked by the program"
    out.print(f"[bold]stages[/] ({ran}); activations and times of one micro-batch")
    out.print(table)


def _print_workers(out: Console, found: Measured, against: Comparison | None) -> None:
    predicted = {} if against is None else {one.rank: one for one in against.workers}
    with_capacity = any(worker.headroom_bytes is not None for worker in found.workers)
    headers = ["rank", "stages", "peak", *(["headroom"] if with_capacity else [])]
    headers += ["predicted", "error", "in flight (predicted)"] if predicted else ["in flight"]
    table = plain_table(*headers, "bubbles")
    for worker in found.workers:
        cells = [str(worker.rank), " ".join(map(str, worker.stages)), format_bytes(worker.peak_bytes)]
        cells += [format_bytes(worker.headroom_bytes)] if with_capacity else []
        one = predicted.get(worker.rank)
        if one is None:
            cells.append(str(worker.in_flight_peak))
        else:
            cells += [format_bytes(one.predicted_peak_bytes), f"{100 * one.error:+.1f} %",
                      f"{worker.in_flight_peak} ({one.predicted_in_flight})"]  # fmt: skip
        table.add_row(*cells, format_share(worker.bubble_share, 1))
    out.print("\n[bold]workers[/]; bubbles are the idle share of one step")
    out.print(table)
    out.print(f"\nimbalance (highest peak over the mean): {found.imbalance:.2f}")
    if found.missing:
        out.print(f"[bold]missing[/]: rank {', '.join(map(str, found.missing))} of the job is not in the trace")
