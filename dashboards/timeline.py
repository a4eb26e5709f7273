"""Live bytes of a device over time, stacked by category, as a plotly figure. The page draws its own: ``tracks.js``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import CATEGORY_COLORS, STACK_ORDER

from memtrace.analysis.timeline import compute_timeline
from memtrace.categories import CATEGORY_LABELS
from memtrace.units import choose_byte_unit, choose_time_unit, format_bytes

if TYPE_CHECKING:
    import pandas as pd

    from memtrace.format.arrays import Array
    from memtrace.trace import Trace

MAX_POINTS: Final = 4000
"""Most instants of the curve."""
_LINES: Final = (("allocated", "dot"), ("reserved", "solid"))
"""Columns drawn as lines over the stacked categories, with the dash of the line."""


def timeline_figure(trace: Trace, device: str) -> go.Figure | None:
    """Draw the live bytes by category, with lines for allocated and reserved bytes; None without allocations."""
    table = compute_timeline(trace, device, max_points=MAX_POINTS)
    return None if table.empty else draw_timeline(table)


def draw_timeline(table: pd.DataFrame) -> go.Figure:
    """Draw the stacked curve of a table of ``compute_timeline``."""
    times = _integers(table["time_ns"])
    curves = {name: _numbers(table[name]) for name in (*STACK_ORDER, "requested", "allocated", "reserved")}
    divisor, unit = choose_byte_unit(float(np.nanmax(np.concatenate(list(curves.values())), initial=0)))
    nanoseconds, time_name = choose_time_unit(float(times[-1] - min(0, int(times[0]))))
    x = times / nanoseconds
    figure = go.Figure()
    for category in STACK_ORDER:
        if curves[category].max(initial=0) > 0:
            figure.add_trace(_area(category, x, curves[category] / divisor, unit))
    for column, dash in _LINES:
        values = curves[column]
        if not np.isnan(values).all() and not np.array_equal(values, curves["requested"]):
            figure.add_trace(_line(column, dash, x, values / divisor, unit))
    top = int(np.argmax(curves["requested"]))
    figure.add_annotation(
        x=x[top],
        y=curves["requested"][top] / divisor,
        text=f"peak {format_bytes(float(curves['requested'][top]))}",
        arrowhead=2,
    )
    figure.update_layout(
        xaxis={
            "title": {"text": f"time since the start of the recording ({time_name})"},
            "unifiedhovertitle": {"text": f"%{{x:,.4~f}} {time_name}"},
        },
        yaxis={"title": {"text": unit}, "rangemode": "tozero", "tickformat": ",~r"},
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )
    return figure


def _area(category: str, x: Array, y: Array, unit: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=CATEGORY_LABELS[category],
        stackgroup="bytes",
        mode="lines",
        line={"shape": "hv", "width": 0.5, "color": CATEGORY_COLORS[category]},
        fillcolor=CATEGORY_COLORS[category],
        hovertemplate=f"%{{y:,.1f}} {unit}",
    )


def _line(column: str, dash: str, x: Array, y: Array, unit: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=column,
        meta={"ink": True},
        mode="lines",
        line={"shape": "hv", "width": 1.6, "dash": dash},
        hovertemplate=f"%{{y:,.1f}} {unit}",
    )


def _integers(column: pd.Series[Any]) -> Array:
    """Return a column without NA as int64."""
    return column.to_numpy(dtype=np.int64)


def _numbers(column: pd.Series[Any]) -> Array:
    return column.astype("Float64").to_numpy(dtype=np.float64, na_value=np.nan)
