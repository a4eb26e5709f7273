"""Prints out-of-memory errors."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.cli.output import console, escape, plain_table, print_next_command
from memtrace.cli.verdict import print_verdict

from memtrace.analysis.outside_memory import describe_outside_memory
from memtrace.units import format_bytes, format_count, format_duration

NO_STACK = "(no stack: allocated before the recording, or recorded without stacks)"
MAX_HOLDERS = 6

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from memtrace.analysis.oom import OutOfMemory, RequestRoom


def print_failure(out: Console, failure: OutOfMemory, *, with_advice: bool) -> None:
    """Print an out-of-memory error: the request, the memory it could not use, and what held the rest.

    Args:
        out: Where to print.
        failure: The error.
        with_advice: Whether to print what to try; a verdict with fixes makes that superfluous.
    """
    where = f"at {escape(failure.site)}" if failure.site else "(no stack was recorded)"
    out.print(
        f"\n[bold]Out of memory on {failure.device} {_format_moment(failure.event, failure.time_ns)}[/]: request for "
        f"{format_bytes(failure.asked_bytes)} {where}"
    )
    free = (
        "" if failure.device_free_bytes is None else f"; the device had {format_bytes(failure.device_free_bytes)} free"
    )
    out.print(f"Live memory: {format_bytes(failure.live_bytes)}{free}.")
    if failure.room is not None:
        out.print(_room_sentence(failure.room))
    if failure.device != "cpu":
        out.print(describe_outside_memory(failure.outside))
    table = plain_table("Held", "Blocks", "Allocation site")
    for holder in failure.holders[:MAX_HOLDERS]:
        table.add_row(format_bytes(holder.requested_bytes), f"{holder.num_blocks:,}", escape(holder.site or NO_STACK))
    out.print(table)
    if with_advice:
        out.print("What to try:")
        out.print(_bullet_list(failure.advice))


def _room_sentence(room: RequestRoom) -> str:
    state = room.state
    elsewhere = ""
    if room.free_elsewhere_bytes:
        elsewhere = (
            f"; {format_bytes(room.free_elsewhere_bytes)} belong to other streams, other pools or other block sizes"
        )
    return (
        f"Reserved memory: {format_bytes(state.reserved_bytes)} in {format_count(state.num_segments, 'segment')}, "
        f"of which {format_bytes(state.free_bytes)} unused. The request could use "
        f"{format_bytes(room.free_same_stream_bytes)} of that, "
        f"in free blocks of at most {format_bytes(room.largest_fit_bytes)}{elsewhere}."
    )


def _bullet_list(sentences: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row("  -", escape(sentence))
    return table


def _format_moment(event: int, time_ns: int | None) -> str:
    return f"at event {event:,}" if time_ns is None else f"at {format_duration(time_ns)}"


def main() -> None:
    """Explain the last out-of-memory error of the rank folder in ``sys.argv[1]``: entry point of a separate process."""
    try:
        _print_last_failure(Path(sys.argv[1]))
    except Exception as error:
        print(f"memtrace: cannot explain the out-of-memory error: {error}", file=sys.stderr)


def _print_last_failure(folder: Path) -> None:
    from memtrace.analysis.oom import explain_out_of_memory
    from memtrace.planning.verdict import find_verdict
    from memtrace.trace import load

    trace = load(folder)
    failures = explain_out_of_memory(trace)
    if failures:
        out, verdict = console(stderr=True), find_verdict(trace, failures[-1].device)
        out.print()
        print_verdict(out, verdict)
        print_failure(out, failures[-1], with_advice=not verdict.fixes)
        print_next_command(out, f"memtrace report {shlex.quote(str(folder))} -o report.html")
