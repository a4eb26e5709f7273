"""``memtrace report``: the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import working

from memtrace.errors import MemtraceError

if TYPE_CHECKING:
    from memtrace.trace import Trace


@click.command("report")
@selects_traces
@click.option("-o", "--output", type=click.Path(dir_okay=False), default="report.html", show_default=True)
@click.option("--predict", type=click.Path(), metavar="TRACE1",
              help="Of a pipeline: show beside it what this trace of one process predicts.")  # fmt: skip
def command(selection: Selection, output: str, predict: str | None) -> None:
    """Write the page of TRACE: one HTML file that works offline."""
    opened = selection.open()
    if predict is not None:
        _predict(opened, predict)
    from memtrace.dashboards import report

    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        with working(f"drawing {output}"):
            written = report(opened, output)
    except OSError as error:
        raise MemtraceError(f"cannot write {output}: {error}") from error
    click.echo(f"wrote {written} ({written.stat().st_size / 2**20:.1f} MiB)")


def _predict(trace: Trace, predict: str) -> None:
    from memtrace.pipeline.compare import compare, keep_comparison
    from memtrace.pipeline.from_trace import trace_costs
    from memtrace.pipeline.measured import measured
    from memtrace.trace import load

    single = load(predict)
    keep_comparison(trace, compare(measured(trace), trace_costs(single.rank(single.ranks[0]))))
