"""Page sections about all ranks and devices of a job: what each holds, the peaks of its steps, and which stand out."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import AMOUNT_SCALE, STACK_ORDER
from memtrace.dashboards.sections import Column, Link, Row, Section, Table
from memtrace.dashboards.text import NO_VALUE, figure_text, name_text

from memtrace.analysis.rank_groups import describe_outliers
from memtrace.analysis.rank_overview import RankOverview, choose_loads, step_peak_grid, survey_ranks
from memtrace.analysis.rank_summary import RankSummary
from memtrace.categories import CATEGORY_LABELS
from memtrace.units import choose_byte_unit, format_bytes, format_count, format_duration, format_names, format_share

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_RANKS: Final = 1_000
"""Largest number of ranks in a figure; of more, those of ``choose_loads``."""
MAX_GRID_CELLS: Final = 150_000
"""Largest number of cells in the heat map of steps."""
MAX_STEPS: Final = 400
"""Largest number of steps in the heat map of steps."""
MAX_LABELED_RANKS: Final = 16
"""Largest number of ranks whose cells show their bytes."""
MAX_ROWS: Final = 40
"""Largest number of ranks in the table."""
NUM_USUAL_ROWS: Final = 12
"""Number of rows up to which the table is filled with ranks that do not stand out."""


def view_fragment(rank: int, device: str) -> str:
    """Return the part of the page's address that opens the view of a rank and device."""
    return f"view={rank}-{device.replace(':', '-')}"


def ranks_table(trace: Trace, *, shown: Collection[tuple[int, str]]) -> Table | None:
    """Return the ranks to look at: the one to inspect first, outliers, and ranks with problems; None for one rank.

    Args:
        trace: a trace of one or several ranks.
        shown: pairs of rank and device that have a view on the page, which the table links to.
    """
    overview = survey_ranks(trace)
    summaries = overview.comparison.ranks
    if len(summaries) < 2:
        return None
    reasons = _reasons(overview)
    # Without a rank that stands out, the first ones are as good as any.
    order = [*reasons, *(summary.rank for summary in summaries if summary.rank not in reasons)]
    by_rank = {summary.rank: summary for summary in summaries}
    median = float(np.median([summary.peak_bytes for summary in summaries if summary.peak_bytes is not None] or [0]))
    columns = (
        Column("rank", "link"),
        Column("device"),
        Column("peak", "number"),
        Column("of median", "number"),
        Column("compute per step", "number"),
        Column("what stands out", "sentence"),
        Column("page of this rank", "code"),
    )
    rows = tuple(
        Row(
            (
                _rank_link(by_rank[rank], shown),
                by_rank[rank].device or NO_VALUE,
                format_bytes(by_rank[rank].peak_bytes, unknown=NO_VALUE),
                format_share(by_rank[rank].peak_bytes, median, unknown=NO_VALUE),
                format_duration(by_rank[rank].compute_ns, unknown=NO_VALUE),
                name_text("; ".join(reasons.get(rank, [])), 300) or NO_VALUE,
                "on this page" if _is_shown(by_rank[rank], shown) else _report_command(trace, rank),
            )
        )
        for rank in order[: min(max(len(reasons), NUM_USUAL_ROWS), MAX_ROWS)]
    )
    return Table(columns, rows, " ".join(_notes(overview, len(order), len(order) - len(rows))))


def _rank_link(summary: RankSummary, shown: Collection[tuple[int, str]]) -> Link:
    is_shown = _is_shown(summary, shown) and summary.device is not None
    return Link(str(summary.rank), view_fragment(summary.rank, summary.device or "") if is_shown else "")


def _is_shown(summary: RankSummary, shown: Collection[tuple[int, str]]) -> bool:
    return (summary.rank, summary.device) in shown


def _report_command(trace: Trace, rank: int) -> str:
    name = shlex.quote(trace.path.name) if trace.path else "TRACE..."
    return f"memtrace report {name_text(name)} --rank {rank}"


def _reasons(overview: RankOverview) -> dict[int, list[str]]:
    """Return why ranks stand out, the rank to inspect first at the beginning."""
    comparison = overview.comparison
    reasons: dict[int, list[str]] = {}
    if comparison.rank_to_inspect is not None:
        reasons[comparison.rank_to_inspect] = [f"inspect first: {comparison.reason}"]
    for summary in comparison.ranks:
        if summary.problem:
            reasons.setdefault(summary.rank, []).append(summary.problem)
    for rank, sentence in describe_outliers(comparison.outliers).items():
        reasons.setdefault(rank, []).append(sentence)
    return reasons


