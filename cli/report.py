"""``memtrace report``: the HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
from memtrace.cli.arguments import Selection, selects_traces
from memtrace.cli.bandwidths import takes_analysis_options
from memtrace.cli.output import print_confirmation, working
from memtrace.cli.pages import check_output_folder, output_errors
from memtrace.cli.workers import Workers, takes_workers

from memtrace.units import format_bytes

if TYPE_CHECKING:
    from memtrace.analysis.options import AnalysisOptions
    from memtrace.engine import Engine
    from memtrace.pipeline.prediction import PipelinePrediction
    from memtrace.trace import Trace


@click.command("report")
@selects_traces
@takes_workers
@takes_analysis_options
@click.option("-o", "--output", type=click.Path(dir_okay=False), default="report.html", show_default=True,
              help="HTML file to write.")  # fmt: skip
@click.option("--predict", type=click.Path(), metavar="TRACE1",
              help="Compare a recorded pipeline with its prediction from TRACE1, the trace of a single process that "
              "trains the whole model.")  # fmt: skip
@click.option("--no-source", is_flag=True, help="Leave source lines out of the page.")
@click.option("--source-root", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="DIR",
              help="Folder with the sources of the recorded program, for a trace from another machine.")  # fmt: skip
def command(
    selection: Selection,
    workers: Workers,
    options: AnalysisOptions,
    output: str,
    predict: str | None,
    no_source: bool,
    source_root: Path | None,
) -> None:
    """Write an HTML page with figures and tables of TRACE. The page is a single file that works offline.

    TRACE is a *.memtrace folder or a memory file of another tool; several are the ranks of one job. The page contains
    a few lines around each stack frame of the program's own Python files if this machine recorded the trace.

    \b
    Examples:
      memtrace report run.memtrace -o report.html
      memtrace report snapshot.pickle --source-root ~/project
    """
    check_output_folder(output)
    trace = selection.open()
    from memtrace.dashboards import SourceOptions, report

    from memtrace.pipeline.measured import analyze_pipeline

    sources = SourceOptions(is_enabled=not no_source, root=source_root)

    with (
        output_errors(output),
        working(f"writing {output}"),
        workers.engine(trace, selection.source) as engine,
    ):
        analyze = engine.analyzer(selection.source)
        prediction = None if predict is None else _predict_pipeline(engine, analyze_pipeline(trace, analyze), predict)
        page = report(trace, output, prediction=prediction, options=options, sources=sources, analyze=analyze)
    print_confirmation(f"Wrote {page} ({format_bytes(page.stat().st_size)}).")


def _predict_pipeline(engine: Engine, trace: Trace, single_process_path: str) -> PipelinePrediction:
    from memtrace.cli.pipeline import measure_layers

    from memtrace.pipeline.prediction import predict_recorded_pipeline

    return predict_recorded_pipeline(trace, measure_layers(engine, single_process_path))
