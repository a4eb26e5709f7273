"""How results look on a terminal, in a pipe and as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from memtrace.code_owner import SITE_SEPARATOR
from memtrace.format.schema import NO_BLOCKS
from memtrace.text import to_printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from memtrace.trace import Trace

PIPE_WIDTH: Final = 110
"""Columns of the output in a pipe; on a terminal the output has the terminal's width."""
SLOW_BYTES: Final = 20 << 20
"""Files from this size on take over a second to read, so a spinner is shown."""


def escape(text: str) -> str:
    """Return text of a trace on one line, in which rich finds no markup and the terminal no escape sequence."""
    # Imported here because JSON output does not need rich.
    from rich.markup import escape as escape_markup

    return escape_markup(to_printable(text))


def print_line(text: str, *, err: bool = False) -> None:
    """Print one line of plain text that can contain names from a trace or paths from the user."""
    click.echo(to_printable(text), err=err)


def shorten(text: str, max_chars: int) -> str:
    """Return text with its middle replaced by an ellipsis where it is longer than ``max_chars``."""
    if len(text) <= max_chars:
        return text
    num_head = max(0, (max_chars - 1) // 2)
    return f"{text[:num_head]}…{text[len(text) - (max_chars - 1 - num_head) :]}"


def shorten_site(site: str, max_chars: int) -> str:
    """Return an allocation site in at most ``max_chars``; the number of the line always stays whole.

    Args:
        site: Such as ``package/module.py:12 Class.method``, or two of these with an arrow between them; text of another
            form is shortened in the middle.
        max_chars: Width of the column.
    """
    user, arrow, library = site.partition(SITE_SEPARATOR)
    if len(site) > max_chars and arrow:
        # The user's line and that of the package share the width; a short one leaves its part to the other.
        room = max_chars - len(arrow)
        user = shorten_site(user, max(room // 2, room - len(library)))
        return f"{user}{arrow}{shorten_site(library, room - len(user))}"
    path, colon, rest = site.rpartition(":")
    line, _, function = rest.partition(" ")
    if len(site) <= max_chars or not (colon and line.isdigit()):
        return shorten(site, max_chars)
    # The path and the function share what the number leaves; a short one leaves its part to the other.
    room = max_chars - len(line) - 2
    path_chars = max(room // 2, room - len(function))
    path = shorten(path, path_chars)
    return f"{path}:{line} {shorten(function, room - len(path))}"


def site_with_modules(site: str, modules: Sequence[str], max_chars: int) -> str:
    """Return an allocation site and the module that owns most of its blocks in at most ``max_chars``.

    Args:
        site: The allocation site, which gets at least half of the width.
        modules: Modules that own blocks of the site, the largest first.
        max_chars: Width of the column.
    """
    if not modules:
        return shorten_site(site, max_chars)
    more = f" +{len(modules) - 1}" if len(modules) > 1 else ""
    room = max_chars - len(more) - 3
    module = shorten(modules[0], max(room // 2, room - len(site)))
    return f"{shorten_site(site, room - len(module))} [{module}{more}]"


def console(*, stderr: bool = False) -> Console:
    """Return a console for stdout or stderr: colors on a terminal, plain text in a pipe.

    rich honours the environment variables NO_COLOR and COLUMNS.
    """
    from os import environ

    from memtrace.cli.safe_console import SafeConsole

    file = sys.stderr if stderr else sys.stdout
    width = None if file.isatty() or environ.get("COLUMNS", "").isdigit() else PIPE_WIDTH
    return SafeConsole(file=file, width=width, highlight=False)


def plain_table(*headers: str) -> Table:
    """Return a table without borders: first and last column aligned to the left, the others to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for index, header in enumerate(headers):
        is_last = index == len(headers) - 1
        justify: Any = "left" if index == 0 or is_last else "right"
        table.add_column(header, justify=justify, no_wrap=not is_last, overflow="fold")
    return table


def fact_table() -> Table:
    """Return a table of two columns without headers: labels, and texts that wrap below themselves."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


@contextmanager
def working(task: str) -> Iterator[None]:
    """Show a spinner with the name of a task on stderr; show nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(escape(task)):
        yield


def open_traces(traces: Sequence[str]) -> Trace:
    """Open a trace folder, or files (several are the ranks of one job), with a spinner where reading takes long."""
    from memtrace.trace import load

    size_bytes = sum(Path(trace).stat().st_size for trace in traces if Path(trace).is_file())
    with working(f"reading {' '.join(traces)}") if size_bytes > SLOW_BYTES else nullcontext():
        return load(*traces)


def missing_blocks_reason(trace: Trace) -> str | None:
    """Return why a trace has no results about its blocks, as the end of a sentence; None where it has blocks."""
    return None if trace.has_blocks else f"unavailable: {NO_BLOCKS}"


def print_json(result: Any) -> None:
    """Print a result as one JSON document: dataclasses become objects, tuples lists; NaN and infinity are errors."""
    click.echo(json.dumps(json_value(result), indent=1, allow_nan=False))


def json_value(value: Any) -> Any:
    """Convert a result to what ``json`` writes: dataclasses to objects by field name, tuples to lists."""
    if is_dataclass(value):
        return {field.name: json_value(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    return value
