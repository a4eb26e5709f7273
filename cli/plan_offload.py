"""``memtrace plan offload``: chooses saved tensors that wait in host memory between forward and backward."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click
from memtrace.cli.bandwidths import bandwidths_here, takes_bandwidths
from memtrace.cli.output import escape, plain_table
from memtrace.cli.plan_output import PlanRequest, makes_plan, show_plan
from memtrace.cli.quantities import BYTES

from memtrace.planning.actions import Offload
from memtrace.planning.plan import Plan
from memtrace.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.analysis.bandwidth import CopyBandwidths
    from memtrace.trace import Trace

RESULT: Final = Plan
MAX_ROWS: Final = 20
"""Tensors that the table lists."""


@click.command("offload")
@makes_plan
@click.option("--target-peak", type=BYTES, metavar="SIZE",
              help="Highest peak allowed, e.g. 2GiB; default: the lowest that offloading can reach.")  # fmt: skip
@click.option("--device", help="Device to plan for; default: the first GPU, or cpu.")
@takes_bandwidths
def command(
    request: PlanRequest, target_peak: int | None, device: str | None, bandwidths: CopyBandwidths | None
) -> None:
    """Choose saved tensors that wait in host memory until backward.

    An offload copies tensors that autograd saves in forward to host memory, and back before backward reads them. The
    command finds the tensors that bring the peak below --target-peak at the least added time, with one copy at a time
    in each direction. Bandwidths are measured on this machine unless options give them.

    \b
    Examples:
      memtrace plan offload run.memtrace --target-peak 2GiB -o plan.json
      memtrace plan offload --target-peak 2GiB --prove "train.py --epochs 1"
    """
    from memtrace.planning.offload import plan_offload
    from memtrace.planning.recorded_step import main_device

    def make_plan(trace: Trace) -> Plan:
        place = device or main_device(trace)
        costs = bandwidths or bandwidths_here(place)
        return plan_offload(trace, device=place, bandwidths=costs, target_bytes=target_peak)

    show_plan(request, make_plan, _print_tensors)


def _print_tensors(out: Console, plan: Plan) -> None:
    tensors = [tensor for action in plan.actions if isinstance(action, Offload) for tensor in action.tensors]
    if not tensors:
        return
    table: Any = plain_table("Module", "Tensor", "Size", "Forward waits", "Copy back begins")
    for tensor in tensors[:MAX_ROWS]:
        wait = "no" if tensor.wait_nodes is None else f"after {tensor.wait_nodes:,} nodes"
        back = "when read" if tensor.prefetch_nodes == 0 else f"{tensor.prefetch_nodes:,} nodes before"
        table.add_row(escape(tensor.module or "(no module)"), str(tensor.index), format_bytes(tensor.bytes), wait, back)
    out.print()
    out.print(table)
    if len(tensors) > MAX_ROWS:
        out.print(f"{len(tensors) - MAX_ROWS:,} more tensors; --json lists all of them.", style="dim")
