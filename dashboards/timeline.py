"""Live bytes of a device over time, stacked by category, with lanes for steps and phases.

The figure holds a coarse curve. ``layout.meta`` carries a finer, delta-encoded curve and the spans of the steps and
phases; the browser draws them at every zoom (``templates/timeline.js``) in the resolution of the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.delta_encoding import encode_columns
from memtrace.dashboards.palette import CATEGORY_COLORS, STACK_ORDER

from memtrace.analysis import steps_table
from memtrace.analysis.timeline import compute_timeline
from memtrace.categories import CATEGORY_LABELS
from memtrace.format.schema import PHASES, SPAN_KINDS
from memtrace.units import choose_byte_unit, choose_time_unit, format_bytes

if TYPE_CHECKING:
    import pandas as pd

    from memtrace.format.arrays import Array
    from memtrace.trace import Trace

COARSE_POINTS: Final = 1500
"""Instants of the coarse curve, which shows until the browser has decoded the finer one."""
FULL_POINTS: Final = 200_000
"""Most instants of the finer curve."""
FULL_BYTES: Final = 2_500_000
"""Most characters of base64 of the finer curve; it has fewer instants where they do not fit."""
MAX_SPANS: Final = 30_000
"""Most steps, and most phases, in their lanes."""
DRAWN_PHASES: Final = ("forward", "backward", "optimizer")
_LINES: Final = (("allocated", "dot"), ("reserved", "solid"))
"""Columns drawn as lines over the stacked categories, with the dash of the line."""


def timeline_figure(trace: Trace, device: str) -> go.Figure | None:
    """Draw the live bytes by category, with lines for allocated and reserved bytes; None without allocations."""
    coarse = compute_timeline(trace, device, max_points=COARSE_POINTS)
    if coarse.empty:
        return None
    curve = _encode_curve(trace, device)
    figure = draw_timeline(coarse)
    figure.layout.meta = {
        **figure.layout.meta, "curve": curve.encoded, "lanes": _encode_lanes(trace), "note": _resolution_note(curve),
    }  # fmt: skip
    return figure


def draw_timeline(table: pd.DataFrame) -> go.Figure:
    """Draw the stacked curve of a table of ``compute_timeline``."""
    times = _integers(table["time_ns"])
    curves = {name: _numbers(table[name]) for name in (*STACK_ORDER, "requested", "allocated", "reserved")}
    divisor, unit = choose_byte_unit(float(np.nanmax(np.concatenate(list(curves.values())), initial=0)))
    nanoseconds, time_name = choose_time_unit(float(times[-1] - min(0, int(times[0]))))
    x = times / nanoseconds
    figure = go.Figure()
    for category in STACK_ORDER:
        if curves[category].max(initial=0) > 0:
            figure.add_trace(_area(category, x, curves[category] / divisor, unit))
    for column, dash in _LINES:
        values = curves[column]
        if not np.isnan(values).all() and not np.array_equal(values, curves["requested"]):
            figure.add_trace(_line(column, dash, x, values / divisor, unit))
    top = int(np.argmax(curves["requested"]))
    figure.update_layout(
        meta={
            "kind": "timeline",
            "bytes_per_unit": divisor,
            "ns_per_unit": nanoseconds,
            "time_unit": time_name,
            "stacked": [category for category in STACK_ORDER if curves[category].max(initial=0) > 0],
            "top": float(max(np.nanmax(curve) for curve in curves.values() if not np.isnan(curve).all()) / divisor),
            "peak": {
                "time_ns": int(times[top]),
                "event": int(_integers(table["event"])[top]),
                "y": float(curves["requested"][top] / divisor),
                "text": f"peak {format_bytes(float(curves['requested'][top]))}",
            },
        },
        # The lanes of steps and phases lie between the curve and the time axis.
        xaxis={
            "title": {"text": f"time since the start of the recording ({time_name})"},
            "unifiedhovertitle": {"text": f"%{{x:,.4~f}} {time_name}"},
            "anchor": "free",
            "position": 0,
        },
        yaxis={
            "domain": [0.13, 1],
            "title": {"text": unit},
            "rangemode": "tozero",
            "fixedrange": True,
            "tickformat": ",~r",
        },
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )
    return figure


def _area(category: str, x: Array, y: Array, unit: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=CATEGORY_LABELS[category],
        meta={"column": category},
        stackgroup="bytes",
        mode="lines",
        line={"shape": "hv", "width": 0.5, "color": CATEGORY_COLORS[category]},
        fillcolor=CATEGORY_COLORS[category],
        hovertemplate=f"%{{y:,.1f}} {unit}",
    )


def _line(column: str, dash: str, x: Array, y: Array, unit: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=column,
        meta={"column": column, "ink": True},
        mode="lines",
        line={"shape": "hv", "width": 1.6, "dash": dash},
        hovertemplate=f"%{{y:,.1f}} {unit}",
    )


def _integers(column: pd.Series[Any]) -> Array:
    """Return a column without NA as int64."""
    return column.to_numpy(dtype=np.int64)


def _numbers(column: pd.Series[Any]) -> Array:
    return column.astype("Float64").to_numpy(dtype=np.float64, na_value=np.nan)


@dataclass(frozen=True)
class EncodedCurve:
    """The finest curve that fits ``FULL_BYTES``."""

    encoded: dict[str, Any]
    """Result of ``encode_columns``: time_us, event and a column of bytes per category and line."""
    num_points: int
    is_complete: bool
    """Whether the curve has every change of the recording."""


def _encode_curve(trace: Trace, device: str) -> EncodedCurve:
    max_points = FULL_POINTS
    while True:
        table = compute_timeline(trace, device, max_points=max_points)
        columns = {"time_us": _integers(table["time_ns"]) // 1000, "event": _integers(table["event"])}
        for name in (*STACK_ORDER, "allocated", "reserved"):
            if not table[name].isna().any():
                columns[name] = _integers(table[name])
        encoded = encode_columns(columns)
        if len(encoded["data"]) <= FULL_BYTES:
            return EncodedCurve(encoded, len(table), is_complete=len(table) < max_points)
        max_points //= 2


def _encode_lanes(trace: Trace) -> dict[str, Any]:
    """Encode the steps and the phases as columns start_us, end_us, index.

    ``index`` is the number of a step, and for a phase its index in ``schema.PHASES``.
    """
    steps = steps_table(trace)
    step_start = _integers(steps["start_ns"])
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    names = {name: trace.name(name) for name in np.unique(spans["name"]).tolist()}
    codes = {name: PHASES.index(text) for name, text in names.items() if text in DRAWN_PHASES}
    is_phase = (spans["kind"] == SPAN_KINDS.index("phase")) & np.isin(spans["name"], list(codes))
    phase = np.array([codes[name] for name in spans["name"][is_phase].tolist()], dtype=np.int64)
    start, duration = spans["start_ns"][is_phase], spans["duration_ns"][is_phase]
    return {
        "steps": _encode_spans(step_start, step_start + _integers(steps["duration_ns"]), _integers(steps["step"])),
        "phases": _encode_spans(start, start + np.maximum(duration, 0), phase),
    }


def _encode_spans(start_ns: Array, end_ns: Array, index: Array) -> dict[str, Any]:
    """Encode spans in the order of their starts; of more than ``MAX_SPANS``, the longest."""
    longest = np.argsort(start_ns - end_ns, kind="stable")[:MAX_SPANS]
    order = longest[np.argsort(start_ns[longest], kind="stable")]
    return encode_columns({"start_us": start_ns[order] // 1000, "end_us": end_ns[order] // 1000, "index": index[order]})


def _resolution_note(curve: EncodedCurve) -> str:
    if curve.is_complete:
        return f"Zoom in to see each of the {curve.num_points:,} changes."
    return (
        f"The curve has {curve.num_points:,} instants of a longer recording: it shows the highest value between two "
        "instants, but not every change."
    )
