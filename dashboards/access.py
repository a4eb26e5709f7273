"""Access intervals: their distribution, and the blocks that could be swapped out during them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import BLUE, CATEGORY_COLORS, GRAY, STACK_ORDER
from plotly.subplots import make_subplots

from memtrace.analysis.access import SIZE_CLASSES, size_classes
from memtrace.analysis.blocks import blocks
from memtrace.analysis.device_clock import count_clocks, describe_clocks
from memtrace.analysis.intervals import access_intervals, device_intervals
from memtrace.analysis.options import DEFAULT_OPTIONS, AnalysisOptions
from memtrace.analysis.swap import IntervalSample, assumed_bandwidths, max_swappable_bytes, sample_intervals
from memtrace.categories import CATEGORY_LABELS
from memtrace.format.schema import CATEGORIES
from memtrace.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from memtrace.analysis.bandwidth import CopyBandwidths
    from memtrace.format.arrays import Array
    from memtrace.trace import Trace

MAX_VIOLIN_POINTS: Final = 600
"""Number of quantiles from which a violin is drawn."""
MAX_SCATTER_POINTS: Final = 1500
"""Number of intervals drawn as swap candidates."""
CURVE_POINTS: Final = 200
"""Number of points of a curve."""
_SIZE_TICKS: Final = [32**power for power in range(9)]


def intervals_figure(trace: Trace, device: str) -> go.Figure | None:
    """Return the distribution of the access intervals of a device: cumulative, by category and by block size.

    None where accesses were not recorded. Violins are drawn from evenly spaced quantiles, which keeps the page small.
    """
    rows = device_intervals(trace, device)
    if not len(rows):
        return None
    intervals, table = access_intervals(trace), blocks(trace)
    block, duration_ns = intervals.block[rows], intervals.duration_ns[rows]
    figure = make_subplots(
        rows=1, cols=3, column_widths=[0.34, 0.33, 0.33], horizontal_spacing=0.06,
        subplot_titles=("cumulative share of intervals", "length by category", "length by block size"),
    )  # fmt: skip
    figure.add_trace(_cumulative_curve(duration_ns), row=1, col=1)
    for category in STACK_ORDER:
        lengths = duration_ns[table.category[block] == CATEGORIES.index(category)]
        if len(lengths):
            figure.add_trace(_violin(lengths, CATEGORY_LABELS[category], CATEGORY_COLORS[category]), row=1, col=2)
    size_class = size_classes(table.size[block])
    for number, (_, name) in enumerate(SIZE_CLASSES):
        lengths = duration_ns[size_class == number]
        if len(lengths):
            # plotly would read "<" as markup.
            label = name.replace("<", "below").replace(">=", "from")
            figure.add_trace(_violin(lengths, label, GRAY), row=1, col=3)
    ticks = _time_ticks(duration_ns)
    figure.update_xaxes(type="log", **ticks, row=1, col=1)
    figure.update_yaxes(ticksuffix=" %", row=1, col=1)
    for column in (2, 3):
        figure.update_yaxes(tickvals=np.log10(ticks["tickvals"]), ticktext=ticks["ticktext"], row=1, col=column)
    figure.update_layout(
        showlegend=False,
        violingap=0.1,
        meta={
            "note": f"{format_count(len(rows), 'interval')} between accesses by different operator calls. "
            + describe_clocks(count_clocks(intervals.clock[rows]))
        },
    )
    return figure


def swap_figure(trace: Trace, device: str, options: AnalysisOptions = DEFAULT_OPTIONS) -> go.Figure | None:
    """Return block size against access interval, with the largest size that can be swapped within an interval.

    None where accesses were not recorded, or times mean nothing. Dots are the blocks that can all be in host memory at
    the peak, with one copy at a time in each direction; bandwidths and the smallest block are those of the options.
    """
    costs = options.bandwidths or assumed_bandwidths(trace)
    sample = sample_intervals(trace, device, costs, MAX_SCATTER_POINTS, min_bytes=options.min_swap_bytes)
    if sample is None:
        return None
    intervals, table = access_intervals(trace), blocks(trace)
    block, duration_ns = intervals.block[sample.rows], intervals.duration_ns[sample.rows]
    size, category = table.size[block], table.category[block]
    figure = go.Figure()
    for name in STACK_ORDER:
        of_category = category == CATEGORIES.index(name)
        has_legend = False
        for symbol, is_shown in _symbols(sample):
            chosen = of_category & is_shown
            if chosen.any():
                trace_of_category = _scatter(duration_ns[chosen], size[chosen], name, symbol)
                # The legend has one entry per category.
                trace_of_category.showlegend = not has_legend
                has_legend = True
                figure.add_trace(trace_of_category)
    note = _sample_note(sample, costs, options.min_swap_bytes)
    for limit in _limit_curves(duration_ns, int(size.min()), costs):
        figure.add_trace(limit)
    figure.update_layout(
        xaxis={"type": "log", "title": {"text": "access interval"}, **_time_ticks(duration_ns)},
        yaxis={"type": "log", "title": {"text": "block size"}, "tickvals": _SIZE_TICKS,
               "ticktext": [format_bytes(num_bytes) for num_bytes in _SIZE_TICKS]},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        meta={"note": f"{note} {describe_clocks(count_clocks(intervals.clock[sample.rows]))}"},
    )  # fmt: skip
    return figure


def _symbols(sample: IntervalSample) -> tuple[tuple[str, Array], ...]:
    """Return the symbols of the figure, and which intervals of the sample each of them shows."""
    return (
        ("circle", sample.is_swapped_at_peak),
        ("circle-open", sample.is_swappable & ~sample.is_swapped_at_peak),
        ("x-thin-open", ~sample.is_swappable),
    )


def _scatter(duration_ns: Array, size: Array, category: str, symbol: str) -> go.Scatter:
    texts = [
        f"{format_bytes(num_bytes)} block, interval {format_duration(length_ns)}"
        for num_bytes, length_ns in zip(size.tolist(), duration_ns.tolist(), strict=True)
    ]
    return go.Scatter(
        x=duration_ns / 1e3,
        y=size,
        customdata=texts,
        mode="markers",
        name=CATEGORY_LABELS[category],
        legendgroup=category,
        marker={
            "color": CATEGORY_COLORS[category],
            "size": 7,
            "symbol": symbol,
            "opacity": 0.8,
        },
        hovertemplate="%{customdata}",
    )


def _limit_curves(duration_ns: Array, smallest_bytes: int, costs: CopyBandwidths) -> list[go.Scatter]:
    """Return the curves of the largest size that can be swapped within an interval, with and without latency."""
    length_ns = np.geomspace(duration_ns.min(), duration_ns.max(), 100)
    curves = []
    for label, with_latency, dash in (("bandwidth only", False, "dot"), ("latency and bandwidth", True, "solid")):
        limit = max_swappable_bytes(length_ns, costs, with_latency=with_latency)
        # A logarithmic axis cannot show 0, and need not show what is far below all blocks.
        limit[limit < smallest_bytes / 10] = np.nan
        line = {"dash": dash, "color": GRAY}
        curves.append(go.Scatter(x=length_ns / 1e3, y=limit, name=label, mode="lines", line=line, hoverinfo="skip"))
    return curves


def _sample_note(sample: IntervalSample, costs: CopyBandwidths, min_bytes: int) -> str:
    totals = sample.swappable
    return (
        f"{len(sample.rows):,} of {sample.num_intervals:,} intervals, half of them the longest of the largest blocks. "
        f"{format_bytes(totals.bytes_at_peak)} can be in host memory at the peak (dots), with one copy at a time in "
        f"each direction at {costs.d2h.gb_per_s:.2f} GB/s D2H and {costs.h2d.gb_per_s:.2f} GB/s H2D ({costs.source}). "
        f"{format_count(totals.num_intervals or 0, 'interval')} (dots and circles) would be long enough, each for "
        f"itself, to swap a block of at least {format_bytes(min_bytes)}."
    )


def _cumulative_curve(duration_ns: Array) -> go.Scatter:
    quantiles = _quantiles(duration_ns, CURVE_POINTS)
    return go.Scatter(
        x=quantiles / 1e3,
        y=np.linspace(0, 100, CURVE_POINTS),
        customdata=[format_duration(length_ns) for length_ns in quantiles.tolist()],
        line={"color": BLUE},
        hovertemplate="%{y:.0f} % of intervals are at most %{customdata}<extra></extra>",
    )


def _violin(duration_ns: Array, name: str, color: str) -> go.Violin:
    points = _quantiles(duration_ns, MAX_VIOLIN_POINTS) if len(duration_ns) > MAX_VIOLIN_POINTS else duration_ns
    return go.Violin(
        y=np.log10(points / 1e3),
        name=name,
        line={"color": color, "width": 1.2},
        points=False,
        meanline={"visible": False},
        box={"visible": True, "width": 0.15},
        hoverinfo="skip",
        spanmode="hard",
    )


def _quantiles(values: Array, num_points: int) -> Array:
    return np.quantile(values, np.linspace(0, 1, num_points))


def _time_ticks(duration_ns: Array) -> dict[str, Any]:
    """Return tick values in microseconds at powers of ten, with their texts."""
    lowest, highest = np.floor(np.log10(duration_ns.min())), np.ceil(np.log10(duration_ns.max()))
    ticks_ns = 10.0 ** np.arange(lowest, highest + 1)
    return {"tickvals": ticks_ns / 1e3, "ticktext": [format_duration(tick_ns) for tick_ns in ticks_ns.tolist()]}
