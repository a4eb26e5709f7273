"""What differs at the peaks of several runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.compared_runs import (
    GROUPING_TITLES,
    MAX_BARS,
    MAX_LABEL_CHARS,
    ComparedRuns,
    axis_labels,
    group_name,
    note_left_out,
    signed_bytes,
)
from memtrace.dashboards.palette import (
    DIFFERENCE_SCALE,
    GROWTH_COLOR,
    SHRINKAGE_COLOR,
)
from memtrace.dashboards.sections import Column, Row, Table
from memtrace.dashboards.text import NO_VALUE, figure_text, name_text

from memtrace.analysis.compare import GroupComparison
from memtrace.analysis.diff import Grouping
from memtrace.units import (
    choose_byte_unit,
    format_bytes,
    format_count,
)

MAX_GROUPS: Final = 25
"""Largest number of bars or rows in a figure of differences."""
MAX_GROUP_ROWS: Final = 60
"""Largest number of rows of each grouping in the table of differences."""
MIN_WIDTH: Final = 640
"""Width in pixels that names and bars need; the figure scrolls on narrower screens."""
MAX_HEAT_RUNS: Final = 100
"""Largest number of columns in a heat map of differences."""
_NAME_CHARS: Final = 46
_KINDS: Final = {"appeared": "new", "disappeared": "gone", "grew": "grown", "shrank": "smaller", None: "equal"}


def differences_figure(compared: ComparedRuns, grouping: Grouping) -> go.Figure | None:
    """Return what differs at the peaks by category, module or site; None where nothing does.

    Two runs: a bar for each group, to the right where the second run holds more. More runs: a heat map of each run
    against the first.
    """
    groups = [group for group in compared.comparison.groups if group.grouping == grouping and group.spread_bytes]
    if not groups:
        return None
    shown = groups[:MAX_GROUPS]
    draw = _difference_bars if len(compared.runs) == 2 else _difference_map
    figure = draw(shown, axis_labels([run.label for run in compared.runs]))
    figure.update_yaxes(autorange="reversed", type="category", ticklabelstandoff=4)
    notes = [f"{len(shown)} of {len(groups):,} groups that differ, the largest differences." if len(groups) > len(shown)
             else ""]  # fmt: skip
    if len(compared.runs) > 2:
        notes.append(note_left_out(len(compared.runs), MAX_HEAT_RUNS, "drawn"))
    figure.update_layout(
        height=130 + 26 * len(shown),
        margin={"l": 10, "t": 40},
        meta={"note": " ".join(filter(None, notes)), "min_width": MIN_WIDTH},
    )
    return figure


def _difference_bars(groups: Sequence[GroupComparison], labels: Sequence[str]) -> go.Figure:
    divisor, unit = choose_byte_unit(max(abs(group.change_bytes) for group in groups))
    figure = go.Figure(
        go.Bar(
            x=np.array([group.change_bytes for group in groups]) / divisor,
            y=_group_names(groups),
            orientation="h",
            marker={"color": [GROWTH_COLOR if group.change_bytes > 0 else SHRINKAGE_COLOR for group in groups]},
            text=[signed_bytes(group.change_bytes) for group in groups],
            textposition="auto",
            customdata=[_hover(group, labels) for group in groups],
            hovertemplate="%{customdata}<extra></extra>",
        )
    )
    figure.update_xaxes(title_text=f"bytes of {labels[1]} minus bytes of {labels[0]} ({unit})")
    return figure


def _difference_map(groups: Sequence[GroupComparison], labels: Sequence[str]) -> go.Figure:
    sizes = np.array([[size or 0 for size in group.bytes_by_run[:MAX_HEAT_RUNS]] for group in groups], np.float64)
    change = sizes - sizes[:, :1]
    divisor, unit = choose_byte_unit(float(np.abs(change).max(initial=0)))
    largest = float(np.abs(change).max(initial=0)) / divisor or 1.0
    figure = go.Figure(
        go.Heatmap(
            x=labels[:MAX_HEAT_RUNS],
            y=_group_names(groups),
            z=change / divisor,
            zmin=-largest,
            zmax=largest,
            colorscale=DIFFERENCE_SCALE,
            xgap=1,
            ygap=1,
            colorbar={"title": {"text": unit}, "thickness": 14},
            text=[
                [NO_VALUE if size is None else format_bytes(size) for size in group.bytes_by_run[:MAX_HEAT_RUNS]]
                for group in groups
            ],
            texttemplate="%{text}" if len(labels) <= 10 else None,
            hovertemplate="%{x}<br>%{y}: %{text}<extra></extra>",
        )
    )
    figure.update_xaxes(type="category", side="top", showgrid=False)
    figure.update_yaxes(showgrid=False)
    return figure


def differences_table(compared: ComparedRuns) -> Table | None:
    """Return the groups that differ at the peaks: new, gone, grown or smaller; None where nothing differs."""
    groups = compared.comparison.groups
    if not groups:
        return None
    runs = compared.comparison.runs
    shown_runs = (0, len(runs) - 1)
    columns = (Column("grouping"), Column("name", "code"), Column("change"), Column("difference", "number"),
               *(Column(name_text(runs[place].label, MAX_LABEL_CHARS), "number") for place in shown_runs))  # fmt: skip
    rows, hidden = [], 0
    for grouping, title in GROUPING_TITLES.items():
        of_grouping = [group for group in groups if group.grouping == grouping]
        hidden += max(len(of_grouping) - MAX_GROUP_ROWS, 0)
        for group in of_grouping[:MAX_GROUP_ROWS]:
            cells = (title, group_name(group), _KINDS[group.kind], signed_bytes(group.change_bytes),
                     *(format_bytes(group.bytes_by_run[place], unknown=NO_VALUE) for place in shown_runs))  # fmt: skip
            detail = () if len(runs) == 2 else tuple(_by_run(group, [run.label for run in runs]))
            rows.append(Row(cells, detail))
    note = "Bytes at the peak of each run; a site whose line moved within its function is the same site."
    if hidden:
        note += f" {format_count(hidden, 'smaller difference')} left out; memtrace compare --json has all of them."
    return Table(columns, tuple(rows), note, detail="runs")


def _by_run(group: GroupComparison, labels: Sequence[str]) -> Iterator[str]:
    for label, size in list(zip(labels, group.bytes_by_run, strict=True))[:MAX_BARS]:
        yield f"{name_text(label)}: {format_bytes(size, unknown='none')}"


def _group_names(groups: Sequence[GroupComparison]) -> list[str]:
    return _unique([figure_text(group_name(group), _NAME_CHARS) for group in groups])


def _unique(names: Sequence[str]) -> list[str]:
    """Return names that differ; two groups of one name would share one row of a figure."""
    return [name if names.index(name) == place else f"{name} ({place + 1})" for place, name in enumerate(names)]


def _hover(group: GroupComparison, labels: Sequence[str]) -> str:
    sizes = "<br>".join(
        f"{label}: {format_bytes(size, unknown='none')}" for label, size in zip(labels, group.bytes_by_run, strict=True)
    )
    return f"{figure_text(group_name(group))}<br>{sizes}"
