"""Figures of the caching allocator: segments over time, blocks and holes at the peak, the sweep of settings.

Each takes a table of `memtrace.allocator` and returns a figure bounded in size: what is left out is
said in its title.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go

from memtrace.allocator.history import History
from memtrace.allocator.infer_rules import reproduce
from memtrace.allocator.plan import plan_device, settings_table
from memtrace.allocator.requests import read_device
from memtrace.allocator.states import segment_lifetimes, state_at_peak

if TYPE_CHECKING:
    import pandas as pd

    from memtrace.allocator.replay import Prepared
    from memtrace.trace import Trace

MAX_ENTRIES: Final = 100_000
"""Longest history that the page replays: a second or two for all settings. `memtrace plan allocator` takes any."""
MAX_SEGMENTS: Final = 1500
"""Most segments drawn over time; the largest are."""
MAX_ROWS: Final = 120
"""Most segments in the state view; those with most free bytes are."""
HEIGHT: Final = 460
LIVE: Final = "#0072b2"
HOLE: Final = "#e69f00"
SMALL: Final = "#56b4e9"
_GIB: Final = 1 << 30
_MIB: Final = 1 << 20


def segments_section(trace: Trace, device: str) -> go.Figure | None:
    """Segments over time; None where the allocator left no history that replays exactly."""
    prepared = _replayed(trace, device)
    if prepared is None or not len(prepared.history.time_ns):
        return None
    times = prepared.history.time_ns
    return _untitled(segments_figure(segment_lifetimes(prepared), int(times[0]), int(times[-1])))


def state_section(trace: Trace, device: str) -> go.Figure | None:
    """Blocks and holes when most was reserved; None as for `segments_section`."""
    prepared = _replayed(trace, device)
    return None if prepared is None else _untitled(state_figure(state_at_peak(prepared)))


def sweep_section(trace: Trace, device: str) -> go.Figure | None:
    """What other settings would reserve; None as for `segments_section`."""
    prepared = _replayed(trace, device)
    if prepared is None:
        return None
    plan = plan_device(prepared.history)
    figure = _untitled(sweep_figure(settings_table([plan])))
    best, replay = plan.best, plan.replay
    if best is not None:
        told = f"To try: {best.settings.ready_line}."
    elif any(one.certainty for one in plan.predictions):
        told = "No setting here gives more than its error bar."
    else:
        told = "No setting here fits."
    if replay is not None:
        told += f" {replay.allocations_exact:,} of {replay.allocations:,} allocations replay at their recorded address."
    figure.update_layout(meta={"note": " ".join((told, *(f"Mind: {note}." for note in plan.notes)))})
    return figure


def _replayed(trace: Trace, device: str) -> Prepared | None:
    """A device's history, taken apart, where it is one that replays exactly."""
    return trace.cached(_replayed, device)


def _replayed(trace: Trace, device: str) -> Prepared | None:
    source = read_device(trace, device)
    if not isinstance(source, History) or len(source.kind) > MAX_ENTRIES:
        return None
    prepared, result = reproduce(source)
    return prepared if result.is_exact else None


def _untitled(figure: go.Figure) -> go.Figure:
    """The page has titles of its own; what a title says of what is left out becomes the note."""
    left_out = figure.layout.title.text.partition(" (")[2].rstrip(")")
    note = f"{left_out[0].upper()}{left_out[1:]}." if left_out else ""
    figure.update_layout(title=None, meta={"note": note}, margin={"t": 40})
    return figure


def segments_figure(segments: pd.DataFrame, first_ns: int, last_ns: int) -> go.Figure:
    """Each segment as a bar from its birth to its end, as high as it is long; `segments` of
    `segment_lifetimes`.

    `first_ns`, `last_ns`: the history, at whose ends bars of older segments begin and of segments still held
    stop.
    """
    shown = segments.nlargest(MAX_SEGMENTS, "size_bytes").sort_values("address")
    begin = (shown["from_ns"].fillna(first_ns).to_numpy(np.int64) - first_ns) / 1e6
    end = (shown["to_ns"].fillna(last_ns).to_numpy(np.int64) - first_ns) / 1e6
    size = shown["size_bytes"].to_numpy(np.float64) / _GIB
    top = np.cumsum(size)
    figure = go.Figure()
    small = shown["small"].to_numpy(np.bool_)
    for name, rows, colour in (("large segments", ~small, LIVE), ("small segments", small, SMALL)):
        boxes = (begin[rows], end[rows], (top - size)[rows], top[rows])
        text = [f"{s * 1024:,.0f} MiB at {a:#x}" for s, a in zip(size[rows], shown["address"][rows], strict=True)]
        if rows.any():
            figure.add_trace(_boxes(name, boxes, colour, text))
    title = _title("Segments over time", len(shown), len(segments), "largest segments")
    return _styled(figure, title, "time (ms)", "segments, stacked by address (GiB)")


