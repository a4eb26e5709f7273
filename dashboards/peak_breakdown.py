"""The peak by category and allocation site."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memtrace.dashboards.sections import Column, Row, Table
from memtrace.dashboards.text import NO_VALUE, name_text

from memtrace.analysis.peak import find_peak, peak_by_category, peak_by_site
from memtrace.units import format_bytes, format_count

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_ROWS: Final = 25
MAX_MODULES: Final = 3
"""Most modules that a row of the table of allocation sites names."""


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
