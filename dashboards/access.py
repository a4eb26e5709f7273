"""Access time intervals: how they are spread, and the blocks that lie untouched long enough to be swapped out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import CATEGORY_COLORS, STACK_ORDER
from plotly.subplots import make_subplots

from memtrace.analysis.access import PUBLISHED, SIZE_CLASSES, intervals, swappable
from memtrace.analysis.blocks import blocks
from memtrace.categories import CATEGORY_LABELS
from memtrace.format.schema import CATEGORIES
from memtrace.units import format_bytes

if TYPE_CHECKING:
    from memtrace.format.arrays import Array
    from memtrace.trace import Trace

MAX_VIOLIN: Final = 600
MAX_POINTS: Final = 1500
CURVE_POINTS: Final = 200
_SIZES: Final = [32**power for power in range(9)]


def intervals_figure(trace: Trace, device: str) -> go.Figure | None:
    """The intervals of a device: their cumulative share to the left, violins by category and by size to the right.

    None where no accesses were recorded. Violins are drawn from evenly spread quantiles, so that they stay small.
    """
    found, told = intervals(trace), blocks(trace)
    here = (told.device[found.block] == trace.devices.index(device)) & (found.ns > 0)
    if not here.any():
        return None
    block, us = found.block[here], found.ns[here] / 1e3
    figure = make_subplots(
        rows=1, cols=3, column_widths=[0.34, 0.33, 0.33], horizontal_spacing=0.06,
        subplot_titles=("share of intervals up to a length", "by category", "by size of the block"),
    )  # fmt: skip
    figure.add_trace(
        go.Scatter(
            x=_quantiles(us, CURVE_POINTS),
            y=np.linspace(0, 100, CURVE_POINTS),
            line={"color": "#0072b2"},
            hovertemplate="%{y:.0f} % are at most %{x:,.1f} µs<extra></extra>",
        ),
        row=1,
        col=1,
    )
    for category in STACK_ORDER:
        mine = us[told.category[block] == CATEGORIES.index(category)]
        if len(mine):
            figure.add_trace(_violin(mine, CATEGORY_LABELS[category], CATEGORY_COLORS[category]), row=1, col=2)
    size_class = np.searchsorted([limit for limit, _ in SIZE_CLASSES], told.size[block], side="right") - 1
    for number, (_, name) in enumerate(SIZE_CLASSES):
        mine = us[size_class == number]
        if len(mine):
            figure.add_trace(_violin(mine, name.replace("<", "below").replace(">=", "from"), "#8e98a3"), row=1, col=3)
    times = _decades(us)
    figure.update_xaxes(type="log", **times, row=1, col=1)
    figure.update_yaxes(ticksuffix=" %", row=1, col=1)
    for column in (2, 3):
        figure.update_yaxes(tickvals=np.log10(times["tickvals"]), ticktext=times["ticktext"], row=1, col=column)
    figure.update_layout(
        showlegend=False,
        violingap=0.1,
        meta={"note": f"{len(us):,} intervals between accesses of different operator calls; times are the host's."},
    )
    return figure


def outliers_figure(trace: Trace, device: str) -> go.Figure | None:
    """Interval against size, with the line S/B_out + S/B_in = ATI: blocks below it can go out and come back in time.

    Half of the intervals drawn are the longest of the largest blocks, the others evenly spread. None without accesses.
    """
    found, told = intervals(trace), blocks(trace)
    here = np.flatnonzero((told.device[found.block] == trace.devices.index(device)) & (found.ns > 0))
    here = here[told.size[found.block[here]] > 0]
    if not len(here):
        return None
    size = told.size[found.block[here]]
    # Long intervals of large blocks matter most; a few of all the others show how rare they are.
    order = here[np.argsort(-(np.log2(size) + np.log2(found.ns[here])), kind="stable")]
    rest = order[MAX_POINTS // 2 :]
    chosen = np.concatenate([order[: MAX_POINTS // 2], rest[:: max(1, -(-2 * len(rest) // MAX_POINTS))]])
    fits = np.isin(chosen, swappable(trace, PUBLISHED))
    us, size = found.ns[chosen] / 1e3, told.size[found.block[chosen]]
    category = told.category[found.block[chosen]]
    figure = go.Figure()
    for name in STACK_ORDER:
        for passes in (True, False):
            mine = (category == CATEGORIES.index(name)) & (fits == passes)
            if mine.any():
                figure.add_trace(
                    go.Scatter(
                        x=us[mine],
                        y=size[mine],
                        customdata=[format_bytes(number) for number in size[mine].tolist()],
                        mode="markers",
                        name=CATEGORY_LABELS[name],
                        legendgroup=name,
                        showlegend=passes or not (fits & (category == CATEGORIES.index(name))).any(),
                        marker={
                            "color": CATEGORY_COLORS[name],
                            "size": 7,
                            "symbol": "circle" if passes else "x-thin-open",
                            "opacity": 0.8,
                        },
                        hovertemplate="%{customdata} untouched for %{x:,.1f} µs",
                    )
                )
    span = np.geomspace(us.min(), us.max(), 100)
    per_byte = PUBLISHED.out.ns_per_byte + PUBLISHED.back.ns_per_byte
    start = PUBLISHED.out.start_ns + PUBLISHED.back.start_ns
    for label, overhead, dash in (("bandwidth alone", 0.0, "dot"), ("t = a + b·S", start, "solid")):
        limit = np.maximum(span * 1e3 - overhead, 0) / per_byte
        limit[limit < size.min() / 10] = np.nan
        figure.add_trace(
            go.Scatter(x=span, y=limit, name=label, mode="lines", line={"dash": dash, "color": "#8c9299"},
                       hoverinfo="skip")
        )  # fmt: skip
    held = int(told.size[np.unique(found.block[chosen[fits]])].sum())
    figure.update_layout(
        xaxis={"type": "log", "title": {"text": "untouched for"}, **_decades(us)},
        yaxis={"type": "log", "title": {"text": "size of the block"}, "tickvals": _SIZES,
               "ticktext": [format_bytes(number) for number in _SIZES]},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        meta={"note": f"{len(chosen):,} of {len(here):,} intervals, half of them those of most bytes and time; "
              f"{int(fits.sum()):,} (dots, blocks of {format_bytes(held)}) lie below the line at the "
              f"{PUBLISHED.out.gb_per_s:.2f} and {PUBLISHED.back.gb_per_s:.2f} GB/s of {PUBLISHED.source}."},
    )  # fmt: skip
    return figure


def _violin(us: Array, name: str, color: str) -> go.Violin:
    return go.Violin(
        y=np.log10(_quantiles(us, MAX_VIOLIN) if len(us) > MAX_VIOLIN else us),
        name=name,
        line={"color": color, "width": 1.2},
        points=False,
        meanline={"visible": False},
        box={"visible": True, "width": 0.15},
        hoverinfo="skip",
        spanmode="hard",
    )


def _quantiles(values: Array, count: int) -> Array:
    return np.quantile(values, np.linspace(0, 1, count))


def _decades(us: Array) -> dict[str, Any]:
    """Ticks at 1 µs, 10 µs, 100 µs, 1 ms ..."""
    decades = 10.0 ** np.arange(np.floor(np.log10(us.min())), np.ceil(np.log10(us.max())) + 1)
    return {"tickvals": decades, "ticktext": [_time(decade) for decade in decades]}


def _time(us: float) -> str:
    for limit, divisor, unit in ((1e3, 1, "µs"), (1e6, 1e3, "ms")):
        if us < limit:
            return f"{us / divisor:g} {unit}"
    return f"{us / 1e6:g} s"
