"""The peak by module, category, allocation site and block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import plotly.graph_objects as go
from memtrace.dashboards.palette import CATEGORY_COLORS
from memtrace.dashboards.sections import Column, Row, Table
from memtrace.dashboards.text import NO_VALUE, figure_text, name_text

from memtrace.analysis.block_groups import ModuleTreeNode, build_module_tree
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak, largest_peak_blocks, peak_by_category, peak_by_site
from memtrace.analysis.summary import summarize_block
from memtrace.categories import CATEGORY_LABELS
from memtrace.units import format_bytes, format_count

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_NODES: Final = 3000
MAX_ROWS: Final = 25
MAX_FRAMES: Final = 40
OUTSIDE_MODULES: Final = "Outside any module"
MAX_MODULES: Final = 3
"""Most modules that a row of the table of allocation sites names."""


def modules_figure(trace: Trace, device: str) -> go.Figure | None:
    """Draw an icicle of the qualified module names whose leaves are the categories; None without modules."""
    tree = build_module_tree(trace, find_peak(trace, device).live, outside=OUTSIDE_MODULES, max_groups=MAX_NODES)
    if all(not node.path or node.path[0] == OUTSIDE_MODULES for node in tree.nodes):
        return None
    figure = go.Figure(
        go.Icicle(
            ids=[_node_id(node.path, node.category) for node in tree.nodes],
            parents=[_node_id(node.path[:-1], None) if node.path else "" for node in tree.nodes],
            labels=[_node_label(node) for node in tree.nodes],
            values=np.array([node.bytes for node in tree.nodes], np.int64),
            text=[format_bytes(node.bytes) for node in tree.nodes],
            marker={
                "colors": [CATEGORY_COLORS[node.largest_category] for node in tree.nodes],
                "line": {"width": 1.5, "color": "#8c9299"},
            },
            branchvalues="total",
            maxdepth=6,
            tiling={"orientation": "h"},
            texttemplate="%{label} %{text}",
            hovertemplate="%{label}<br>%{text}, %{percentRoot} of the peak<extra></extra>",
        )
    )
    note = "Click a module to zoom in, and its parent to zoom out."
    if tree.num_left_out:
        note += f" The {tree.num_left_out:,} smallest of {tree.num_groups:,} entries are left out."
    figure.update_layout(meta={"note": note}, margin={"l": 5, "r": 5, "t": 5, "b": 5})
    return figure


def _node_id(path: tuple[str, ...], category: str | None) -> str:
    # A module may have the name of a category.
    return "\x1f".join(("peak", *path, *(("category",) if category else ())))


def _node_label(node: ModuleTreeNode) -> str:
    if node.category:
        return CATEGORY_LABELS[node.category]
    return figure_text(node.path[-1]) if node.path else "peak"


def categories_table(trace: Trace, device: str) -> Table | None:
    """List the categories that are live at the peak: bytes, share, number of blocks."""
    total = max(find_peak(trace, device).requested.bytes, 1)
    columns = (
        Column("category", "category"),
        Column("size", "number"),
        Column("share of peak", "share"),
        Column("blocks", "number"),
    )
    rows = tuple(
        Row((group.name or "unknown", format_bytes(group.bytes), group.bytes / total, f"{group.num_blocks:,}"))
        for group in peak_by_category(trace, device)
    )
    return Table(columns, rows) if rows else None


def sites_table(trace: Trace, device: str) -> Table | None:
    """List the allocation sites of the blocks that are live at the peak; None without any stack."""
    groups, total = peak_by_site(trace, device), max(find_peak(trace, device).requested.bytes, 1)
    if all(group.name is None for group in groups):
        return None
    columns = (
        Column("allocation site", "code"),
        Column("module", "code"),
        Column("size", "number"),
        Column("share of peak", "share"),
        Column("blocks", "number"),
    )
    rows = tuple(
        Row((name_text(group.name or f"No call stack: {group.no_stack_reason}"),
             name_text(", ".join(group.modules[:MAX_MODULES]) or NO_VALUE), format_bytes(group.bytes),
             group.bytes / total, f"{group.num_blocks:,}"))
        for group in groups[:MAX_ROWS]
    )  # fmt: skip
    note = (
        f"The {len(rows)} largest of {format_count(len(groups), 'allocation site')}." if len(groups) > len(rows) else ""
    )
    return Table(columns, rows, note=note)


def blocks_table(trace: Trace, device: str) -> Table | None:
    """List the largest blocks that are live at the peak, each with its call stack."""
    num_live = len(find_peak(trace, device).live)
    if not num_live:
        return None
    columns = (Column("size", "number"), Column("category", "category"), Column("tensor or module", "code"),
               Column("operator", "code"), Column("allocation site", "code"))  # fmt: skip
    rows = []
    for block_id in largest_peak_blocks(trace, device, MAX_ROWS).tolist():
        block = summarize_block(trace, block_id)
        texts = [name_text(text or NO_VALUE) for text in (block.name or block.module, block.operator, block.site)]
        rows.append(Row((format_bytes(block.bytes), block.category, *texts), _stack_lines(trace, block_id)))
    return Table(columns, tuple(rows), note=f"The {len(rows)} largest of {format_count(num_live, 'live block')}.")


def _stack_lines(trace: Trace, block_id: int) -> tuple[str, ...]:
    """Return the frames of the stack that allocated a block, with a mark at the allocation site."""
    frames = trace.frames(int(blocks(trace).stack[block_id]))
    own = trace.code_owner.innermost_user_frame(frames)
    return tuple(
        name_text(f"{frame.file}:{frame.line} {frame.function}{'   <- your code' if frame is own else ''}")
        for frame in frames[:MAX_FRAMES]
    )
