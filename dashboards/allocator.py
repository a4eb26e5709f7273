"""Figures of the caching allocator: blocks at the peak, and reserved memory under other settings.

Each figure takes a table of `memtrace.allocator` and is bounded in size; its note says what is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import BLUE, ORANGE
from numpy.typing import NDArray

from memtrace.allocator.exact_replay import reproduce_exactly
from memtrace.allocator.plan import MAX_SWEPT_ENTRIES, settings_table, sweep_device
from memtrace.allocator.requests import history_rows
from memtrace.allocator.state_tables import block_map_at_peak, free_bytes_by_segment
from memtrace.analysis.options import DEFAULT_OPTIONS, AnalysisOptions
from memtrace.units import choose_byte_unit, choose_time_unit, format_bytes, format_count

if TYPE_CHECKING:
    import pandas as pd

    from memtrace.allocator.replay import PreparedHistory, ReplayResult
    from memtrace.trace import Trace

MAX_ROWS: Final = 120
"""Most segments in the block map: those with most free memory."""
FIGURE_HEIGHT: Final = 460
LIVE_COLOR: Final = BLUE
FREE_COLOR: Final = ORANGE


def state_section(trace: Trace, device: str) -> go.Figure | None:
    """Return the blocks at the peak of reserved memory; None where there is no history that replays exactly."""
    reproduced = _reproduce(trace, device)
    return None if reproduced is None else block_map_figure(block_map_at_peak(reproduced[0]))


def sweep_section(trace: Trace, device: str, options: AnalysisOptions = DEFAULT_OPTIONS) -> go.Figure | None:
    """Return the reserved memory under other settings; None as in `state_section`."""
    reproduced = _reproduce(trace, device)
    if reproduced is None:
        return None
    _, result = reproduced
    plan = sweep_device(trace, device, options.capacity_bytes)
    figure = sweep_figure(settings_table(plan))
    check = (
        f"The model reproduces the recording: {result.num_allocations_exact:,} of "
        f"{format_count(result.num_allocations, 'allocation')} replay at their recorded address."
    )
    figure.update_layout(meta={"note": " ".join((*plan.advice, *plan.notes, check))})
    return figure


def _reproduce(trace: Trace, device: str) -> tuple[PreparedHistory, ReplayResult] | None:
    """Replay the history of a device; None where it has none, is too long for the page, or does not replay exactly."""
    return None if len(history_rows(trace, device)) > MAX_SWEPT_ENTRIES else reproduce_exactly(trace, device)


def block_map_figure(blocks: pd.DataFrame) -> go.Figure:
    """Draw one row per segment with its live and free blocks; `blocks` is the table of `block_map_at_peak`."""
    free = free_bytes_by_segment(blocks)
    segments = free.index[:MAX_ROWS]
    place = {segment: row for row, segment in enumerate(segments)}
    shown = blocks[blocks["segment"].isin(segments)]
    row = shown["segment"].map(place).to_numpy(np.float64)
    start = (shown["address"] - shown["segment_address"]).to_numpy(np.int64)
    size = shown["size_bytes"].to_numpy(np.int64)
    num_bytes, byte_name = choose_byte_unit(int((start + size).max(initial=0)))
    live = shown["live"].to_numpy(np.bool_)
    text = [
        f"{'Live' if is_live else 'Free'} block: {format_bytes(int(bytes_))}"
        for is_live, bytes_ in zip(live, size, strict=True)
    ]
    boxes = _Boxes(start / num_bytes, (start + size) / num_bytes, row - 0.42, row + 0.42, np.array(text, object))
    figure = go.Figure()
    for name, rows, color in (("Live", live, LIVE_COLOR), ("Free", ~live, FREE_COLOR)):
        if rows.any():
            figure.add_trace(boxes.take(rows).as_trace(name, color))
    note = _left_out_note(len(segments), len(free), "segments with most free memory")
    figure = _styled(figure, f"Offset in the segment ({byte_name})", "Segments, most free memory first", note)
    figure.update_yaxes(autorange="reversed", showticklabels=False)
    return figure


def sweep_figure(settings: pd.DataFrame, capacity: int | None = None) -> go.Figure:
    """Draw the peak of reserved memory under each setting, split into allocated and unused.

    Args:
        settings: the table of `settings_table`.
        capacity: bytes that the device gives, drawn as a line; None: unknown.
    """
    table = settings.iloc[::-1]
    num_bytes, byte_name = choose_byte_unit(int(table["peak_reserved_bytes"].max()))
    peak = table["peak_reserved_bytes"].to_numpy(np.float64) / num_bytes
    unused = table["unused_at_peak_bytes"].to_numpy(np.float64) / num_bytes
    spread = table["spread_bytes"].to_numpy(np.float64) / num_bytes / 2
    names = [
        name + (" (recorded)" if is_recorded else "")
        for name, is_recorded in zip(table["setting"], table["is_recorded"], strict=True)
    ]
    text = [
        f"{name}: peak {format_bytes(int(peak_bytes))}, {format_bytes(int(unused_bytes))} unused"
        for name, peak_bytes, unused_bytes in zip(
            names, table["peak_reserved_bytes"], table["unused_at_peak_bytes"], strict=True
        )
    ]
    errors = {"type": "data", "array": spread, "visible": bool(spread.any())}
    figure = go.Figure()
    for name, widths, color, error in (
        ("Allocated", peak - unused, LIVE_COLOR, None),
        ("Reserved but unused", unused, FREE_COLOR, errors),
    ):
        figure.add_trace(
            go.Bar(
                name=name,
                y=names,
                x=widths,
                orientation="h",
                marker_color=color,
                error_x=error,
                text=text,
                textposition="none",
                hoverinfo="text",
            )
        )
    if capacity is not None:
        figure.add_vline(x=capacity / num_bytes, line_dash="dash", annotation_text="Capacity")
    figure.update_layout(barmode="stack", height=140 + 34 * len(table))
    return _styled(figure, f"Peak of reserved memory ({byte_name})", "")


def reserved_figure(curves: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Draw reserved memory over time under each setting; `curves` has the tables of `reserved_over_time` by setting."""
    filled = [curve for curve in curves.values() if len(curve)]
    first = min((int(curve["time_ns"].min()) for curve in filled), default=0)
    nanoseconds, time_name = choose_time_unit(max((int(curve["time_ns"].max()) for curve in filled), default=0) - first)
    num_bytes, byte_name = choose_byte_unit(max((int(curve["reserved_bytes"].max()) for curve in filled), default=0))
    figure = go.Figure()
    for name, curve in curves.items():
        x = (curve["time_ns"].to_numpy(np.int64) - first) / nanoseconds
        y = curve["reserved_bytes"].to_numpy(np.float64) / num_bytes
        figure.add_trace(go.Scatter(name=name, x=x, y=y, mode="lines", line_shape="hv"))
    return _styled(figure, f"Time ({time_name})", f"Reserved memory ({byte_name})")


