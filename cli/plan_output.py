"""What the commands share that make a plan: their options, the printed plan, and the proof by a second run."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from memtrace.cli.arguments import Selection
from memtrace.cli.output import console, escape, plain_table, print_confirmation, print_json, working
from memtrace.cli.paths import PathOrUrl

from memtrace.format.storage import AnyPath
from memtrace.units import format_bytes, format_count, format_duration, format_share

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.execution.prove import Proof
    from memtrace.planning.plan import Plan, StepCost
    from memtrace.trace import Trace


@dataclass(frozen=True)
class PlanRequest:
    """Where a plan comes from and where it goes."""

    selection: Selection
    output: AnyPath | None
    """File of the plan; None: not written."""
    program: tuple[str, ...]
    """Script and arguments of the program that proves the plan; empty: no proof."""
    as_json: bool


def makes_plan(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a command: TRACE, -o, --prove and --json, passed as one ``PlanRequest`` named ``request``."""

    @click.argument("traces", metavar="[TRACE...]", nargs=-1, type=click.Path())
    @click.option("--rank", type=int, help="Rank to plan for, for traces of several ranks.")
    @click.option("-o", "--output", type=PathOrUrl(), metavar="PLAN.json",
                  help="Write the plan, for memtrace.apply and memtrace record --apply.")  # fmt: skip
    @click.option("--prove", metavar="'PROGRAM ARGS'",
                  help="Instead of reading TRACE: record this program, apply the plan, record it again.")  # fmt: skip
    @click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON; unknown values are null.")
    @wraps(command)
    def with_request(
        traces: tuple[str, ...],
        rank: int | None,
        output: AnyPath | None,
        prove: str | None,
        as_json: bool,
        **options: Any,
    ) -> Any:
        if bool(traces) == (prove is not None):
            raise click.UsageError("pass a TRACE, or --prove with the program to record.")
        request = PlanRequest(Selection(traces, rank), output, tuple(shlex.split(prove or "")), as_json)
        return command(request=request, **options)

    return with_request


def show_plan(
    request: PlanRequest,
    make_plan: Callable[[Trace], Plan],
    print_details: Callable[[Console, Plan], None] | None = None,
) -> None:
    """Make a plan, write it, prove it and print it, as the request asks.

    Args:
        request: The options of the command.
        make_plan: Makes the plan from a trace.
        print_details: Prints what only this kind of plan has, between the costs and the assumptions.
    """
    from memtrace.planning.plan import write_plan

    proof = _prove(request.program, make_plan) if request.program else None
    plan = proof.plan if proof is not None else make_plan(request.selection.open_rank())
    if request.output is not None:
        write_plan(plan, request.output)
    if request.as_json:
        print_json(plan if proof is None else proof)
        return
    print_plan(plan, proof, print_details)
    if request.output is not None:
        print_confirmation(f"Wrote {request.output}. Next: memtrace record --apply {request.output} train.py")


def _prove(program: tuple[str, ...], make_plan: Callable[[Trace], Plan]) -> Proof:
    from memtrace.execution.prove import prove_plan

    with tempfile.TemporaryDirectory(prefix="memtrace-") as folder, working(f"running {' '.join(program)} twice"):
        return prove_plan(program, make_plan, Path(folder))


def print_plan(
    plan: Plan, proof: Proof | None = None, print_details: Callable[[Console, Plan], None] | None = None
) -> None:
    """Print a plan: its actions, the recorded, predicted and (with a proof) measured cost, and its assumptions."""
    out = console()
    out.print(f"[bold]Plan for {escape(plan.device)}[/]")
    for action in plan.actions:
        out.print(escape(action.describe()))
    if not plan.actions:
        out.print("Nothing has to be changed.")
    out.print()
    out.print(_cost_table(plan, proof))
    if proof is not None:
        out.print(_losses_sentence(proof))
    if print_details is not None:
        print_details(out, plan)
    for assumption in plan.assumptions:
        out.print(escape(f"Note: {assumption}"), style="dim")


def _cost_table(plan: Plan, proof: Proof | None) -> Any:
    table = plain_table("", "Peak", "Step time", "")
    for name, cost in (("Recorded", plan.recorded), ("Predicted", plan.predicted)):
        table.add_row(name, *_cost_cells(cost), _change(cost, plan.recorded) if cost is plan.predicted else "")
    if proof is not None:
        table.add_row("Measured", *_cost_cells(proof.measured), _change(proof.measured, plan.recorded))
        table.add_row("Error", _signed_share(proof.peak_error), _signed_share(proof.step_error), "")
    return table


def _cost_cells(cost: StepCost) -> tuple[str, str]:
    return format_bytes(cost.peak_bytes), format_duration(cost.step_ns)


def _change(cost: StepCost, recorded: StepCost) -> str:
    saved = recorded.peak_bytes - cost.peak_bytes
    sentence = f"{format_bytes(abs(saved))} {'less' if saved >= 0 else 'more'}"
    if cost.step_ns is not None and recorded.step_ns:
        sentence += f", {_signed_share(cost.step_ns / recorded.step_ns - 1)} time"
    return sentence


def _signed_share(share: float | None) -> str:
    if share is None:
        return format_share(None)
    return f"{'+' if share >= 0 else '-'}{format_share(abs(share))}"


def _losses_sentence(proof: Proof) -> str:
    if proof.num_losses == 0:
        return "The program called backward on no scalar, so that no losses can be compared."
    losses = format_count(proof.num_losses, "loss", "losses")
    if proof.num_equal_losses == proof.num_losses:
        return f"Losses: {losses}, equal to those of the first run bit by bit."
    return (
        f"Losses: only {proof.num_equal_losses:,} of {losses} equal those of the first run bit by bit. Two runs can be "
        "compared only if the program sets its random seeds."
    )