def _notes(overview: RankOverview, num_ranks: int, num_hidden: int) -> Iterator[str]:
    comparison = overview.comparison
    yield f"{format_count(num_ranks, 'rank')}."
    if comparison.imbalance is not None:
        yield f"Imbalance (highest peak / mean peak): {comparison.imbalance:.2f}."
    if not comparison.outliers:
        yield "No rank differs from the others."
    if comparison.slowest_rank is not None:
        yield f"Rank {comparison.slowest_rank} takes longest to compute a step."
    if comparison.missing_ranks:
        yield f"Missing ranks: {format_names([str(rank) for rank in comparison.missing_ranks])}."
    if num_hidden:
        yield f"{format_count(num_hidden, 'more rank')} not listed; memtrace ranks lists all of them."


def stages_table(trace: Trace, *, shown: Collection[tuple[int, str]]) -> Table | None:
    """Return the pipeline stages of a job; None where they are unknown.

    Args:
        trace: a trace of one or several ranks.
        shown: pairs of rank and device that have a view on the page, which the table links to.
    """
    comparison = survey_ranks(trace).comparison
    if not comparison.groups:
        return None
    by_rank = {summary.rank: summary for summary in comparison.ranks}
    columns = (
        Column("stage"),
        Column("ranks", "number"),
        Column("median peak", "number"),
        Column("lowest", "number"),
        Column("highest", "number"),
        Column("rank with the highest peak", "link"),
    )
    rows = tuple(
        Row(
            (
                name_text(group.label),
                f"{len(group.ranks):,}",
                *(
                    format_bytes(size, unknown=NO_VALUE)
                    for size in (group.median_peak_bytes, group.lowest_peak_bytes, group.highest_peak_bytes)
                ),
                NO_VALUE if group.highest_rank is None else _rank_link(by_rank[group.highest_rank], shown),
            )
        )
        for group in comparison.groups
    )
    return Table(columns, rows, f"{format_count(len(rows), 'stage')}.")


def categories_figure(trace: Trace) -> go.Figure | None:
    """Return a heat map of ranks and categories at the peak; None for one rank.

    Colors compare the ranks within each category.
    """
    overview = survey_ranks(trace)
    loads = choose_loads(overview, MAX_RANKS)
    if len(loads) < 2:
        return None
    rows = [("peak memory", [load.peak_bytes for load in loads])]
    for category in STACK_ORDER:
        of_category = [load.bytes_by_category.get(category, 0) for load in loads]
        if any(of_category):
            rows.append((CATEGORY_LABELS[category], of_category))
    sizes = np.array([values for _, values in rows], np.float64)
    figure = go.Figure(
        _heat_map(
            x=_rank_labels([load.rank for load in loads], overview),
            y=[label for label, _ in rows],
            z=100 * sizes / np.maximum(sizes.max(axis=1, keepdims=True), 1),
            title="% of the<br>largest",
            text=[[format_bytes(size) for size in row] for row in sizes.tolist()],
            has_labels=len(loads) <= MAX_LABELED_RANKS,
        )
    )
    figure.update_xaxes(type="category", showgrid=False, nticks=20)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return _with_note(figure, len(overview.main_loads))


