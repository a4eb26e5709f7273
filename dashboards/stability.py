"""Are the steps alike? A heat map of what matches the usual step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import plotly.graph_objects as go

from memtrace.analysis.detection import detect
from memtrace.analysis.stability import stability
from memtrace.units import format_share

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_STEPS: Final = 1000
_SCALE: Final = [[0, "#d55e00"], [0.5, "#f0c36d"], [0.9, "#8fc7e8"], [1, "#0072b2"]]


def stability_figure(trace: Trace, device: str) -> go.Figure | None:
    """Share of the events, bytes and roles of each step that match the usual one, all devices. None without steps.

    Of many steps the last ``MAX_STEPS`` are drawn.
    """
    found = stability(trace)
    if len(found.step) < 2:
        return None
    step = found.step[-MAX_STEPS:]
    rows = [values[-MAX_STEPS:] * 100 for values in (found.roles, found.bytes, found.events)]
    figure = go.Figure(
        go.Heatmap(
            x=step,
            y=["blocks", "bytes", "events"],
            z=np.stack(rows),
            zmin=0,
            zmax=100,
            colorscale=_SCALE,
            xgap=1 if len(step) <= 200 else 0,
            ygap=3,
            colorbar={"ticksuffix": " %", "thickness": 12},
            hovertemplate="step %{x}: %{z:.1f} % of the %{y} match the usual step<extra></extra>",
        )
    )
    even, sure = found.usual_bytes or 0.0, detect(trace)
    note = f"After warm-up a usual step matches the others in {format_share(even, 1)} of its bytes. "
    if sure.num_steps:
        note += f"The events alone show {sure.num_steps:,} steps (confidence {sure.confidence:.2f})."
    else:
        note += "The events alone show no steps."
    figure.update_layout(xaxis={"title": {"text": "step"}}, yaxis={"showgrid": False}, meta={"note": note})
    return figure
