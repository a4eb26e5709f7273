"""Peak by category, access intervals and swap candidates of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.axes import duration_ticks
from memtrace.dashboards.compared_runs import (
    LEGEND_ABOVE,
    MAX_BARS,
    MAX_CURVES,
    ComparedRuns,
    axis_labels,
    note_left_out,
)
from memtrace.dashboards.palette import (
    CATEGORY_COLORS,
    GRAY,
    GREEN,
    SERIES_COLORS,
    STACK_ORDER,
    series_line,
)
from plotly.subplots import make_subplots

from memtrace.analysis.compare import Run, RunSummary, interval_quantiles
from memtrace.categories import CATEGORY_LABELS
from memtrace.units import (
    choose_byte_unit,
    format_bytes,
    format_count,
    format_duration,
    format_share,
)

NUM_QUANTILES: Final = 250
"""Quantiles from which a distribution of intervals is drawn."""


def breakdown_figure(compared: ComparedRuns) -> go.Figure:
    """Return the peak of each run by category, in bytes and in shares."""
    runs = compared.comparison.runs[:MAX_BARS]
    labels = _run_labels(runs)
    divisor, unit = choose_byte_unit(max(run.peak_bytes for run in runs))
    figure = make_subplots(
        rows=1, cols=2, horizontal_spacing=0.1, subplot_titles=("bytes at the peak", "share of the peak")
    )
    for category in STACK_ORDER:
        sizes = [run.bytes_by_category.get(category, 0) for run in runs]
        if not any(sizes):
            continue
        shares = [size / run.peak_bytes if run.peak_bytes else 0 for size, run in zip(sizes, runs, strict=True)]
        texts = [f"{format_bytes(size)} ({format_share(share)})" for size, share in zip(sizes, shares, strict=True)]
        for column, values in ((1, np.array(sizes) / divisor), (2, 100 * np.array(shares))):
            figure.add_trace(
                go.Bar(
                    x=labels,
                    y=values,
                    name=CATEGORY_LABELS[category],
                    legendgroup=category,
                    showlegend=column == 1,
                    marker={"color": CATEGORY_COLORS[category]},
                    customdata=texts,
                    hovertemplate=f"%{{x}}<br>{CATEGORY_LABELS[category]}: %{{customdata}}<extra></extra>",
                ),
                row=1,
                col=column,
            )
    figure.update_layout(
        barmode="stack",
        legend={"orientation": "h", "y": 1.1, "yanchor": "bottom", "x": 0},
        margin={"t": 90},
        meta={"note": note_left_out(len(compared.runs), MAX_BARS, "drawn")},
    )
    figure.update_xaxes(type="category")
    figure.update_yaxes(title_text=unit, row=1, col=1)
    figure.update_yaxes(ticksuffix=" %", range=[0, 100], row=1, col=2)
    return figure


def interval_cdf_figure(compared: ComparedRuns) -> go.Figure | None:
    """Return the cumulative distribution of the access intervals of each run; None without recorded accesses."""
    figure = go.Figure()
    lengths = _intervals(compared.runs[:MAX_CURVES])
    if not lengths:
        return None
    labels = axis_labels([run.label for run in compared.runs[:MAX_CURVES]])
    for number, quantiles in lengths.items():
        figure.add_trace(
            go.Scatter(
                x=quantiles / 1e3,
                y=np.linspace(0, 100, len(quantiles)),
                name=labels[number],
                mode="lines",
                line={**series_line(number), "width": 1.6},
                customdata=[format_duration(length) for length in quantiles.tolist()],
                hovertemplate="%{y:.0f} % of intervals are at most %{customdata}",
            )
        )
    figure.update_layout(
        legend=LEGEND_ABOVE,
        showlegend=True,
        xaxis={"type": "log", "title": {"text": "access interval"}, **duration_ticks(lengths.values())},
        yaxis={"title": {"text": "share of intervals"}, "ticksuffix": " %", "range": [0, 101]},
        meta={"note": note_left_out(len(compared.runs), MAX_CURVES, "drawn")},
    )
    return figure


def interval_violin_figure(compared: ComparedRuns) -> go.Figure | None:
    """Return the distribution of the access intervals of each run as violins with boxes."""
    lengths = _intervals(compared.runs[:MAX_CURVES])
    if not lengths:
        return None
    labels = axis_labels([run.label for run in compared.runs[:MAX_CURVES]])
    figure = go.Figure(
        [
            go.Violin(
                y=np.log10(quantiles / 1e3),
                name=labels[number],
                line={"color": SERIES_COLORS[number % len(SERIES_COLORS)], "width": 1.2},
                points=False,
                box={"visible": True, "width": 0.2},
                hoverinfo="skip",
                spanmode="hard",
            )
            for number, quantiles in lengths.items()
        ]
    )
    ticks = duration_ticks(lengths.values())
    figure.update_yaxes(tickvals=np.log10(ticks["tickvals"]), ticktext=ticks["ticktext"], title_text="access interval")
    figure.update_layout(showlegend=False, violingap=0.1,
                         meta={"note": note_left_out(len(compared.runs), MAX_CURVES, "drawn")})  # fmt: skip
    return figure


def _intervals(runs: Sequence[Run]) -> dict[int, Any]:
    """Return the quantiles of the access intervals by the number of the run, of runs that have any."""
    quantiles = {number: interval_quantiles(run, NUM_QUANTILES) for number, run in enumerate(runs)}
    return {number: lengths for number, lengths in quantiles.items() if len(lengths)}


def swap_figure(compared: ComparedRuns) -> go.Figure | None:
    """Return the peak of each run and what can be in host memory at that moment; None without recorded accesses."""
    runs = compared.comparison.runs[:MAX_BARS]
    if all(run.swappable_at_peak_bytes is None for run in runs):
        return None
    labels = _run_labels(runs)
    divisor, unit = choose_byte_unit(max(run.peak_bytes for run in runs))
    swappable = [run.swappable_at_peak_bytes for run in runs]
    texts = [
        f"{format_bytes(run.swappable_at_peak_bytes)} of {format_bytes(run.peak_bytes)} "
        f"({format_share(run.swappable_at_peak_bytes, run.peak_bytes)}) at the peak<br>"
        f"{'unknown' if run.num_swap_intervals is None else format_count(run.num_swap_intervals, 'interval')} "
        "long enough, each for itself"
        for run in runs
    ]
    stays = [run.peak_bytes - (run.swappable_at_peak_bytes or 0) for run in runs]
    figure = go.Figure()
    for name, color, values in (
        ("swap candidates at the peak", GREEN, swappable),
        ("rest of the peak", GRAY, stays),
    ):
        figure.add_trace(
            go.Bar(
                x=labels,
                y=[None if value is None else value / divisor for value in values],
                name=name,
                marker={"color": color, "opacity": 1 if color != GRAY else 0.45},
                customdata=texts,
                hovertemplate="%{x}: %{customdata}<extra></extra>",
            )
        )
    figure.update_layout(barmode="stack", legend=LEGEND_ABOVE, xaxis={"type": "category"},
                         yaxis={"title": {"text": unit}},
                         meta={"note": note_left_out(len(compared.runs), MAX_BARS, "drawn")})  # fmt: skip
    return figure


def _run_labels(runs: Sequence[RunSummary]) -> list[str]:
    return axis_labels([run.label for run in runs])
