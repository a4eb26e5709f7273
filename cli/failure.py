"""What the terminal says of an allocation that failed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.cli.output import console, escape, plain_table

from memtrace.analysis.summary import format_moment
from memtrace.interpreter import run_python
from memtrace.units import UNKNOWN, format_bytes

NO_STACK = "(no stack: older than the recording, small, or stacks were off)"

if TYPE_CHECKING:
    from rich.console import Console

    from memtrace.analysis.oom import Room
    from memtrace.analysis.summary import FailureSummary


def print_failure(out: Console, failure: FailureSummary, name: str) -> None:
    """Print one entry of ``out_of_memory`` of the summary of the trace ``name``."""
    when = f"out of memory on {failure.device} at {format_moment(failure.event, failure.time_ns)}"
    who = escape(failure.site or UNKNOWN)
    out.print(f"\n[bold]{when}[/]: {format_bytes(failure.asked_bytes)} asked for by {who}")
    left = failure.device_free_bytes
    out.print(
        f"{format_bytes(failure.live_bytes)} were "
        f"live{'' if left is None else f', the device had {format_bytes(left)} left'}"
    )
    if failure.room is not None:
        _print_room(out, failure.room)
    table = plain_table("size", "blocks", "held by")
    for holder in failure.holders[:6]:
        table.add_row(format_bytes(holder.bytes), f"{holder.num_blocks:,}", escape(holder.name or NO_STACK))
    out.print(table)
    for sentence in failure.advice:
        out.print(f"try: {escape(sentence)}")
    if failure.room is not None:
        out.print(f"Next: memtrace plan allocator {escape(name)}, for settings that would have let it fit", style="dim")


def _print_room(out: Console, room: Room) -> None:
    state = room.state
    out.print(
        f"of {format_bytes(state.reserved_bytes)} reserved {format_bytes(state.free_bytes)} were in no block, "
        f"but the largest "
        f"piece within reach was {format_bytes(room.largest_fit_bytes)}, and "
        f"{format_bytes(room.free_elsewhere_bytes)} were on "
        "other streams, in other pools or for blocks of another size"
    )


def explain_failure(folder: Path) -> None:
    """Print, on stderr, why the last allocation that failed in a rank's trace did so. Says nothing where none did.

    A process of its own works it out: this one may have no memory left to do that in.
    """
    run_python("from memtrace.cli.failure import main; main()", str(folder), silent=False)


def main() -> None:
    """The work of that process: the folder is its argument."""
    try:
        _explain(Path(sys.argv[1]))
    except Exception as trouble:
        print(f"memtrace: why memory ran out cannot be told: {trouble}", file=sys.stderr)


def _explain(folder: Path) -> None:
    from memtrace.analysis.oom import out_of_memory
    from memtrace.analysis.summary import summarize_failure
    from memtrace.trace import load

    trace = load(folder)
    failures = out_of_memory(trace)
    if failures:
        out = console(stderr=True)
        print_failure(out, summarize_failure(trace, failures[-1]), str(folder))
        out.print(f"Next: memtrace report {escape(str(folder))} -o report.html", style="dim")
