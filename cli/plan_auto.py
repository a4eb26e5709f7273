"""``memtrace plan auto``: mixes changes so that a step fits a capacity at the least added time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import click
from memtrace.cli.bandwidths import takes_bandwidths
from memtrace.cli.output import escape, plain_table, print_json
from memtrace.cli.plan_output import PlanRequest, makes_plan, show_plan
from memtrace.cli.quantities import BYTES

from memtrace.planning.auto import LINK_BYTES_PER_S, AutoPlan
from memtrace.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.analysis.bandwidth import CopyBandwidths
    from memtrace.planning.auto import AutoOption
    from memtrace.planning.plan import Plan
    from memtrace.trace import Trace

RESULT: Final = AutoPlan


@click.command("auto")
@makes_plan
@click.option("--capacity", type=BYTES, help="Memory of the device for the process, e.g. 16GiB; default: no limit, and "
              "the plan is the one of the lowest peak.")  # fmt: skip
@click.option("--device", help="Device to plan for; default: the first GPU, or cpu.")
@click.option("--ranks", "num_ranks", type=click.IntRange(min=1), metavar="N",
              help="Data-parallel ranks that can share optimizer state; default: those of the recording.")  # fmt: skip
@click.option("--link", type=BYTES, default=int(LINK_BYTES_PER_S), metavar="BYTES",
              help="Bandwidth between ranks in bytes per second, e.g. 25GB; default: 10GB.")  # fmt: skip
@takes_bandwidths
@click.option("--amp", metavar="TYPE",
              help="Also consider forward under torch.autocast, bf16 or fp16. This changes losses.")  # fmt: skip
@click.option("--apply-only", is_flag=True, help="Consider only changes that memtrace.apply carries out.")
def command(
    request: PlanRequest,
    capacity: int | None,
    device: str | None,
    num_ranks: int | None,
    link: int,
    amp: str | None,
    apply_only: bool,
    bandwidths: CopyBandwidths | None,
) -> None:
    """Mix changes so that a step fits a capacity.

    Considers recomputation, the optimizer in backward, sharded optimizer state and allocator settings, and prints the
    Pareto front of peak and step time. Changes that memtrace.apply does not carry out come with the lines to add to the
    program. With --prove only those that it does carry out are considered. Offloads to host memory, alone and beside
    recomputation, are considered if --bandwidth, --card, or --d2h and --h2d are given; half precision with --amp.

    \b
    Examples:
      memtrace plan auto run.memtrace --capacity 16GiB -o plan.json
      memtrace plan auto run.memtrace --capacity 16GiB --ranks 8 --link 25GB
      memtrace plan auto run.memtrace --capacity 16GiB --card A100 --amp bf16
    """
    from memtrace.planning.auto import plan_auto
    from memtrace.planning.whatif_changes import parse_half_precision

    autocast_to = None if amp is None else parse_half_precision(amp)
    results: list[AutoPlan] = []

    def make_plan(trace: Trace) -> Plan:
        result = plan_auto(
            trace,
            device,
            capacity_bytes=capacity,
            num_ranks=num_ranks,
            link_bytes_per_s=float(link),
            only_applicable=apply_only or bool(request.program),
            bandwidths=bandwidths,
            autocast_to=autocast_to,
        )
        results.append(result)
        return result.plan

    if request.as_json and not request.program:
        plan = make_plan(request.selection.open_rank())
        if request.output is not None:
            from memtrace.planning.plan import write_plan

            write_plan(plan, request.output)
        print_json(results[-1])
        return
    show_plan(request, make_plan, lambda out, _: _print_details(out, results[-1]))


def _print_details(out: Console, result: AutoPlan) -> None:
    if result.capacity_bytes is not None:
        unused = f" less {format_bytes(result.unused_bytes)} unused by the allocator" if result.unused_bytes else ""
        verdict = "The plan fits" if result.fits else "[bold]No plan fits[/]; this is the one of the lowest peak. It"
        exceeds = "" if result.fits else " exceeds"
        out.print(f"{verdict}{exceeds} the capacity of {format_bytes(result.capacity_bytes)}{unused}.")
    for change in result.changes:
        out.print(f"\n[bold]To do: {escape(change.name)}[/]")
        for line in change.instruction.splitlines():
            out.print(escape(line), soft_wrap=True)
    out.print("\n[bold]Pareto front[/]: no other plan has a lower peak and a shorter step")
    out.print(_front_table(result))


def _front_table(result: AutoPlan) -> Any:
    has_capacity = result.capacity_bytes is not None
    table = plain_table("Peak", "Step time", *(("Fits",) if has_capacity else ()), "Changes")
    for option in result.front:
        fits = ("yes" if option.fits else "no",) if has_capacity else ()
        names = ", ".join((*_summaries(option), *option.changes)) or "none"
        table.add_row(format_bytes(option.peak_bytes), format_duration(option.step_ns), *fits, escape(names))
    return table


def _summaries(option: AutoOption) -> Iterator[str]:
    """Yield a few words for the actions of each kind."""
    modules = {name for action in option.actions if action.kind == "recompute" for name in action.module_names()}
    if modules:
        yield f"{format_count(len(modules), 'module')} recomputed"
    for action in option.actions:
        if action.kind == "offload":
            size = format_bytes(sum(tensor.bytes for tensor in action.tensors))
            yield f"{format_count(len(action.tensors), 'tensor')} ({size}) offloaded"