def state_figure(state: pd.DataFrame) -> go.Figure:
    """One row a segment, its live blocks and the free holes between them; `state` of `state_at_peak`."""
    holes = state["size_bytes"].where(~state["live"], 0).groupby(state["segment"]).sum()
    rows = holes.sort_values(ascending=False, kind="stable").index[:MAX_ROWS]
    place = {segment: row for row, segment in enumerate(rows)}
    shown = state[state["segment"].isin(rows)]
    y = shown["segment"].map(place).to_numpy(np.float64)
    begin = ((shown["address"] - shown["segment_address"]) / _MIB).to_numpy(np.float64)
    length = (shown["size_bytes"] / _MIB).to_numpy(np.float64)
    live = shown["live"].to_numpy(np.bool_)
    figure = go.Figure()
    for name, mask, colour in (("live", live, LIVE), ("free", ~live, HOLE)):
        boxes = (begin[mask], (begin + length)[mask], y[mask] - 0.42, y[mask] + 0.42)
        text = [f"{name}: {size:,.2f} MiB" for size in length[mask]]
        if mask.any():
            figure.add_trace(_boxes(name, boxes, colour, text))
    title = _title("Blocks and holes when most was reserved", len(rows), len(holes), "segments with most free bytes")
    figure = _styled(figure, title, "offset in the segment (MiB)", "segment, most free bytes first")
    figure.update_yaxes(autorange="reversed", showticklabels=False)
    return figure


def sweep_figure(settings: pd.DataFrame, capacity: int | None = None) -> go.Figure:
    """Reserved peak of each setting, split in allocated and not; `settings` of `settings_table`, of one
    device."""
    table = settings.iloc[::-1]
    peak = table["peak_reserved_bytes"].to_numpy(np.float64) / _GIB
    idle = table["unallocated_at_peak_bytes"].to_numpy(np.float64) / _GIB
    spread = table["spread_bytes"].to_numpy(np.float64) / _GIB / 2
    names = [
        name + (" (recorded)" if recorded else "")
        for name, recorded in zip(table["setting"], table["is_recorded"], strict=True)
    ]
    figure = go.Figure()
    figure.add_trace(go.Bar(name="allocated", y=names, x=peak - idle, orientation="h", marker_color=LIVE))
    errors = {"type": "data", "array": spread, "visible": bool(spread.any())}
    figure.add_trace(
        go.Bar(
            name="reserved, not allocated",
            y=names,
            x=idle,
            orientation="h",
            marker_color=HOLE,
            error_x=errors,
        )
    )
    if capacity is not None:
        figure.add_vline(x=capacity / _GIB, line_dash="dash", annotation_text="capacity")
    figure.update_layout(barmode="stack", height=140 + 34 * len(table))
    return _styled(figure, "Reserved at the peak, by setting", "GiB", "")


def reserved_figure(curves: Mapping[str, pd.DataFrame]) -> go.Figure:
    """Bytes reserved over time under each setting; the tables of `reserved_over_time` by setting."""
    figure = go.Figure()
    first = min((int(curve["time_ns"].min()) for curve in curves.values() if len(curve)), default=0)
    for name, curve in curves.items():
        x = (curve["time_ns"].to_numpy(np.int64) - first) / 1e6
        y = curve["reserved_bytes"].to_numpy(np.float64) / _GIB
        figure.add_trace(go.Scatter(name=name, x=x, y=y, mode="lines", line_shape="hv"))
    return _styled(figure, "Reserved over time, by setting", "time (ms)", "GiB")


def _boxes(name: str, boxes: tuple[Any, Any, Any, Any], colour: str, text: list[str]) -> go.Scatter:
    """Rectangles (left, right, bottom, top) as one filled line, so that thousands stay one trace."""
    left, right, bottom, top = boxes
    gap = np.full(len(left), np.nan)
    x = np.stack([left, right, right, left, left, gap], axis=1).ravel()
    y = np.stack([bottom, bottom, top, top, bottom, gap], axis=1).ravel()
    return go.Scatter(
        name=name,
        x=x,
        y=y,
        mode="lines",
        fill="toself",
        fillcolor=colour,
        text=np.repeat(text, 6),
        line={"width": 0.5, "color": "white"},
        hoverinfo="text",
        hoveron="points",
    )


def _title(what: str, shown: int, whole: int, which: str) -> str:
    return what if shown == whole else f"{what} (the {shown:,} {which} of {whole:,})"


def _styled(figure: go.Figure, title: str, x: str, y: str) -> go.Figure:
    figure.update_layout(
        title=title,
        legend={"orientation": "h", "y": 1, "yanchor": "bottom"},
        margin={"l": 60, "r": 20, "t": 90},
    )
    if figure.layout.height is None:
        figure.update_layout(height=HEIGHT)
    figure.update_xaxes(title=x)
    figure.update_yaxes(title=y)
    return figure