@dataclass(frozen=True)
class _Boxes:
    """Rectangles in the coordinates of a figure, with hover texts."""

    left: NDArray[np.float64]
    right: NDArray[np.float64]
    bottom: NDArray[np.float64]
    top: NDArray[np.float64]
    text: NDArray[np.object_]

    def take(self, rows: NDArray[np.bool_]) -> _Boxes:
        return _Boxes(self.left[rows], self.right[rows], self.bottom[rows], self.top[rows], self.text[rows])

    def as_trace(self, name: str, color: str) -> go.Scatter:
        """Return the rectangles as one filled line, so that thousands of them are one trace."""
        gap = np.full(len(self.left), np.nan)
        x = np.stack([self.left, self.right, self.right, self.left, self.left, gap], axis=1).ravel()
        y = np.stack([self.bottom, self.bottom, self.top, self.top, self.bottom, gap], axis=1).ravel()
        return go.Scatter(
            name=name,
            x=x,
            y=y,
            mode="lines",
            fill="toself",
            fillcolor=color,
            text=np.repeat(self.text, 6),
            line={"width": 0.5, "color": "white"},
            hoverinfo="text",
            hoveron="points",
        )


def _left_out_note(num_shown: int, num_all: int, which: str) -> str:
    return "" if num_shown == num_all else f"The figure shows the {num_shown:,} {which} of {num_all:,}."


def _styled(figure: go.Figure, x_title: str, y_title: str, note: str = "") -> go.Figure:
    figure.update_layout(
        legend={"orientation": "h", "y": 1, "yanchor": "bottom"},
        margin={"l": 60, "r": 20, "t": 40},
        meta={"note": note},
    )
    if figure.layout.height is None:
        figure.update_layout(height=FIGURE_HEIGHT)
    figure.update_xaxes(title=x_title)
    figure.update_yaxes(title=y_title)
    return figure
