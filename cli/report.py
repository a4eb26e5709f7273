"""``memtrace report``: the page."""

from __future__ import annotations

from pathlib import Path

import click
from memtrace.cli.output import open_traces, working

from memtrace.errors import MemtraceError


@click.command("report")
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
@click.option("-o", "--output", type=click.Path(dir_okay=False), default="report.html", show_default=True)
@click.option("--rank", type=int, help="One rank of a trace of several.")
def command(traces: tuple[str, ...], output: str, rank: int | None) -> None:
    """Write the page of TRACE: one HTML file that works offline."""
    opened = open_traces(traces)
    if rank is not None:
        opened = opened.rank(rank)
    from memtrace.dashboards import report

    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        with working(f"drawing {output}"):
            written = report(opened, output)
    except OSError as error:
        raise MemtraceError(f"cannot write {output}: {error}") from error
    click.echo(f"wrote {written} ({written.stat().st_size / 2**20:.1f} MiB)")
