"""What holds the peak: by module, by category, by line, block by block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import CATEGORY_COLORS, CATEGORY_LABELS
from memtrace.dashboards.sections import Column, Row, Table
from memtrace.dashboards.text import figure_text, name_text

from memtrace.analysis.allocation_sites import allocation_site
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import by_category, by_owner, by_site, peak
from memtrace.format.schema import CATEGORIES
from memtrace.frames import innermost_user_frame
from memtrace.units import format_bytes

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_NODES: Final = 3000
MAX_ROWS: Final = 25
MAX_FRAMES: Final = 40
_OUTSIDE: Final = "in no module call, or not told"


def modules_figure(trace: Trace, device: str) -> go.Figure | None:
    """An icicle of the qualified module names; its leaves are the categories. None where no module is told."""
    rows = by_owner(trace, peak(trace, device).live)
    if all(name is None for name, *_ in rows):
        return None
    shown, rest = rows[:MAX_NODES], rows[MAX_NODES:]
    values: dict[tuple[str, ...], int] = {}
    colors: dict[tuple[str, ...], str] = {}
    for name, category, size, _ in shown:
        path = ("peak", *(name.split(".") if name else [_OUTSIDE]))
        for depth in range(1, len(path) + 1):
            values[path[:depth]] = values.get(path[:depth], 0) + size
        leaf = (*path, f" {category}")
        values[leaf] = values.get(leaf, 0) + size
        colors[leaf] = CATEGORY_COLORS[category]
    paths = list(values)
    figure = go.Figure(
        go.Icicle(
            ids=["\x1f".join(path) for path in paths],
            parents=["\x1f".join(path[:-1]) for path in paths],
            labels=[figure_text(CATEGORY_LABELS.get(path[-1].strip(), path[-1])) for path in paths],
            values=np.array([values[path] for path in paths], np.int64),
            text=[format_bytes(values[path]) for path in paths],
            marker={
                "colors": [colors.get(path, "#5f6b77") for path in paths],
                "line": {"width": 1.5, "color": "#8c9299"},
            },
            branchvalues="total",
            maxdepth=6,
            tiling={"orientation": "h"},
            texttemplate="%{label} %{text}",
            hovertemplate="%{label}<br>%{text}, %{percentRoot} of the peak<extra></extra>",
        )
    )
    note = "Click a module to look inside it, and its parent to go back."
    if rest:
        note += f" {len(rest):,} of {len(rows):,} smallest entries are left out."
    figure.update_layout(meta={"note": note}, margin={"l": 5, "r": 5, "t": 5, "b": 5})
    return figure


def categories_table(trace: Trace, device: str) -> Table | None:
    """The categories live at the peak: bytes, share, blocks."""
    found = peak(trace, device)
    rows = by_category(trace, found.live)
    columns = (
        Column("category", "category"),
        Column("bytes", "number"),
        Column("of the peak", "share"),
        Column("blocks", "number"),
    )
    total = max(found.requested.bytes, 1)
    cells = tuple(
        Row((name or "unknown", format_bytes(size), size / total, f"{number:,}")) for name, size, number in rows
    )
    return Table(columns, cells) if rows else None


def sites_table(trace: Trace, device: str) -> Table | None:
    """The lines of the user's own code that allocated what is live at the peak."""
    found = peak(trace, device)
    rows = by_site(trace, found.live)
    total = max(found.requested.bytes, 1)
    columns = (
        Column("line", "code"),
        Column("bytes", "number"),
        Column("of the peak", "share"),
        Column("blocks", "number"),
    )
    cells = tuple(
        Row((name_text(name or "no stack (older than the recording, small, or stacks were off)"), format_bytes(size),
             size / total, f"{number:,}"))
        for name, size, number in rows[:MAX_ROWS]
    )  # fmt: skip
    return Table(columns, cells, note=f"{len(cells)} of {len(rows)} lines.") if rows else None


def blocks_table(trace: Trace, device: str) -> Table | None:
    """The largest blocks live at the peak, each with its stack."""
    live, found = peak(trace, device).live, blocks(trace)
    if not len(live):
        return None
    largest = live[np.argsort(-found.size[live], kind="stable")][:MAX_ROWS]
    columns = (Column("bytes", "number"), Column("category", "category"), Column("name or module", "code"),
               Column("operator", "code"), Column("line", "code"))  # fmt: skip
    rows = []
    for block in largest.tolist():
        name = trace.name(int(found.name[block])) or trace.name(int(found.module[block])) or "–"  # noqa: RUF001
        stack = trace.frames(int(found.stack[block]))
        own = innermost_user_frame(stack)
        lines = [
            f"{frame.file}:{frame.line} {frame.function}{'   <- yours' if frame is own else ''}" for frame in stack
        ]
        rows.append(
            Row((format_bytes(int(found.size[block])), CATEGORIES[found.category[block]], name_text(name),
                 name_text(trace.name(int(found.op_name[block])) or "–"),  # noqa: RUF001
                 name_text(allocation_site(trace, int(found.stack[block])) or "–")),  # noqa: RUF001
                tuple(name_text(line) for line in lines[:MAX_FRAMES]))
        )  # fmt: skip
    return Table(columns, tuple(rows), note=f"The {len(rows)} largest of {len(live):,} blocks.")
