"""The memory of a device over time, stacked by category, with the bands of steps and phases.

The figure itself holds a coarse curve, enough to look at. ``layout.meta`` carries a finer one, packed, and the
spans; the page draws both anew at every zoom (``templates/report.js``), so a zoom shows what the window holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.delta_encoding import pack
from memtrace.dashboards.palette import CATEGORY_COLORS, CATEGORY_LABELS, STACK_ORDER

from memtrace.analysis import steps_table
from memtrace.analysis.timeline import timeline
from memtrace.format.schema import PHASES, SPAN_KINDS
from memtrace.units import choose_byte_unit, choose_time_unit, format_bytes

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

    from memtrace.trace import Trace

COARSE_POINTS: Final = 1500
"""Instants drawn before the browser has unpacked the finer curve."""
FULL_POINTS: Final = 200_000
"""Instants the finer curve starts from; fewer when they do not fit ``FULL_BYTES``."""
FULL_BYTES: Final = 2_500_000
"""Most characters of base64 that the finer curve may take."""
MAX_SPANS: Final = 30_000
"""Most steps, and most phases, that are drawn as bands."""
DRAWN_PHASES: Final = ("forward", "backward", "optimizer")
_LINES: Final = (("allocated", "allocated", "dot"), ("reserved", "reserved", "solid"))


def timeline_figure(trace: Trace, device: str) -> go.Figure | None:
    """Bytes in use over time by category, the allocated and reserved lines, and what zooming needs.

    None when nothing was allocated on ``device``.
    """
    coarse = timeline(trace, device, max_points=COARSE_POINTS)
    if coarse.empty:
        return None
    columns, packed, exact = _packed_curve(trace, device)
    figure = draw(coarse)
    figure.layout.meta = {
        **figure.layout.meta, "packed": packed, "bands": bands(trace), "note": _note(columns, exact),
    }  # fmt: skip
    return figure


def draw(table: pd.DataFrame) -> go.Figure:
    """The stacked curve of ``table``: columns time_ns, event, requested, allocated, reserved and one a category."""
    times = integers(table["time_ns"])
    curves = {name: _numbers(table[name]) for name in (*STACK_ORDER, "requested", "allocated", "reserved")}
    divisor, unit = choose_byte_unit(float(np.nanmax(np.concatenate(list(curves.values())), initial=0)))
    nanoseconds, time_name = choose_time_unit(float(times[-1] - min(0, int(times[0]))))
    x = times / nanoseconds
    figure = go.Figure()
    for category in STACK_ORDER:
        if curves[category].max(initial=0) > 0:
            figure.add_trace(_area(category, x, curves[category] / divisor, unit))
    for column, name, dash in _LINES:
        values = curves[column]
        if not np.isnan(values).all() and not np.array_equal(values, curves["requested"]):
            figure.add_trace(_line(column, name, dash, x, values / divisor, unit))
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
                "event": int(integers(table["event"])[top]),
                "y": float(curves["requested"][top] / divisor),
                "text": f"peak {format_bytes(float(curves['requested'][top]))}",
            },
        },
        # The lanes of steps and phases lie between the curve and the time axis.
        xaxis={
            "title": {"text": f"time since the recording began ({time_name})"},
            "hoverformat": ",.4~f",
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


def _area(category: str, x: NDArray[Any], y: NDArray[Any], unit: str) -> go.Scatter:
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


def _line(column: str, name: str, dash: str, x: NDArray[Any], y: NDArray[Any], unit: str) -> go.Scatter:
    return go.Scatter(
        x=x,
        y=y,
        name=name,
        meta={"column": column, "ink": True},
        mode="lines",
        line={"shape": "hv", "width": 1.6, "dash": dash},
        hovertemplate=f"%{{y:,.1f}} {unit}",
    )


def integers(column: pd.Series[Any]) -> NDArray[np.int64]:
    """A column without NA as int64."""
    return column.to_numpy(dtype=np.int64)


def _numbers(column: pd.Series[Any]) -> NDArray[np.float64]:
    return column.astype("Float64").to_numpy(dtype=np.float64, na_value=np.nan)


def _packed_curve(trace: Trace, device: str) -> tuple[int, dict[str, Any], bool]:
    """The finest curve that fits ``FULL_BYTES``: number of instants, packed columns, whether none was left out."""
    points = FULL_POINTS
    while True:
        table = timeline(trace, device, max_points=points)
        columns = {"time_us": integers(table["time_ns"]) // 1000, "event": integers(table["event"])}
        for name in (*STACK_ORDER, "allocated", "reserved"):
            if not table[name].isna().any():
                columns[name] = integers(table[name])
        packed = pack(columns)
        if len(packed["data"]) <= FULL_BYTES:
            return len(table), packed, len(table) < points
        points //= 2


def bands(trace: Trace) -> dict[str, Any]:
    """Steps and phases, each packed as columns start_us, end_us, index.

    ``index`` is a step's number, and for a phase its place in ``schema.PHASES``. Of more than ``MAX_SPANS`` the
    longest are kept.
    """
    steps = steps_table(trace)
    starts = integers(steps["start_ns"])
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    names = {name: trace.name(name) for name in np.unique(spans["name"]).tolist()}
    phase = {name: PHASES.index(text) for name, text in names.items() if text in DRAWN_PHASES}
    chosen = (spans["kind"] == SPAN_KINDS.index("phase")) & np.isin(spans["name"], list(phase))
    codes = np.array([phase[name] for name in spans["name"][chosen].tolist()], dtype=np.int64)
    begins, lasting = spans["start_ns"][chosen], spans["duration_ns"][chosen]
    return {
        "steps": _pack_spans(starts, starts + integers(steps["duration_ns"]), integers(steps["step"])),
        "phases": _pack_spans(begins, begins + np.maximum(lasting, 0), codes),
    }


def _pack_spans(start: NDArray[Any], end: NDArray[Any], index: NDArray[Any]) -> dict[str, Any]:
    kept = np.sort(np.argsort(start - end, kind="stable")[:MAX_SPANS])
    order = kept[np.argsort(start[kept], kind="stable")]
    return pack({"start_us": start[order] // 1000, "end_us": end[order] // 1000, "index": index[order]})


def _note(num_points: int, exact: bool) -> str:
    if exact:
        return f"Zooming shows every one of the {num_points:,} changes."
    return (
        f"Zooming shows {num_points:,} instants of a longer recording: every stretch between two of them is "
        "there with its highest value."
    )
