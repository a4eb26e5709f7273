"""``memtrace plan allocator``: would another setting have saved memory, or avoided an out-of-memory?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import console, plain_table, print_json
from memtrace.cli.quantities import BYTES
from rich.markup import escape

from memtrace.units import UNKNOWN, format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from memtrace.allocator.plan import DevicePlan
    from memtrace.allocator.settings import Settings
    from memtrace.allocator.what_if import Prediction
    from memtrace.trace import Trace


@click.command("allocator")
@selects_traces
@click.option(
    "--setting",
    "texts",
    multiple=True,
    metavar="KEY:VALUE[,...]",
    help="A setting to try, as PYTORCH_CUDA_ALLOC_CONF takes it. Repeat for more.",
)
@click.option("--sweep", is_flag=True, help="Try the usual settings too; without --setting they are tried anyway.")
@click.option(
    "--capacity",
    type=BYTES,
    help="What the device gives, such as 24GiB. Without it: what the trace tells of it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the same as JSON; unknown values are null.")
def command(selection: Selection, texts: tuple[str, ...], sweep: bool, capacity: int | None, as_json: bool) -> None:
    """Replay the CUDA caching allocator over TRACE, and predict what other settings would reserve.

    First it checks that its model reproduces the trace exactly; a file it cannot reproduce gets no
    predictions. A trace without CUDA gets an estimate of what a GPU would reserve for it.
    """
    from memtrace.allocator.settings import Settings

    wanted = [Settings.parse(text) for text in texts]
    one = selection.open_rank()
    plans = _plans(one, _to_try(wanted, sweep, capacity), capacity)
    if as_json:
        print_json({"devices": [plan.as_dict() for plan in plans]})
        return
    for plan in plans:
        _print_device(plan)
    if not plans:
        console().print("No memory events were recorded.")


def _to_try(wanted: list[Settings], sweep: bool, capacity: int | None) -> list[Settings] | None:
    """The settings to predict; None: the sweep that the trace itself suggests."""
    from memtrace.allocator.settings import Settings
    from memtrace.allocator.what_if import GC_SWEEP, SWEEP

    if not wanted:
        return None
    usual = SWEEP + (GC_SWEEP if capacity is not None else ()) if sweep else ()
    return wanted + [other for other in map(Settings.parse, usual) if other not in wanted]


def _plans(trace: Trace, settings: list[Settings] | None, capacity: int | None) -> list[DevicePlan]:
    from rich.console import Console
    from rich.progress import Progress

    from memtrace.allocator.plan import plan_allocator

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("trying settings", total=None)
        return plan_allocator(trace, settings, capacity=capacity, progress=lambda: progress.advance(task))


def _print_device(plan: DevicePlan) -> None:
    out = console()
    out.print(plan.device, style="bold")
    for line in (_replay_line(plan), _capacity_line(plan), *(f"note: {note}" for note in plan.notes)):
        out.print(escape(line))
    if plan.predictions:
        out.print(_table(plan))
        for line in _advice(plan):
            out.print(escape(line), soft_wrap=True)
    out.print()


def _replay_line(plan: DevicePlan) -> str:
    replay = plan.replay
    if replay is None:
        return "replay: none, for the allocator left no history here"
    return (
        f"replay {'exact' if replay.is_exact else 'NOT exact'}: "
        f"{replay.allocations_exact:,} of {replay.allocations:,} allocations at their recorded address, "
        f"{replay.segment_events_exact:,} of {replay.segment_events:,} segment events foretold, "
        f"peak {_mib(replay.peak_reserved_bytes)} of {_mib(replay.recorded_peak_reserved_bytes)}, "
        f"final blocks {'equal' if replay.final_blocks_match else 'differ from'} the file's"
    )


def _capacity_line(plan: DevicePlan) -> str:
    if plan.capacity is not None:
        return f"capacity: {format_bytes(plan.capacity)}, as given"
    ends = None if plan.bracket is None else plan.bracket.ends
    if ends is None:
        return "capacity: the trace does not tell it; give --capacity to see what fits"
    estimate = plan.bracket.estimate if plan.bracket else None
    told = "" if estimate is None else f"; about {format_bytes(estimate)}, by what was free when a request failed"
    return (
        f"capacity: between {format_bytes(ends[0])} and {format_bytes(ends[1])}, by what the device gave and "
        f"what it refused{told}"
    )


def _table(plan: DevicePlan) -> Table:
    table = plain_table(
        "setting",
        "reserved peak",
        "change",
        "+/-",
        "unallocated",
        "segments",
        "retries",
        "fits",
    )
    baseline = plan.baseline
    for one in plan.predictions:
        table.add_row(
            one.settings.name.replace(",", ",\n")
            + (" (recorded)" if one.is_recorded and plan.replay is not None else ""),
            _mib(one.peak_reserved_bytes),
            "" if baseline is None or one is baseline else _change(one, baseline),
            _mib(one.spread_bytes),
            _mib(one.unallocated_at_peak_bytes),
            f"{one.num_segments:,}",
            f"{one.num_retries:,}",
            _fits(one),
        )
    return table


def _change(one: Prediction, baseline: Prediction) -> str:
    change = one.peak_reserved_bytes - baseline.peak_reserved_bytes
    return ("+" if change > 0 else "") + _mib(change)


def _mib(number: int) -> str:
    """Bytes in MiB throughout, so that the rows compare."""
    return f"{number / (1 << 20):,.0f} MiB" if number else "0"


def _fits(one: Prediction) -> str:
    if one.fits is not None:
        return "yes" if one.fits else "no"
    return UNKNOWN if one.fits_at is None else "at the larger"


def _advice(plan: DevicePlan) -> list[str]:
    lines = []
    if plan.failed_requests:
        failed = ", ".join(map(format_bytes, plan.failed_requests))
        lines.append(f"requests that failed when it was recorded ({failed}) would have fitted under: {_rescuers(plan)}")
    best = plan.best
    if best is None and not any(one.certainty for one in plan.predictions):
        least = min(plan.predictions, key=lambda one: one.peak_reserved_bytes)
        lines.append(
            f"no setting tried here fits; {least.settings.name} takes least: {_mib(least.peak_reserved_bytes)}"
        )
    elif best is None:
        lines.append("no setting tried here gives more than its error bar: keep what you have")
    else:
        line = best.settings.ready_line if str(best.settings) else "the defaults (unset PYTORCH_CUDA_ALLOC_CONF)"
        minds = "".join(f" ({mind})" for mind in _minds(best))
        lines.append(f"to try: {line}{minds}")
    if any(one.settings.garbage_collection_threshold and not one.settings.collects_garbage for one in plan.predictions):
        lines.append("garbage_collection_threshold does nothing without per_process_memory_fraction: give both")
    return lines


def _minds(best: Prediction) -> list[str]:
    """What to know before pasting it."""
    from memtrace.allocator.settings import Settings

    minds = []
    if best.certainty == 1:
        minds.append("it fits at the larger capacity only")
    if best.settings.large_segment_bytes != Settings().large_segment_bytes:
        minds.append("torch before 2.11 refuses large_segment_size_mb")
    return minds


def _rescuers(plan: DevicePlan) -> str:
    sure = "; ".join(one.settings.name for one in plan.predictions if one.fits) or "none of these"
    perhaps = "; ".join(one.settings.name for one in plan.predictions if one.certainty == 1)
    return f"{sure}; at the larger capacity: {perhaps}" if perhaps else sure
