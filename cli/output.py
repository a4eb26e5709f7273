"""How numbers and tables look on a terminal and in a pipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from memtrace.format.schema import NO_BLOCKS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from memtrace.trace import Trace

_SLOW_BYTES = 20 << 20


def escape(text: str) -> str:
    """Text without markup of ours in it. rich is imported where something is printed: JSON needs none of it."""
    from rich.markup import escape as escaped

    return escaped(text)


def console(*, stderr: bool = False) -> Console:
    """Colour and boxes on a terminal, plain text in a pipe; NO_COLOR and COLUMNS are honoured by rich."""
    from rich.console import Console

    file = sys.stderr if stderr else sys.stdout
    return Console(file=file, width=None if file.isatty() else 110, highlight=False)


def plain_table(*headers: str) -> Table:
    """A table without boxes; columns after the first are aligned to the right, the last to the left."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for place, header in enumerate(headers):
        last = place == len(headers) - 1
        table.add_column(header, justify="left" if place == 0 or last else "right", no_wrap=not last, overflow="fold")
    return table


@contextmanager
def working(what: str) -> Iterator[None]:
    """A spinner on stderr while something takes its time; nothing where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


def open_traces(traces: Sequence[str], preload: str | None = None) -> Trace:
    """The trace of a folder or of files; with a spinner where reading takes over a second.

    ``preload``: a module that is used next; it is imported while a file is read.
    """
    from memtrace.trace import load

    def import_module_to_preload() -> None:
        if preload is not None:
            import_module(preload)

    size_bytes = sum(Path(trace).stat().st_size for trace in traces if Path(trace).is_file())
    with working(f"reading {' '.join(traces)}") if size_bytes > _SLOW_BYTES else nullcontext():
        return load(*traces, work_during_read=import_module_to_preload)


def cannot_tell(trace: Trace) -> str | None:
    """Why nothing can be told of the trace's blocks, for a sentence on what cannot be; None where they are there."""
    return None if trace.has_blocks else f"cannot be told: {NO_BLOCKS}"


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
