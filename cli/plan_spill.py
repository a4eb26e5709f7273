"""``memtrace plan spill``: shards of a model that fit a budget, and schedules of several models on several devices."""

from __future__ import annotations

import string
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from memtrace.cli.arguments import Selection
from memtrace.cli.bandwidths import bandwidths_here, takes_bandwidths
from memtrace.cli.output import console, escape, plain_table, print_json, working
from memtrace.cli.plan_output import PlanRequest, makes_plan, show_plan
from memtrace.cli.quantities import BYTES, ByteSize

from memtrace.planning.multi_model_report import MultiModelReport
from memtrace.planning.plan import Plan
from memtrace.units import format_bytes, format_count, format_duration, format_share

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.analysis.bandwidth import CopyBandwidths
    from memtrace.planning.spill import SpillPlan
    from memtrace.trace import Trace

RESULT: Final = Plan | MultiModelReport
MAX_SHARDS: Final = 20
"""Shards that the table lists."""
TIMELINE_CELLS: Final = 66
_LETTERS: Final = string.ascii_uppercase + string.ascii_lowercase + string.digits + "+-"


class _BufferSize(ByteSize):
    """A size, or a share of the budget such as ``5%``."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return bytes as int, a share as float."""
        text = str(value).strip()
        if isinstance(value, str) and text.endswith("%"):
            try:
                share = float(text[:-1]) / 100
            except ValueError:
                share = -1.0
            if not 0 <= share < 1:
                self.fail(f"invalid share {value!r}: write 5% or a size such as 256MiB", param, ctx)
            return share
        return value if isinstance(value, float) else super().convert(value, param, ctx)


@click.command("spill")
@makes_plan
@click.option("--budget", type=BYTES, required=True, help="Highest peak allowed on the device, e.g. 2GiB.")
@click.option("--buffer", type=_BufferSize(allow_zero=True), metavar="SIZE|SHARE",
              help="Part of the budget for double buffering, e.g. 5%; 0: none; default: what gives the shortest "
                   "step.")  # fmt: skip
@click.option("--layer", "layers", multiple=True, metavar="PATTERN",
              help="Modules that are layers (e.g. 'blocks.*'); repeatable; default: the repeated blocks.")  # fmt: skip
@click.option("--no-recompute", is_flag=True, help="Keep activations on the device instead of repeating forwards.")
@click.option("--device", help="Device to plan for; default: the first GPU, or cpu.")
@takes_bandwidths
@click.option("--devices", type=click.IntRange(min=1), metavar="K",
              help="Schedule the models of several TRACEs on K devices and compare policies.")  # fmt: skip
@click.option("--minibatches", type=click.IntRange(min=1), default=100, metavar="N",
              help="With --devices: mini-batches that each model is trained on; default: 100.")  # fmt: skip
def command(
    request: PlanRequest,
    budget: int,
    buffer: int | float | None,
    layers: tuple[str, ...],
    no_recompute: bool,
    device: str | None,
    bandwidths: CopyBandwidths | None,
    devices: int | None,
    minibatches: int,
) -> None:
    """Cut the model into shards that fit a memory budget.

    Only the shard that computes is in device memory: its parameters, gradients and optimizer state. The others wait in
    host memory. Shards are as long as the recorded memory of their layers allows. Bandwidths are measured on this
    machine for the CPU, and those of a TITAN Xp (6.4 GB/s) for a GPU, unless they are given.

    With --devices, every TRACE is a model: shards of all of them are scheduled on K devices by Sharded-LRTF, which is
    compared with task parallelism, model parallelism, random order and, for few shards, the optimum.

    \b
    Examples:
      memtrace plan spill run.memtrace --budget 2GiB -o plan.json
      memtrace plan spill --budget 2GiB --prove "train.py --epochs 1"
      memtrace plan spill one.memtrace two.memtrace --budget 8GiB --devices 4
    """
    from memtrace.planning.spill import plan_spill

    def plan(trace: Trace) -> SpillPlan:
        buffer_bytes = int(buffer * budget) if isinstance(buffer, float) else buffer
        chosen = device or next((name for name in trace.devices if name != "cpu"), "cpu")
        return plan_spill(
            trace,
            chosen,
            budget_bytes=budget,
            buffer_bytes=buffer_bytes,
            bandwidths=bandwidths or bandwidths_here(chosen),
            layers=layers,
            recompute=not no_recompute,
        )

    if devices is not None:
        _schedule(request, plan, devices, minibatches)
        return
    results: list[SpillPlan] = []

    def make_plan(trace: Trace) -> Plan:
        results.append(plan(trace))
        return results[-1].plan

    show_plan(request, make_plan, lambda out, _: _print_shards(out, results[-1]))