def step_peaks_figure(trace: Trace) -> go.Figure | None:
    """Return a heat map of ranks and steps; None for one rank, or without steps."""
    overview = survey_ranks(trace)
    loads = choose_loads(overview, MAX_RANKS)
    if len(loads) < 2:
        return None
    grid = step_peak_grid(loads, min(MAX_STEPS, max(MAX_GRID_CELLS // len(loads), 2)))
    if len(grid.step) < 2:
        return None
    divisor, unit = choose_byte_unit(float(np.nanmax(grid.peak_bytes, initial=0)))
    figure = go.Figure(
        go.Heatmap(
            x=[f"step {number}" for number in grid.step.tolist()],
            y=_rank_labels(grid.ranks, overview),
            z=(grid.peak_bytes / divisor).astype(np.float32),
            zmin=0,
            zmax=float(np.nanmax(grid.peak_bytes)) / divisor,
            colorscale=AMOUNT_SCALE,
            colorbar={"title": {"text": unit}, "thickness": 14},
            hovertemplate=f"%{{y}}, %{{x}}: %{{z:.4~r}} {unit}<extra></extra>",
        )
    )
    figure.update_xaxes(type="category", showgrid=False, nticks=20)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False, nticks=20)
    steps = "" if grid.num_steps == len(grid.step) else (
        f"{len(grid.step):,} of {grid.num_steps:,} steps, those with the highest peaks of their neighborhood included."
    )  # fmt: skip
    return _with_note(figure, len(overview.main_loads), steps)


def devices_figure(trace: Trace) -> go.Figure | None:
    """Return a heat map of ranks and devices; None where every rank has one device."""
    overview = survey_ranks(trace)
    loads = overview.loads
    ranks = [load.rank for load in choose_loads(overview, MAX_RANKS)]
    devices = sorted({load.device for load in loads}, key=lambda device: (device == "cpu", device))
    if len(ranks) < 2 or len(devices) < 2:
        return None
    sizes = np.full((len(devices), len(ranks)), np.nan)
    column_of = {rank: column for column, rank in enumerate(ranks)}
    for load in loads:
        if load.rank in column_of:
            sizes[devices.index(load.device), column_of[load.rank]] = load.peak_bytes
    divisor, unit = choose_byte_unit(float(np.nanmax(sizes)))
    figure = go.Figure(
        _heat_map(
            x=_rank_labels(ranks, overview),
            y=[figure_text(device) for device in devices],
            z=sizes / divisor,
            title=unit,
            text=[["" if np.isnan(size) else format_bytes(size) for size in row] for row in sizes.tolist()],
            has_labels=len(ranks) <= MAX_LABELED_RANKS,
        )
    )
    figure.update_xaxes(type="category", showgrid=False, nticks=20)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return _with_note(figure, len({load.rank for load in loads}))


def _heat_map(
    *, x: Sequence[str], y: Sequence[str], z: Any, title: str, text: Sequence[Sequence[str]], has_labels: bool
) -> go.Heatmap:
    return go.Heatmap(
        x=x,
        y=y,
        z=z,
        zmin=0,
        zmax=float(np.nanmax(z)),
        colorscale=AMOUNT_SCALE,
        colorbar={"title": {"text": title}, "thickness": 14},
        xgap=1 if has_labels else 0,
        ygap=1,
        text=text,
        texttemplate="%{text}" if has_labels else None,
        hovertemplate="%{x}<br>%{y}: %{text}<extra></extra>",
    )


def _rank_labels(ranks: Sequence[int], overview: RankOverview) -> list[str]:
    """Return the ranks as labels of an axis, with the pipeline stage where it is known."""
    stages = {rank: group.label for group in overview.comparison.groups for rank in group.ranks}
    return [f"{figure_text(stages[rank])} rank {rank}" if rank in stages else f"rank {rank}" for rank in ranks]


def _with_note(figure: go.Figure, num_ranks: int, note: str = "") -> go.Figure:
    left_out = (
        f"{MAX_RANKS:,} of {num_ranks:,} ranks: those that differ from their peers, and of neighboring ranks the one "
        "with the highest peak."
        if num_ranks > MAX_RANKS
        else ""
    )
    return figure.update_layout(meta={"note": " ".join(filter(None, (note, left_out)))}, margin={"t": 10})


def sections(shown: Collection[tuple[int, str]]) -> tuple[Section, ...]:
    """Return the sections of a job; each ``build`` gets the whole trace. They are left out for a single rank.

    Args:
        shown: pairs of rank and device that have a view on the page.
    """
    return (
        Section(
            "ranks",
            "Ranks",
            "Ranks that stand out come first: the one to inspect, those with problems, and those that differ from the "
            "median of their peers by more than 5 % and 3.5 standard deviations. Peers are the ranks of one pipeline "
            "stage, or all ranks where stages are unknown.",
            partial(ranks_table, shown=shown),
        ),
        Section(
            "rank-stages",
            "Peak memory by pipeline stage",
            "Ranks of one stage hold the same layers, so their peaks should be equal.",
            partial(stages_table, shown=shown),
        ),
        Section(
            "rank-categories",
            "Peak memory by rank and category",
            "What each rank holds at its peak, on its fullest device. Colors compare the ranks within each row.",
            categories_figure,
            height=330,
        ),
        Section(
            "rank-devices",
            "Peak memory by rank and device",
            "The peak of every device.",
            devices_figure,
            height=300,
        ),
        Section(
            "rank-steps",
            "Peak memory by rank and step",
            "The highest live memory of each step, on the fullest device of each rank.",
            step_peaks_figure,
            height=420,
        ),
    )
