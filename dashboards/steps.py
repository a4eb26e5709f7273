"""The steps: are they alike, does something grow, do they wait for data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from memtrace.analysis.steps import step_columns, tells_waits
from memtrace.units import choose_byte_unit, choose_time_unit

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_STEPS: Final = 2000


def steps_figure(trace: Trace, device: str) -> go.Figure | None:
    """Peak and bytes kept at each step's end above, duration and wait for data below. None without steps.

    Of many steps the last ``MAX_STEPS`` are drawn. Bytes are those of all devices.
    """
    columns = {name: values[-MAX_STEPS:] for name, values in step_columns(trace).items()}
    number = columns["step"]
    if not len(number):
        return None
    divisor, unit = choose_byte_unit(float(columns["peak_bytes"].max()))
    ns, time_name = choose_time_unit(float(columns["duration_ns"].max()))
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    for name, label, color in (
        ("peak_bytes", "peak", "#0072b2"),
        ("live_end_bytes", "live at its end", "#e69f00"),
    ):
        figure.add_trace(
            go.Scatter(
                x=number,
                y=columns[name] / divisor,
                name=label,
                mode="lines+markers",
                marker={"size": 5},
                line={"color": color},
                hovertemplate=f"%{{y:,.2f}} {unit}",
            ),
            row=1,
            col=1,
        )
    wait = columns["data_wait_ns"]
    bars = [(columns["duration_ns"] - wait, "working", "#8e98a3"), (wait, "waiting for data", "#cc79a7")]
    if not tells_waits(trace):
        bars = [(columns["duration_ns"], "duration", "#8e98a3")]
    for values, label, color in bars:
        figure.add_trace(
            go.Bar(
                x=number,
                y=np.asarray(values) / ns,
                name=label,
                marker={"color": color},
                hovertemplate=f"%{{y:,.2f}} {time_name}",
            ),
            row=2,
            col=1,
        )
    figure.update_layout(
        barmode="stack", hovermode="x unified", legend={"orientation": "h", "y": 1.03, "yanchor": "bottom", "x": 0}
    )
    figure.update_yaxes(title_text=unit, rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text=time_name, rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title_text="step", row=2, col=1)
    shown = len(number)
    total = len(step_columns(trace)["step"])
    figure.update_layout(meta={"note": f"The last {shown:,} of {total:,} steps." if shown < total else ""})
    return figure
