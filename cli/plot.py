"""``memtrace plot``: one figure as an image or an HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import click
from memtrace.cli.arguments import RANK, WINDOW, Selection
from memtrace.cli.compare import label_traces
from memtrace.cli.output import print_line, working
from memtrace.cli.pages import check_output_folder, output_errors
from memtrace.cli.workers import Workers, takes_workers

from memtrace.errors import MemtraceError
from memtrace.units import format_bytes

if TYPE_CHECKING:
    from memtrace import plots
    from memtrace.engine import Engine, TraceSource
    from memtrace.engine.comparisons import OpenTrace
    from memtrace.trace import Trace

ONE_TRACE: Final = ("timeline", "lifetimes", "segments", "ranks")
"""Figures of one trace."""
SEVERAL_TRACES: Final = ("categories", "steps", "step-peaks", "access-intervals")
"""Figures of one or several traces."""


@click.command("plot")
@click.argument("traces", metavar="TRACE...", nargs=-1, required=True, type=click.Path())
@click.option("--figure", "name", type=click.Choice([*ONE_TRACE, *SEVERAL_TRACES]), default="timeline",
              show_default=True, metavar="NAME",
              help=f"Figure to draw: {', '.join((*ONE_TRACE, *SEVERAL_TRACES))}.")  # fmt: skip
@click.option("-o", "--output", type=click.Path(dir_okay=False), default="plot.html", show_default=True,
              help="File to write; its suffix names the format: png, svg, pdf, jpeg, webp or html. All but html need "
              "kaleido and a browser.")  # fmt: skip
@click.option("--label", "labels", multiple=True, metavar="TEXT",
              help="Name of a run; give one for each TRACE, in their order.  [default: file names]")  # fmt: skip
@RANK
@click.option("--device", help="Device to draw (e.g. cuda:0).  [default: the one with the highest peak]")
@WINDOW[0]
@WINDOW[1]
@takes_workers
@click.option("--theme", type=click.Choice(["light", "dark"]), default="light", show_default=True, help="Colors.")
@click.option("--width", type=click.IntRange(100, 10_000), default=900, show_default=True,
              help="Width in pixels at scale 1.")  # fmt: skip
@click.option("--height", type=click.IntRange(100, 10_000), help="Height in pixels at scale 1.  [default: fits]")
@click.option("--scale", type=click.FloatRange(0.1, 10), default=2.0, show_default=True,
              help="Pixels of the image for each pixel of width.")  # fmt: skip
def command(
    traces: tuple[str, ...],
    name: str,
    output: str,
    labels: tuple[str, ...],
    rank: int | None,
    device: str | None,
    from_step: int | None,
    to_step: int | None,
    workers: Workers,
    theme: str,
    width: int,
    height: int | None,
    scale: float,
) -> None:
    """Write one figure of TRACE as an image or an HTML file.

    Figures of several runs put each TRACE beside the others; --figure ranks takes the ranks of one job.

    \b
    Examples:
      memtrace plot run.memtrace -o timeline.png
      memtrace plot b8.memtrace b16.memtrace --figure categories -o peak.svg
      memtrace plot run.memtrace --figure lifetimes --theme dark -o blocks.pdf
    """
    if name in ONE_TRACE and name != "ranks" and len(traces) > 1:
        raise click.UsageError(f"--figure {name} draws one trace, and {len(traces)} were given.")
    if labels and len(labels) != len(traces):
        raise click.UsageError(f"Give --label once for each of the {len(traces)} traces; {len(labels)} were given.")
    if from_step is not None and to_step is not None and from_step > to_step:
        raise click.UsageError(f"--from-step {from_step} is greater than --to-step {to_step}.")
    check_output_folder(output)
    from memtrace.dashboards.images import write_figure

    of_one_job = name in ONE_TRACE
    sides = [Selection(paths, None, from_step, to_step) for paths in ([traces] if of_one_job else zip(traces))]
    opened = [(side.open(), side.source) for side in sides]
    with working(f"drawing {name}"), workers.engine(*opened[0]) as engine:
        if name == "ranks":
            figure = _draw_ranks(engine, *opened[0], rank, device, theme)
        else:
            figure = _draw_runs(engine, opened, name, label_traces(traces, labels), rank, device, theme)
    with output_errors(output), working(f"writing {output}"):
        path = write_figure(figure, output, width=width, height=height, scale=scale)
    print_line(f"Wrote {path} ({format_bytes(path.stat().st_size)}).")


def _draw_ranks(
    engine: Engine, trace: Trace, source: TraceSource, rank: int | None, device: str | None, theme: str
) -> Any:
    from memtrace import plots
    from memtrace.analysis.rank_reports import analyze_reports

    if rank is not None or device is not None:
        raise MemtraceError("--figure ranks draws all ranks: leave out --rank and --device.")
    return plots.ranks(analyze_reports(trace, engine.analyzer(source)), theme=cast("plots.Theme", theme))


def _draw_runs(
    engine: Engine,
    traces: Sequence[OpenTrace],
    name: str,
    labels: Sequence[str],
    rank: int | None,
    device: str | None,
    theme: str,
) -> Any:
    from memtrace.engine.comparisons import match_compared_runs

    runs = match_compared_runs(engine, traces, labels, rank, device)
    chosen = [(run.trace, source) for run, (_, source) in zip(runs, traces, strict=True)]
    return engine.ask(chosen, partial(draw_figure, name=name, labels=labels, device=device, theme=theme))


def draw_figure(*traces: Trace, name: str, labels: Sequence[str], device: str | None, theme: str) -> Any:
    """Return a figure of single-rank traces by its name.

    Args:
        traces: the traces; one where the figure shows one.
        name: one of ``ONE_TRACE`` or ``SEVERAL_TRACES``.
        labels: name of each run.
        device: device to draw; None: see ``memtrace.plots``.
        theme: ``light`` or ``dark``.
    """
    import plotly.graph_objects as go

    from memtrace import plots

    function: Callable[..., Any] = getattr(plots, name.replace("-", "_"))
    if name in SEVERAL_TRACES:
        figure = function(*traces, labels=labels, device=device, theme=theme)
    else:
        figure = function(traces[0], device, theme=theme)
    # A figure that a worker sends back has its members in the order of a new figure.
    return go.Figure(figure)
