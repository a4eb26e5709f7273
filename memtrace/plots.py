"""Figures of traces and pipelines, as plotly figures: for notebooks, reports and papers.

    import memtrace
    from memtrace import plots

    trace = memtrace.load("run.memtrace")
    plots.timeline(trace).show()
    plots.access_intervals(first, second, labels=["SGD", "Adam"]).write_image("intervals.pdf")

Every function returns a new ``plotly.graph_objects.Figure`` in the colors of the page, which can be changed further. A
trace of several ranks is drawn by the rank and device with the highest peak unless others are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from memtrace.errors import TraceError

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from memtrace.analysis.compare import Run
    from memtrace.pipeline.plan import SchedulePrediction
    from memtrace.pipeline.schedules.schedule import Schedule
    from memtrace.pipeline.simulation.simulator import Simulation
    from memtrace.trace import Trace

Theme = Literal["light", "dark"]

__all__ = [
    "access_intervals",
    "categories",
    "lifetimes",
    "pipeline",
    "pipeline_memory",
    "ranks",
    "segments",
    "step_peaks",
    "steps",
    "timeline",
]


def timeline(trace: Trace, device: str | None = None, *, rank: int | None = None, theme: Theme = "light") -> go.Figure:
    """Return the live bytes of a device over time, stacked by category.

    Args:
        trace: a trace.
        device: device such as ``cuda:0``; default: the one with the highest peak, accelerators before the CPU.
        rank: rank of a trace of several ranks; default: the one with the highest peak.
        theme: ``light`` or ``dark``.

    Raises:
        TraceError: the trace has no such rank or device, or no memory events.
    """
    from memtrace.dashboards.timeline import timeline_figure

    run = _choose(trace, device, rank)
    return _finish(timeline_figure(run.trace, run.device), run, "allocations", theme)


def categories(
    *traces: Trace, labels: Sequence[str] = (), device: str | None = None, rank: int | None = None,
    theme: Theme = "light",
) -> go.Figure:  # fmt: skip
    """Return the peak of one or several runs by category, in bytes and as shares.

    Args:
        traces: one or several traces.
        labels: name of each run; default: the names of the files.
        device: device to compare; default: the accelerator that all traces have.
        rank: rank of traces of several ranks; default: the common rank with the highest peak.
        theme: ``light`` or ``dark``.

    Raises:
        TraceError: a trace has no such rank or device, or no memory events.
    """
    from memtrace.dashboards.run_distributions import breakdown_figure

    return _finish(breakdown_figure(_compared(traces, labels, device, rank)), None, "", theme)


def access_intervals(
    *traces: Trace, labels: Sequence[str] = (), device: str | None = None, rank: int | None = None,
    theme: Theme = "light",
) -> go.Figure:  # fmt: skip
    """Return the cumulative distribution of the access intervals of one or several runs.

    Args:
        traces: one or several traces.
        labels: name of each run; default: the names of the files.
        device: device to compare; default: the accelerator that all traces have.
        rank: rank of traces of several ranks; default: the common rank with the highest peak.
        theme: ``light`` or ``dark``.

    Raises:
        TraceError: a trace has no such rank or device, or none has access intervals.
    """
    from memtrace.dashboards.run_distributions import interval_cdf_figure

    compared = _compared(traces, labels, device, rank)
    return _finish(interval_cdf_figure(compared), compared.runs[0], "access intervals", theme)


def steps(
    *traces: Trace, labels: Sequence[str] = (), device: str | None = None, rank: int | None = None,
    theme: Theme = "light",
) -> go.Figure:  # fmt: skip
    """Return the live bytes of one or several runs, with step n of each run at the same place.

    The arguments are those of ``categories``.

    Raises:
        TraceError: a trace has no such rank or device, or none has steps.
    """
    from memtrace.dashboards.run_curves import memory_by_step_figure

    compared = _compared(traces, labels, device, rank)
    return _finish(memory_by_step_figure(compared), compared.runs[0], "steps", theme)


def step_peaks(
    *traces: Trace, labels: Sequence[str] = (), device: str | None = None, rank: int | None = None,
    theme: Theme = "light",
) -> go.Figure:  # fmt: skip
    """Return the peak of each step of one or several runs.

    The arguments are those of ``categories``.

    Raises:
        TraceError: a trace has no such rank or device, or none has two steps.
    """
    from memtrace.dashboards.run_curves import step_peaks_figure

    compared = _compared(traces, labels, device, rank)
    return _finish(step_peaks_figure(compared), compared.runs[0], "steps", theme)


def lifetimes(trace: Trace, device: str | None = None, *, rank: int | None = None, theme: Theme = "light") -> go.Figure:
    """Return the largest blocks as rectangles, from allocation to free, at their addresses.

    The arguments are those of ``timeline``.

    Raises:
        TraceError: the trace has no such rank or device, or no addresses.
    """
    from memtrace.dashboards.lifetimes import lifetimes_figure

    run = _choose(trace, device, rank)
    return _finish(lifetimes_figure(run.trace, run.device), run, "addresses", theme)


def segments(trace: Trace, device: str | None = None, *, rank: int | None = None, theme: Theme = "light") -> go.Figure:
    """Return the segments of the CUDA allocator at the peak of reserved memory: live blocks and free memory.

    The arguments are those of ``timeline``.

    Raises:
        TraceError: the trace has no such rank or device, or no segments.
    """
    from memtrace.dashboards.segments import segments_figure

    run = _choose(trace, device, rank)
    return _finish(segments_figure(run.trace, run.device), run, "segments", theme)


def ranks(trace: Trace, *, theme: Theme = "light") -> go.Figure:
    """Return a heat map of the ranks of a job and the categories at the peak of each.

    Raises:
        TraceError: the trace has a single rank.
    """
    from memtrace.dashboards.ranks import categories_figure

    figure = categories_figure(trace)
    if figure is None:
        raise TraceError(f"{trace.path or 'the trace'} has a single rank. Pass the trace of a job of several ranks.")
    return _finish(figure, None, "", theme)


def pipeline(schedule: Schedule | Simulation | SchedulePrediction, *, theme: Theme = "light") -> go.Figure:
    """Return the table of a pipeline schedule: a row for each worker, with the micro-batches in its cells.

    Args:
        schedule: a schedule, drawn by its slots; a simulation or a prediction of a plan, drawn by their times.
        theme: ``light`` or ``dark``.
    """
    from memtrace.dashboards.schedules import simulation_figure, slot_figure
    from memtrace.pipeline.plan import SchedulePrediction
    from memtrace.pipeline.simulation.simulator import Simulation

    if isinstance(schedule, SchedulePrediction):
        schedule = schedule.simulation
    figure = simulation_figure(schedule) if isinstance(schedule, Simulation) else slot_figure(schedule)
    return _finish(figure, None, "", theme)


def pipeline_memory(
    prediction: SchedulePrediction, *, capacity_bytes: int | None = None, theme: Theme = "light"
) -> go.Figure:
    """Return the predicted memory of every worker of a pipeline over time.

    Args:
        prediction: a prediction of a plan.
        capacity_bytes: memory of a worker, drawn as a line; None: unlimited.
        theme: ``light`` or ``dark``.
    """
    from memtrace.dashboards.schedules import memory_figure

    return _finish(memory_figure(prediction.memories, capacity_bytes), None, "", theme)


def _choose(trace: Trace, device: str | None, rank: int | None) -> Run:
    from memtrace.analysis.compare import match_runs

    (run,) = match_runs([trace], rank=rank, device=device)
    return run


def _compared(traces: Sequence[Trace], labels: Sequence[str], device: str | None, rank: int | None) -> Any:
    from memtrace.analysis.compare import compare_runs, match_runs
    from memtrace.dashboards.compared_runs import ComparedRuns

    if not traces:
        raise ValueError("pass at least one trace")
    runs = match_runs(traces, labels, rank=rank, device=device)
    return ComparedRuns(runs, compare_runs(runs))


def _finish(figure: go.Figure | None, run: Run | None, missing: str, theme: Theme) -> go.Figure:
    """Return a figure in the colors of a theme; TraceError where the trace lacks what the figure shows."""
    from memtrace.dashboards.themed import apply_theme

    if figure is None:
        where = "the trace" if run is None else f"{run.label}, {run.device}"
        raise TraceError(f"{where}: the trace has no {missing}, which this figure shows.")
    return apply_theme(figure, theme)
