"""The segments of a CUDA device at the peak of reserved memory: their live blocks and the free memory between them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import BUBBLE_COLOR, CATEGORY_COLORS, STACK_ORDER

from memtrace.analysis.blocks import blocks
from memtrace.analysis.device_state import DeviceState, device_state_at, has_segments
from memtrace.analysis.peak import find_peak
from memtrace.categories import CATEGORY_LABELS
from memtrace.format.schema import CATEGORIES
from memtrace.units import choose_byte_unit, format_bytes, format_count

if TYPE_CHECKING:
    from memtrace.format.arrays import Array
    from memtrace.trace import Trace

MAX_SEGMENTS: Final = 40
"""Largest number of segments in the figure."""
MAX_BLOCKS: Final = 4_000
"""Largest number of blocks in the figure."""


def segments_figure(trace: Trace, device: str) -> go.Figure | None:
    """Return the largest segments of a device as rows of live blocks and free memory; None without segments."""
    code = trace.devices.index(device)
    top = find_peak(trace, device)
    if not has_segments(trace, code) or top.reserved is None:
        return None
    state = device_state_at(trace, code, top.reserved.event)
    if not len(state.segments):
        return None
    shown = np.argsort(-state.segments.size, kind="stable")[:MAX_SEGMENTS]
    names = _segment_names(state, shown)
    divisor, unit = choose_byte_unit(float(state.segments.size.max()))
    figure = go.Figure(
        go.Bar(y=names, x=state.segments.size[shown] / divisor, orientation="h", name="free", hoverinfo="skip",
               marker={"color": BUBBLE_COLOR, "line": {"width": 0.6, "color": CATEGORY_COLORS["unknown"]}})
    )  # fmt: skip
    num_hidden = _add_blocks(figure, trace, state, shown, names, divisor)
    notes = [
        f"{format_count(len(shown), 'segment')} of {len(state.segments):,}, the largest; "
        f"{format_bytes(int(state.segments.size.sum()))} reserved, {format_bytes(int(state.free.size.sum()))} free."
    ]
    if num_hidden:
        notes.append(f"{format_count(num_hidden, 'smaller block')} not drawn.")
    figure.update_layout(
        barmode="overlay",
        bargap=0.2,
        height=120 + 22 * len(shown),
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        xaxis={"title": {"text": f"offset in the segment ({unit})"}},
        yaxis={"autorange": "reversed", "type": "category", "showgrid": False},
        meta={"note": " ".join(notes)},
    )
    return figure


def _segment_names(state: DeviceState, shown: Array) -> list[str]:
    """Return the address and the size of each segment, which tell it from the others."""
    return [
        f"0x{int(state.segments.address[row]) & (2**64 - 1):x}, {format_bytes(int(state.segments.size[row]))}"
        for row in shown.tolist()
    ]


def _add_blocks(
    figure: go.Figure, trace: Trace, state: DeviceState, shown: Array, names: list[str], divisor: int
) -> int:
    """Add the live blocks of the shown segments by category; return how many are too small to be drawn."""
    row_of_segment = np.full(len(state.segments) + 1, -1)
    row_of_segment[shown] = np.arange(len(shown))
    live = np.flatnonzero(row_of_segment[state.live.segment] >= 0)
    drawn = live[np.argsort(-state.live.size[live], kind="stable")[:MAX_BLOCKS]]
    category = blocks(trace).category[state.live.block[drawn]]
    for name in STACK_ORDER:
        chosen = drawn[category == CATEGORIES.index(name)]
        if len(chosen):
            segment = state.live.segment[chosen]
            figure.add_trace(
                go.Bar(
                    y=[names[row] for row in row_of_segment[segment].tolist()],
                    base=(state.live.address[chosen] - state.segments.address[segment]) / divisor,
                    x=state.live.size[chosen] / divisor,
                    orientation="h",
                    name=CATEGORY_LABELS[name],
                    marker={"color": CATEGORY_COLORS[name], "line": {"width": 0.3, "color": "#ffffff"}},
                    customdata=[format_bytes(size) for size in state.live.size[chosen].tolist()],
                    hovertemplate=f"{CATEGORY_LABELS[name]}: %{{customdata}}<extra></extra>",
                )
            )
    return len(live) - len(drawn)
