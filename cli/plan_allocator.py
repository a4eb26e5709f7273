"""`memtrace plan allocator`: would another setting have saved memory, or avoided an out-of-memory?"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from memtrace.cli.quantities import BYTES, gib, mib

if TYPE_CHECKING:
    from rich.table import Table

    from memtrace.planning.allocator.plan import DevicePlan
    from memtrace.planning.allocator.settings import Settings
    from memtrace.planning.allocator.what_if import Prediction

PIPE_WIDTH = 160


@click.command(name="allocator")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--setting",
    "settings",
    multiple=True,
    metavar="KEY:VALUE[,...]",
    help="A setting to try, as PYTORCH_CUDA_ALLOC_CONF takes it. Repeat for more.",
)
@click.option("--sweep", is_flag=True, help="Try the usual settings (also what happens without --setting).")
@click.option(
    "--capacity",
    type=BYTES,
    metavar="BYTES",
    help="What the device gives, such as 24GiB. Default: what the trace tells.",
)
@click.option("--rank", type=int, help="Which rank of a trace of several.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    trace: Path, settings: tuple[str, ...], sweep: bool, capacity: int | None, rank: int | None, as_json: bool
) -> None:
    """Replay the caching allocator and predict other settings.

    First checks that the model of the allocator reproduces TRACE exactly; a file it cannot reproduce gets no
    predictions. A trace without CUDA gets an estimate of what a GPU would reserve.
    """
    from memtrace.planning.allocator.settings import Settings
    from memtrace.trace import load

    wanted = [Settings.parse(text) for text in settings]
    plans = _plans(load(trace), wanted, sweep or not settings, capacity, rank)
    if as_json:
        click.echo(json.dumps({"devices": [plan.as_dict() for plan in plans]}, indent=2))
    else:
        _print(plans)


def _plans(
    trace: object, wanted: list[Settings], sweep: bool, capacity: int | None, rank: int | None
) -> list[DevicePlan]:
    from rich.console import Console
    from rich.progress import Progress

    from memtrace.planning.allocator.plan import plan_allocator
    from memtrace.planning.allocator.settings import Settings
    from memtrace.planning.allocator.what_if import GC_SWEEP, SWEEP
    from memtrace.trace import Trace

    assert isinstance(trace, Trace)
    one = trace if rank is None else trace.rank(rank)
    settings = None if sweep and not wanted else wanted
    if sweep and wanted:
        names = SWEEP + (GC_SWEEP if capacity is not None else ())
        settings = [*wanted, *(s for s in map(Settings.parse, names) if s not in wanted)]
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("trying settings", total=None)
        return plan_allocator(one, settings, capacity=capacity, progress=lambda: progress.advance(task))


def _print(plans: list[DevicePlan]) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH, highlight=False)
    for plan in plans:
        console.print(f"[bold]{plan.device}[/bold]")
        for line in (*_replay_lines(plan), *_capacity_lines(plan)):
            console.print(line, markup=False)
        for note in plan.notes:
            console.print(f"note: {note}", markup=False)
        if plan.predictions:
            console.print(_table(plan))
            for line in _advice(plan):
                console.print(line, markup=False, soft_wrap=True)
        console.print()


def _replay_lines(plan: DevicePlan) -> list[str]:
    replay = plan.replay
    if replay is None:
        return ["replay: none, the allocator left no history here"]
    verdict = "exact" if replay.is_exact else "NOT exact"
    final = "equal" if replay.final_blocks_match else "differ from"
    return [
        f"replay {verdict}: {replay.allocations_exact:,} of {replay.allocations:,} allocations at their "
        f"recorded address, {replay.segment_events_exact:,} of {replay.segment_events:,} segment events "
        f"foretold, peak {mib(replay.peak_reserved_bytes)} of {mib(replay.recorded_peak_reserved_bytes)} MiB, "
        f"final blocks {final} the file's"
    ]


def _capacity_lines(plan: DevicePlan) -> list[str]:
    if plan.capacity is not None:
        return [f"capacity: {gib(plan.capacity)}, as given"]
    ends = None if plan.bracket is None else plan.bracket.ends
    if ends is None:
        return ["capacity: not told by the trace; give --capacity to see what fits"]
    return [f"capacity: {gib(ends[0])} to {gib(ends[1])}, by what the device gave and refused"]


def _table(plan: DevicePlan) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("setting (MiB)", overflow="fold")
    for name in (
        "reserved peak",
        "change",
        "+-",
        "unallocated",
        "segments",
        "device calls",
        "retries",
        "fits",
    ):
        table.add_column(name, justify="right")
    baseline = plan.baseline
    for one in plan.predictions:
        change = "" if baseline is None or one is baseline else _signed(one, baseline)
        table.add_row(
            one.settings.name + (" (recorded)" if one.is_recorded and plan.replay is not None else ""),
            mib(one.peak_reserved_bytes),
            change,
            mib(one.spread_bytes),
            mib(one.unallocated_at_peak_bytes),
            f"{one.num_segments:,}",
            f"{one.num_device_allocs:,}",
            f"{one.num_retries:,}",
            _fits(one),
        )
    return table


def _signed(one: Prediction, baseline: Prediction) -> str:
    change = (one.peak_reserved_bytes - baseline.peak_reserved_bytes) / (1 << 20)
    return f"{change:+,.0f}" if round(change) else "0"


def _fits(one: Prediction) -> str:
    if one.fits is not None:
        return "yes" if one.fits else "no"
    return "?" if one.fits_at is None else "at the largest"


def _advice(plan: DevicePlan) -> list[str]:
    lines = []
    if plan.failed_requests:
        sizes = ", ".join(f"{mib(size)} MiB" for size in plan.failed_requests)
        rescued = [one.settings.name for one in plan.predictions if one.fits]
        settings = "; ".join(rescued) if rescued else "none of these settings"
        lines.append(f"the requests that failed ({sizes}) would have fitted under: {settings}")
    if plan.best is None:
        lines.append("no setting tried here gives more than its error bar; keep what you have")
    elif not str(plan.best.settings):
        lines.append("best: the defaults; unset PYTORCH_CUDA_ALLOC_CONF")
    else:
        lines.append(f"to try: {plan.best.settings.ready_line}")
    return lines
