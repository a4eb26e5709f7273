"""What grows: the live bytes of the lines that keep most, at the end of every step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.text import figure_text

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.leaks import growth_curves, leaks
from memtrace.units import choose_byte_unit, format_bytes

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_POINTS: Final = 500
MAX_LINES: Final = 7
_COLORS: Final = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c9299")


def growth_figure(trace: Trace, device: str) -> go.Figure | None:
    """One line a site: bytes made in steps and live at each step's end, all devices; leaks are bold. None without."""
    curves = growth_curves(trace, MAX_LINES)
    number = step_rows(trace).number
    if not curves or len(number) < 2:
        return None
    places = np.unique(np.linspace(0, len(number) - 1, MAX_POINTS).astype(np.int64))
    divisor, unit = choose_byte_unit(float(max(live.max() for _, live, _ in curves)))
    figure = go.Figure()
    for (name, live, leaks_here), color in zip(curves, _COLORS, strict=False):
        figure.add_trace(
            go.Scatter(
                x=number[places],
                y=live[places] / divisor,
                name=figure_text(("grows: " if leaks_here else "") + name, 60),
                mode="lines",
                line={"color": color, "width": 3 if leaks_here else 1.4, "dash": "solid" if leaks_here else "dot"},
                hovertemplate=f"%{{y:,.2f}} {unit}",
            )
        )
    found = leaks(trace)
    if not found.num_steps:
        note = "Too few steps to tell what grows."
    elif found.bytes_per_step:
        note = f"{format_bytes(found.bytes_per_step)} a step stay live over {found.num_steps:,} steps after warm-up."
    else:
        note = "Nothing grows: what is kept was made once."
    figure.update_layout(
        xaxis={"title": {"text": "step"}},
        yaxis={"title": {"text": f"live at its end ({unit})"}, "rangemode": "tozero"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="x unified",
        meta={"note": note},
    )
    return figure
