"""``memtrace plot``: one figure as an image or an HTML file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from memtrace.cli.arguments import RANK, WINDOW
from memtrace.cli.output import open_traces, print_line, working
from memtrace.cli.pages import check_output_folder, output_errors

from memtrace.errors import MemtraceError
from memtrace.units import format_bytes

if TYPE_CHECKING:
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

    opened = _open(traces, name, from_step, to_step)
    with working(f"drawing {name}"):
        figure = _draw(name, opened, labels or _default_labels(traces), rank, device, theme)
    with output_errors(output), working(f"writing {output}"):
        path = write_figure(figure, output, width=width, height=height, scale=scale)
    print_line(f"Wrote {path} ({format_bytes(path.stat().st_size)}).")


def _open(traces: Sequence[str], name: str, from_step: int | None, to_step: int | None) -> list[Trace]:
    from memtrace.analysis.windows import step_window

    opened = [open_traces(traces)] if name == "ranks" else [open_traces([trace]) for trace in traces]
    if from_step is None and to_step is None:
        return opened
    return [step_window(trace, from_step, to_step) for trace in opened]


def _default_labels(traces: Sequence[str]) -> tuple[str, ...]:
    from memtrace.analysis.compare import label_paths

    return label_paths([Path(trace) for trace in traces])


def _draw(
    name: str, traces: Sequence[Trace], labels: Sequence[str], rank: int | None, device: str | None, theme: str
) -> Any:
    from memtrace import plots

    function: Callable[..., Any] = getattr(plots, name.replace("-", "_"))
    if name in SEVERAL_TRACES:
        return function(*traces, labels=labels, rank=rank, device=device, theme=theme)
    if name == "ranks":
        if rank is not None or device is not None:
            raise MemtraceError("--figure ranks draws all ranks: leave out --rank and --device.")
        return function(traces[0], theme=theme)
    return function(traces[0], device, rank=rank, theme=theme)
