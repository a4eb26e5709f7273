"""The block Gantt chart of "Pinpointing the Memory Behaviors of DNN Training" (x time, y address, height size)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import CATEGORY_COLORS, CATEGORY_LABELS, STACK_ORDER

from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import peak
from memtrace.format.schema import CATEGORIES
from memtrace.units import choose_time_unit, format_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memtrace.trace import Trace

MAX_BLOCKS: Final = 2500


def lifetimes_figure(trace: Trace, device: str) -> go.Figure | None:
    """The largest blocks as rectangles: from allocation to free, at their address, as high as their size.

    Addresses are packed: gaps between the regions that were ever used are cut out, else a process's address space
    would be empty for the eye. None where addresses are not known (fake tensors) or nothing was allocated.
    """
    found = blocks(trace)
    here = np.flatnonzero((found.device == trace.devices.index(device)) & (found.address >= 0) & (found.size > 0))
    if not len(here):
        return None
    chosen = here[np.argsort(-found.size[here], kind="stable")[:MAX_BLOCKS]]
    time = trace.columns("events", "time_ns")["time_ns"]
    start = np.where(found.alloc_ns[chosen] >= 0, found.alloc_ns[chosen], int(time[0]))
    end = np.where(found.free_ns[chosen] >= 0, found.free_ns[chosen], int(time[-1]))
    low, _ = packed_addresses(found.address[chosen], found.size[chosen])
    divisor, unit = choose_time_unit(float(time[-1]))
    figure = go.Figure()
    for category in STACK_ORDER:
        mine = found.category[chosen] == CATEGORIES.index(category)
        if mine.any():
            figure.add_trace(
                _rectangles(category, start[mine] / divisor, end[mine] / divisor, low[mine], found.size[chosen][mine])
            )
    moment = peak(trace, device).time_ns
    if moment is not None:
        figure.add_vline(x=moment / divisor, line={"dash": "dot", "width": 1.5, "color": "#8c9299"},
                         annotation_text="peak", annotation_position="top")  # fmt: skip
    figure.update_layout(
        meta={"ns_per_unit": divisor,
              "note": f"The {len(chosen):,} largest of {len(here):,} blocks, "
              f"from {format_bytes(int(found.size[chosen].min()))} up. "
              "Gaps between used addresses are cut out."},
        xaxis={"title": {"text": f"time since the recording began ({unit})"}},
        yaxis={"title": {"text": "address, packed (MiB)"}, "tickformat": ",~r"},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="closest",
    )  # fmt: skip
    return figure


def packed_addresses(address: NDArray[Any], size: NDArray[Any]) -> tuple[NDArray[Any], int]:
    """Addresses with the gaps that no block ever covers taken out, and the bytes that remain."""
    order = np.argsort(address, kind="stable")
    reach = np.maximum.accumulate(address[order] + size[order])
    gap = np.zeros(len(order), np.int64)
    gap[1:] = np.maximum(0, address[order][1:] - reach[:-1])
    packed = np.empty(len(order), np.int64)
    packed[order] = address[order] - address[order][0] - np.cumsum(gap)
    return packed, int((packed + size).max())


def _rectangles(
    category: str, start: NDArray[Any], end: NDArray[Any], low: NDArray[Any], size: NDArray[Any]
) -> go.Scatter:
    """One filled trace: five corners a rectangle, a break between two."""
    nothing = np.full(len(start), np.nan)
    bottom, top = low / 2**20, (low + size) / 2**20
    return go.Scatter(
        x=np.stack([start, end, end, start, start, nothing], axis=1).ravel(),
        y=np.stack([bottom, bottom, top, top, bottom, nothing], axis=1).ravel(),
        name=CATEGORY_LABELS[category],
        mode="lines",
        fill="toself",
        line={"width": 0.4, "color": CATEGORY_COLORS[category]},
        fillcolor=CATEGORY_COLORS[category],
        hoverinfo="name",
    )
