"""Steps: peak memory, memory live at the end, duration and time waiting for data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import plotly.graph_objects as go
from memtrace.dashboards.palette import BLUE, GRAY, ORANGE, PURPLE
from plotly.subplots import make_subplots

from memtrace.analysis.steps import records_data_waits, step_columns
from memtrace.units import choose_byte_unit, choose_time_unit

if TYPE_CHECKING:
    from memtrace.analysis.steps import StepColumns
    from memtrace.trace import Trace

MAX_STEPS: Final = 2000
"""Number of steps drawn, from the end of the trace."""
_DRAWN: Final = slice(-MAX_STEPS, None)


def steps_figure(trace: Trace, device: str) -> go.Figure | None:
    """Return memory above and, where times are known, time below, one element per step; None without steps.

    Args:
        trace: a single-rank trace.
        device: unused; bytes are those of all devices.
    """
    columns = step_columns(trace)
    num_steps = len(columns)
    if not num_steps:
        return None
    num_rows = 2 if trace.has_times else 1
    figure = make_subplots(rows=num_rows, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    _draw_memory(figure, columns)
    if trace.has_times:
        _draw_time(figure, columns, records_data_waits(trace))
    figure.update_layout(
        barmode="stack",
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.03, "yanchor": "bottom", "x": 0},
        meta={"note": f"Last {MAX_STEPS:,} of {num_steps:,} steps." if num_steps > MAX_STEPS else ""},
    )
    figure.update_xaxes(title_text="step", row=num_rows, col=1)
    return figure


def _draw_memory(figure: go.Figure, columns: StepColumns) -> None:
    peak_bytes, live_end_bytes = columns.peak_bytes[_DRAWN], columns.live_end_bytes[_DRAWN]
    divisor, unit = choose_byte_unit(float(peak_bytes.max()))
    for num_bytes, label, color in (
        (peak_bytes, "peak", BLUE),
        (live_end_bytes, "live at the end of the step", ORANGE),
    ):
        curve = go.Scatter(
            x=columns.step[_DRAWN],
            y=num_bytes / divisor,
            name=label,
            mode="lines+markers",
            marker={"size": 5},
            line={"color": color},
            hovertemplate=f"%{{y:,.2f}} {unit}",
        )
        figure.add_trace(curve, row=1, col=1)
    figure.update_yaxes(title_text=unit, rangemode="tozero", row=1, col=1)


def _draw_time(figure: go.Figure, columns: StepColumns, has_waits: bool) -> None:
    duration_ns, wait_ns = columns.duration_ns[_DRAWN], columns.data_wait_ns[_DRAWN]
    nanoseconds, unit = choose_time_unit(float(duration_ns.max()))
    bars = [(duration_ns, "duration", GRAY)]
    if has_waits:
        bars = [(duration_ns - wait_ns, "computing", GRAY), (wait_ns, "waiting for data", PURPLE)]
    for time_ns, label, color in bars:
        bar = go.Bar(
            x=columns.step[_DRAWN],
            y=time_ns / nanoseconds,
            name=label,
            marker={"color": color},
            hovertemplate=f"%{{y:,.2f}} {unit}",
        )
        figure.add_trace(bar, row=2, col=1)
    figure.update_yaxes(title_text=unit, rangemode="tozero", row=2, col=1)
