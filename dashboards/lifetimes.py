"""Gantt chart of the blocks: x is time, y is the address, height is the size.

Source of the chart: "Pinpointing the Memory Behaviors of DNN Training" (ISPASS 2021).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import CATEGORY_COLORS, GRAY, STACK_ORDER

from memtrace.analysis.block_lifetimes import compute_block_lifetimes
from memtrace.analysis.peak import find_peak
from memtrace.categories import CATEGORY_LABELS
from memtrace.format.schema import CATEGORIES
from memtrace.units import choose_time_unit, format_bytes, format_count

if TYPE_CHECKING:
    from memtrace.format.arrays import Array
    from memtrace.trace import Trace

MAX_BLOCKS: Final = 2500


def lifetimes_figure(trace: Trace, device: str) -> go.Figure | None:
    """Draw the largest blocks of a device as rectangles.

    Returns:
        None where the trace has no addresses (fake tensors) or no allocations.
    """
    lifetimes = compute_block_lifetimes(trace, device, MAX_BLOCKS)
    if not len(lifetimes.block_ids):
        return None
    divisor, unit = choose_time_unit(float(lifetimes.end_ns.max()))
    figure = go.Figure()
    for category in STACK_ORDER:
        rows = lifetimes.category == CATEGORIES.index(category)
        if rows.any():
            start, end = lifetimes.start_ns[rows] / divisor, lifetimes.end_ns[rows] / divisor
            figure.add_trace(
                _draw_rectangles(category, start, end, lifetimes.offset_bytes[rows], lifetimes.size_bytes[rows])
            )
    peak_ns = find_peak(trace, device).time_ns
    if peak_ns is not None:
        figure.add_vline(x=peak_ns / divisor, line={"dash": "dot", "width": 1.5, "color": GRAY},
                         annotation_text="peak", annotation_position="top")  # fmt: skip
    figure.update_layout(
        meta={"note": f"The {len(lifetimes.block_ids):,} largest of "
              f"{format_count(lifetimes.num_blocks, 'block')}, each {format_bytes(int(lifetimes.size_bytes.min()))} or "
              "larger. Gaps between used addresses are omitted."},
        xaxis={"title": {"text": f"time since the start of the recording ({unit})"}},
        yaxis={"title": {"text": "address without gaps (MiB)"}, "tickformat": ",~r"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="closest",
    )  # fmt: skip
    return figure


def _draw_rectangles(category: str, start: Array, end: Array, offset_bytes: Array, size_bytes: Array) -> go.Scatter:
    """Draw all rectangles as one filled trace: five corners per rectangle, and a break between rectangles."""
    gap = np.full(len(start), np.nan)
    bottom, top = offset_bytes / 2**20, (offset_bytes + size_bytes) / 2**20
    return go.Scatter(
        x=np.stack([start, end, end, start, start, gap], axis=1).ravel(),
        y=np.stack([bottom, bottom, top, top, bottom, gap], axis=1).ravel(),
        name=CATEGORY_LABELS[category],
        mode="lines",
        fill="toself",
        line={"width": 0.4, "color": CATEGORY_COLORS[category]},
        fillcolor=CATEGORY_COLORS[category],
        hoverinfo="name",
    )
