"""Steps: peak memory, memory live at the end, duration and time waiting for data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from memtrace.analysis.steps import records_data_waits, step_columns
from memtrace.units import choose_byte_unit, choose_time_unit

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_STEPS: Final = 2000
"""Number of steps drawn, from the end of the trace."""


def steps_figure(trace: Trace, device: str) -> go.Figure | None:
    """Return memory above and time below, one element per step; None without steps.

    Args:
        trace: a single-rank trace.
        device: unused; bytes are those of all devices.
    """
    columns = step_columns(trace)
    num_steps, last = len(columns), slice(-MAX_STEPS, None)
    if not num_steps:
        return None
    step = columns.step[last]
    divisor, unit = choose_byte_unit(float(columns.peak_bytes[last].max()))
    nanoseconds, time_unit = choose_time_unit(float(columns.duration_ns[last].max()))
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    for num_bytes, label, color in (
        (columns.peak_bytes[last], "peak", "#0072b2"),
        (columns.live_end_bytes[last], "live at the end of the step", "#e69f00"),
    ):
        figure.add_trace(
            go.Scatter(
                x=step,
                y=num_bytes / divisor,
                name=label,
                mode="lines+markers",
                marker={"size": 5},
                line={"color": color},
                hovertemplate=f"%{{y:,.2f}} {unit}",
            ),
            row=1,
            col=1,
        )
    duration, wait = columns.duration_ns[last], columns.data_wait_ns[last]
    bars = [(duration, "duration", "#8e98a3")]
    if records_data_waits(trace):
        bars = [(duration - wait, "computing", "#8e98a3"), (wait, "waiting for data", "#cc79a7")]
    for time_ns, label, color in bars:
        figure.add_trace(
            go.Bar(
                x=step,
                y=time_ns / nanoseconds,
                name=label,
                marker={"color": color},
                hovertemplate=f"%{{y:,.2f}} {time_unit}",
            ),
            row=2,
            col=1,
        )
    figure.update_layout(
        barmode="stack",
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.03, "yanchor": "bottom", "x": 0},
        meta={"note": f"Last {MAX_STEPS:,} of {num_steps:,} steps." if num_steps > MAX_STEPS else ""},
    )
    figure.update_yaxes(title_text=unit, rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text=time_unit, rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title_text="step", row=2, col=1)
    return figure
