"""Memory growth: live bytes of the allocation sites that retain most, at the end of each step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import SERIES_COLORS
from memtrace.dashboards.text import figure_text

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.growth import growth_curves, measure_growth
from memtrace.units import choose_byte_unit, format_bytes, format_count

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_POINTS: Final = 500
"""Number of steps drawn, spread evenly."""
MAX_LINES: Final = 7
"""Number of sites drawn."""


def growth_figure(trace: Trace, device: str) -> go.Figure | None:
    """Return one line per site, solid and bold for leaks; None with fewer than two steps or nothing retained.

    Args:
        trace: a single-rank trace.
        device: unused; bytes are those of all devices.
    """
    curves, step = growth_curves(trace, MAX_LINES), step_rows(trace).number
    if not curves or len(step) < 2:
        return None
    shown = np.unique(np.linspace(0, len(step) - 1, MAX_POINTS).astype(np.int64))
    divisor, unit = choose_byte_unit(float(max(curve.live_bytes.max() for curve in curves)))
    figure = go.Figure()
    for curve, color in zip(curves, SERIES_COLORS, strict=False):
        style = {"width": 3, "dash": "solid"} if curve.is_leak else {"width": 1.4, "dash": "dot"}
        figure.add_trace(
            go.Scatter(
                x=step[shown],
                y=curve.live_bytes[shown] / divisor,
                name=figure_text(("leak: " if curve.is_leak else "") + curve.site, 60),
                mode="lines",
                line={"color": color, **style},
                hovertemplate=f"%{{y:,.2f}} {unit}",
            )
        )
    figure.update_layout(
        xaxis={"title": {"text": "step"}},
        yaxis={"title": {"text": f"live at the end of the step ({unit})"}, "rangemode": "tozero"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="x unified",
        meta={"note": _note(trace)},
    )
    return figure


def _note(trace: Trace) -> str:
    growth = measure_growth(trace)
    if growth is None:
        return "Too few steps to measure growth."
    steps = format_count(growth.num_steps, "step")
    excluded = f"{format_count(growth.num_warm_up_steps, 'warm-up step')} excluded"
    if not growth.bytes_per_step:
        return f"No growth over {steps} ({excluded})."
    return f"Growth of {format_bytes(growth.bytes_per_step)} per step over {steps} ({excluded})."
