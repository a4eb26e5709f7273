"""``memtrace report``: the page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.output import working

from memtrace.errors import MemtraceError

if TYPE_CHECKING:
    from memtrace.pipeline.prediction import PipelinePrediction
    from memtrace.trace import Trace


@click.command("report")
@selects_traces
@click.option("-o", "--output", type=click.Path(dir_okay=False), default="report.html", show_default=True)
@click.option("--predict", type=click.Path(), metavar="TRACE1",
              help="Of a pipeline: show beside it what this trace of one process predicts.")  # fmt: skip
def command(selection: Selection, output: str, predict: str | None) -> None:
    """Write the page of TRACE: one HTML file that works offline."""
    opened = selection.open()
    prediction = None if predict is None else _predict(opened, predict)
    from memtrace.dashboards import report

    try:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        with working(f"drawing {output}"):
            written = report(opened, output, prediction=prediction)
    except OSError as error:
        raise MemtraceError(f"cannot write {output}: {error}") from error
    click.echo(f"wrote {written} ({written.stat().st_size / 2**20:.1f} MiB)")


def _predict(trace: Trace, predict: str) -> PipelinePrediction:
    from memtrace.pipeline.layer_costs import measure_layer_costs
    from memtrace.pipeline.prediction import predict_recorded_pipeline
    from memtrace.trace import load

    single = load(predict)
    return predict_recorded_pipeline(trace, measure_layer_costs(single.rank(single.ranks[0])))
