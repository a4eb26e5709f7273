"""How results look on a terminal, in a pipe and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from memtrace.cli.feedback import FEEDBACK, Verbosity

from memtrace.format.storage import to_path
from memtrace.text import to_printable
from memtrace.units import UNKNOWN

if TYPE_CHECKING:
    from memtrace.cli.tables import PlainTable
    from rich.console import Console
    from rich.table import Table

    from memtrace.trace import Trace

PIPE_WIDTH: Final = 110
"""Columns of the output in a pipe; on a terminal the output has the terminal's width."""
SCHEMA_VERSION: Final = 1
"""Version of the JSON that commands print. It grows when a member is removed, renamed or changes its meaning, and not
when one is added."""
SCHEMA_VERSION_KEY: Final = "schema_version"
MAX_NAMED_TRACES: Final = 3
"""Of more traces, progress states the number."""
SLOW_BYTES: Final = 20 << 20
"""Files from this size on take over a second to read, so progress is shown."""


def escape(text: str) -> str:
    """Return text of a trace on one line, in which rich finds no markup and the terminal no escape sequence."""
    # Imported here because JSON output does not need rich.
    from rich.markup import escape as escape_markup

    return escape_markup(to_printable(text))


def print_line(text: str, *, err: bool = False) -> None:
    """Print one line of plain text that can contain names from a trace or paths from the user."""
    FEEDBACK.end()
    click.echo(to_printable(text), err=err)


def print_confirmation(text: str) -> None:
    """Print one line about what was written, unless the user asked for quiet."""
    if FEEDBACK.verbosity > Verbosity.QUIET:
        print_line(text)


def print_next_command(out: Console, command: str) -> None:
    """Print a command to run next, on one line to copy, unless the user asked for quiet."""
    if FEEDBACK.verbosity > Verbosity.QUIET:
        out.print(f"\nNext: {escape(command)}", style="dim", soft_wrap=True)


def site_with_modules(site: str, modules: Sequence[str]) -> str:
    """Return an allocation site, the module that owns most of its blocks, and the number of its other modules."""
    if not modules:
        return site
    more = f" +{len(modules) - 1}" if len(modules) > 1 else ""
    return f"{site} [{modules[0]}{more}]"


def console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr: colors on a terminal, plain text in a pipe.

    rich honours the environment variables NO_COLOR and COLUMNS.
    """
    from os import environ

    from memtrace.cli.safe_console import SafeConsole

    FEEDBACK.end()
    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() or environ.get("COLUMNS", "").isdigit() else PIPE_WIDTH
    return SafeConsole(file=file, width=width, highlight=False)


def plain_table(*headers: str) -> PlainTable:
    """Return a table without borders: first and last column aligned to the left, the others to the right."""
    from memtrace.cli.tables import PlainTable

    return PlainTable(headers)


def fact_table() -> Table:
    """Return a table of two columns without headers: labels, and texts that wrap below themselves."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def working(task: str) -> AbstractContextManager[None]:
    """Show the name of a task as progress on a terminal, if it takes long."""
    return FEEDBACK.working(task)


def open_traces(traces: Sequence[str], work_during_read: Callable[[], object] | None = None) -> Trace:
    """Open a trace folder, or files (several are the ranks of one job); then show progress until the first output.

    Args:
        traces: the folder or the files.
        work_during_read: called once while another process reads a file, to use the time.
    """
    from memtrace.trace import load

    FEEDBACK.end()
    names = " ".join(traces) if len(traces) <= MAX_NAMED_TRACES else f"{len(traces)} traces"
    files = [path for path in map(to_path, traces) if isinstance(path, Path) and path.is_file()]
    size_bytes = sum(file.stat().st_size for file in files)
    # The reader forks where there is no other thread, such as one for progress.
    with FEEDBACK.working(f"reading {names}") if size_bytes > SLOW_BYTES else nullcontext():
        trace = load(*traces, work_during_read=work_during_read)
    if FEEDBACK.verbosity == Verbosity.VERBOSE:
        for rank in trace.each_rank():
            FEEDBACK.detail(_describe_rank(rank))
    FEEDBACK.begin(f"analyzing {names}")
    return trace


def _describe_rank(trace: Trace) -> str:
    """Return what was opened, for --verbose."""
    source = trace.manifest.source
    origin = source.file or trace.path or "the trace"
    recorder = f"{source.kind or UNKNOWN}{f', {source.observer} observer' if source.observer else ''}"
    return (
        f"rank {trace.manifest.rank}: {origin} ({recorder}), {trace.num_rows('events'):,} events, "
        f"{trace.num_rows('ops'):,} operator calls"
    )


def print_json(result: Any) -> None:
    """Print a result as one JSON object, the version of its form first; NaN and infinity are errors.

    Args:
        result: A dataclass or mapping: dataclasses become objects, tuples lists.
    """
    FEEDBACK.end()
    click.echo(json.dumps({SCHEMA_VERSION_KEY: SCHEMA_VERSION, **json_value(result)}, indent=1, allow_nan=False))


def json_value(value: Any) -> Any:
    """Convert a result to what ``json`` writes: dataclasses to objects by field name, tuples to lists."""
    if is_dataclass(value):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value
