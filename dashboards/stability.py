"""Step-to-step stability: a heat map of how much of each step matches the usual step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import BLUE, VERMILION

from memtrace.analysis.detection import detect_steps
from memtrace.analysis.stability import measure_stability
from memtrace.units import format_count, format_share

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_STEPS: Final = 1000
"""Number of steps drawn, from the end of the trace."""
_SCALE: Final = [[0, VERMILION], [0.5, "#f0c36d"], [0.9, "#8fc7e8"], [1, BLUE]]


def stability_figure(trace: Trace, device: str) -> go.Figure | None:
    """Return the share of the blocks, bytes and events of each step that match; None with fewer than two steps.

    Args:
        trace: a single-rank trace.
        device: unused; blocks are those of all devices.
    """
    stability, detected = measure_stability(trace), detect_steps(trace)
    if len(stability.step) < 2:
        return None
    step = stability.step[-MAX_STEPS:]
    shares = (stability.matching_blocks, stability.matching_bytes, stability.matching_events)
    figure = go.Figure(
        go.Heatmap(
            x=step,
            y=["blocks", "bytes", "events"],
            z=np.stack([share[-MAX_STEPS:] * 100 for share in shares]),
            zmin=0,
            zmax=100,
            colorscale=_SCALE,
            xgap=1 if len(step) <= 200 else 0,
            ygap=3,
            colorbar={"ticksuffix": " %", "thickness": 12},
            hovertemplate="step %{x}: %{z:.1f} % of %{y} match the usual step<extra></extra>",
        )
    )
    note = (
        f"Median after {format_count(stability.num_warm_up_steps, 'warm-up step')}: "
        f"{format_share(stability.median_matching_bytes)} of bytes match the usual step. "
    )
    if detected.num_steps:
        note += (
            f"{format_count(detected.num_steps, 'step')} detected in the events alone "
            f"(confidence {detected.confidence:.2f})."
        )
    else:
        note += "No steps detected in the events alone."
    figure.update_layout(xaxis={"title": {"text": "step"}}, yaxis={"showgrid": False}, meta={"note": note})
    return figure
