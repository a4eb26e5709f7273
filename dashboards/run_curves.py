"""Live memory and step peaks of several runs on one axis."""

from __future__ import annotations

from typing import Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.compared_runs import LEGEND_ABOVE, MAX_CURVES, ComparedRuns, axis_labels, note_left_out
from memtrace.dashboards.palette import (
    series_line,
)

from memtrace.analysis.aligned_curves import aligned_curve, aligned_step_peaks
from memtrace.analysis.compare import Run
from memtrace.units import (
    choose_byte_unit,
    choose_time_unit,
    format_bytes,
)

MAX_CURVE_POINTS: Final = 60_000
"""Largest number of points in the curves of all runs of a figure."""
MAX_RUN_POINTS: Final = 6_000
"""Largest number of points in the curve of one run."""


def memory_by_step_figure(compared: ComparedRuns) -> go.Figure | None:
    """Return the live bytes of the runs with step n of each at the same place; None where no run has steps."""
    figure = _curves(compared, "step_position", 1.0)
    if figure is None:
        return None
    figure.update_xaxes(title_text="step", tickformat="d")
    return figure


def memory_by_time_figure(compared: ComparedRuns) -> go.Figure | None:
    """Return the live bytes of the runs over the time since the end of their warm-up; None without times."""
    timed = [run for run in compared.runs if run.trace.has_times]
    longest = max((_duration_ns(run) for run in timed), default=0)
    nanoseconds, unit = choose_time_unit(longest)
    figure = _curves(ComparedRuns(tuple(timed), compared.comparison), "time_ns", nanoseconds)
    if figure is None:
        return None
    figure.update_xaxes(title_text=f"time ({unit})")
    # Warm-up can take longer than all other steps: the figure begins after it, unless a run has its peak only there.
    if all(curve.y[curve.x >= 0].max(initial=0) >= curve.y.max() for curve in figure.data):
        figure.update_xaxes(range=[0, max(curve.x[-1] for curve in figure.data)])
    return figure


def _duration_ns(run: Run) -> int:
    times = run.trace.columns("events", "time_ns")["time_ns"]
    return int(times[-1] - times[0]) if len(times) else 0


def _curves(compared: ComparedRuns, column: str, per_unit: float) -> go.Figure | None:
    runs = compared.runs[:MAX_CURVES]
    if not runs:
        return None
    labels = axis_labels([run.label for run in runs])
    divisor, unit = choose_byte_unit(max(run.peak_bytes for run in compared.comparison.runs))
    num_points = min(MAX_RUN_POINTS, MAX_CURVE_POINTS // len(runs))
    figure = go.Figure()
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        curve = aligned_curve(run, num_points).dropna(subset=[column])
        if curve.empty:
            continue
        figure.add_trace(
            go.Scatter(
                x=curve[column].to_numpy(dtype=np.float64) / per_unit,
                y=curve["bytes"].to_numpy(dtype=np.float64) / divisor,
                name=label,
                mode="lines",
                line={**series_line(number), "shape": "hv", "width": 1.4},
                hovertemplate=f"%{{y:,.4~r}} {unit}",
            )
        )
    if not figure.data:
        return None
    figure.update_layout(
        hovermode="x unified",
        legend=LEGEND_ABOVE,
        showlegend=True,
        yaxis={"title": {"text": unit}, "rangemode": "tozero"},
        meta={"note": note_left_out(len(compared.runs), MAX_CURVES, "drawn")},
    )
    return figure


def step_peaks_figure(compared: ComparedRuns) -> go.Figure | None:
    """Return the peak of each step of the runs; None where no run has two steps."""
    runs = compared.runs[:MAX_CURVES]
    labels = axis_labels([run.label for run in runs])
    divisor, unit = choose_byte_unit(max(run.peak_bytes for run in compared.comparison.runs))
    figure = go.Figure()
    longest = 0
    for number, (run, label) in enumerate(zip(runs, labels, strict=True)):
        peaks = aligned_step_peaks(run, min(MAX_RUN_POINTS, MAX_CURVE_POINTS // len(runs)))
        longest = max(longest, len(peaks))
        if len(peaks):
            figure.add_trace(
                go.Scatter(
                    x=peaks["step"].to_numpy(),
                    y=peaks["peak_bytes"].to_numpy(dtype=np.float64) / divisor,
                    name=label,
                    mode="lines+markers" if len(peaks) <= 60 else "lines",
                    line={**series_line(number), "width": 1.6},
                    customdata=[format_bytes(size) for size in peaks["peak_bytes"].tolist()],
                    hovertemplate="%{customdata}",
                )
            )
    if longest < 2:
        return None
    figure.update_layout(hovermode="x unified", legend=LEGEND_ABOVE, showlegend=True,
                         xaxis={"title": {"text": "step"}, "tickformat": "d"},
                         yaxis={"title": {"text": f"peak of the step ({unit})"}, "rangemode": "tozero"},
                         meta={"note": note_left_out(len(compared.runs), MAX_CURVES, "drawn")})  # fmt: skip
    return figure