def _print_shards(out: Console, result: SpillPlan) -> None:
    table = plain_table("Shard", "Layers", "State", "Input", "Forward", "Backward", "Update", "First layer")
    for number, shard in enumerate(result.shards[:MAX_SHARDS]):
        table.add_row(
            str(number),
            str(len(shard.layers)),
            format_bytes(shard.state_bytes),
            format_bytes(shard.input_bytes),
            format_bytes(shard.forward_peak_bytes),
            format_bytes(shard.backward_peak_bytes),
            format_bytes(shard.update_peak_bytes),
            escape(shard.layers[0]),
        )
    out.print()
    out.print(table)
    if len(result.shards) > MAX_SHARDS:
        out.print(f"{format_count(len(result.shards) - MAX_SHARDS, 'more shard')}; --json lists all of them.")
    out.print(
        "State: parameters, gradients, optimizer state. Forward, backward, update: peaks of the shard.", style="dim"
    )
    ratio = result.state_bytes / result.budget_bytes
    out.print(
        f"State of the model: {format_bytes(result.state_bytes)}, {ratio:.1f} times the budget of "
        f"{format_bytes(result.budget_bytes)}, of which the buffer takes {format_bytes(result.buffer_bytes)}."
    )
    if result.unbuffered_step_ns is not None and result.buffer_bytes:
        out.print(
            f"Without double buffering a step of these shards takes {format_duration(result.unbuffered_step_ns)}."
        )


def _schedule(request: PlanRequest, plan: Any, devices: int, minibatches: int) -> None:
    from memtrace.planning.multi_model_report import compare_schedules

    if request.program or request.output is not None:
        raise click.UsageError("--devices compares schedules: it cannot be combined with --prove and --output.")
    paths = request.selection.paths
    names = [_model_name(path) for path in paths]
    plans = [plan(Selection((path,), request.selection.rank).open_rank()) for path in paths]
    with working(f"scheduling {format_count(len(plans), 'model')}"):
        report = compare_schedules(names, plans, devices, num_minibatches=minibatches, num_cells=TIMELINE_CELLS)
    if request.as_json:
        print_json(report)
        return
    _print_schedules(console(), report)


def _model_name(path: str) -> str:
    return Path(path.rstrip("/")).stem


def _print_schedules(out: Console, report: MultiModelReport) -> None:
    models = plain_table("", "Model", "Shards", "Peak", "Computes", "Copies")
    for place, model in enumerate(report.models):
        models.add_row(
            _letter(place),
            escape(model.name),
            str(model.num_shards),
            format_bytes(model.peak_bytes),
            format_duration(model.minibatch_s * 1e9),
            format_duration(model.copy_s * 1e9),
        )
    out.print(f"[bold]Models[/] (times of one mini-batch, {report.num_minibatches:,} mini-batches each)")
    out.print(models)
    table = plain_table("Schedule", "Makespan", "Of Sharded-LRTF", "Devices busy", "")
    first = report.policies[0].makespan_s
    for policy in report.policies:
        gap = "" if policy.gap is None else "optimal" if policy.gap < 1e-6 else f"gap {format_share(policy.gap)}"
        table.add_row(
            policy.policy,
            format_duration(policy.makespan_s * 1e9),
            f"{policy.makespan_s / first:.2f} x",
            format_share(policy.utilization),
            gap,
        )
    out.print(f"\n[bold]Schedules on {format_count(report.num_devices, 'device')}[/]")
    out.print(table)
    out.print(f"No schedule is shorter than {format_duration(report.lower_bound_s * 1e9)}.", style="dim")
    out.print(f"\n[bold]Devices over time under {report.policies[0].policy}[/]")
    for number, row in enumerate(report.timeline):
        out.print(f"{number:>4}  {''.join(map(_letter, row))}", markup=False)
    out.print("A letter is the model that computes most in an interval; a dot: the device waits.", style="dim")
    for note in report.notes:
        out.print(escape(f"Note: {note}"), style="dim")


def _letter(model: int) -> str:
    return "." if model < 0 else _LETTERS[model % len(_LETTERS)]
