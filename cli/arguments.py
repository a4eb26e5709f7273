"""What several commands take: traces, and a rank of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click
from memtrace.cli.output import open_traces

if TYPE_CHECKING:
    from memtrace.trace import Trace

TRACES: Final = click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
"""``traces``: folders or files; several are the ranks of one job."""
RANK: Final = click.option("--rank", type=int, help="One rank of a trace of several; without it the first.")


def open_rank(traces: Sequence[str], rank: int | None) -> Trace:
    """One rank of some traces: the first, saying so, where none is asked for."""
    opened = open_traces(traces)
    if rank is None and len(opened.ranks) > 1:
        click.echo(f"memtrace: rank {opened.ranks[0]} of {len(opened.ranks)}; --rank asks for another", err=True)
    return opened.rank(opened.ranks[0] if rank is None else rank)
