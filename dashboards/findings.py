"""Memory that is there without need, and what mending it would save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memtrace.dashboards.sections import Column, Row, Table
from memtrace.dashboards.text import name_text

from memtrace.analysis.findings import findings
from memtrace.units import format_bytes

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_ROWS: Final = 15


def findings_table(trace: Trace, device: str) -> Table | None:
    """The findings of a device with the peak that would result without each; None where there are none to be had."""
    told = findings(trace, device)
    untold = " ".join(f"Not judged: {reason}." for reason in told.not_judged)
    if not told.findings or told.peak_if_all_mended_bytes is None:
        return Table((), (), note=f"Nothing was found. {untold}") if untold else None
    columns = (
        Column("what"),
        Column("line", "code"),
        Column("category", "category"),
        Column("saves", "number"),
        Column("of the peak", "share"),
        Column("peak then", "number"),
        Column("blocks", "number"),
    )
    # The best of both kinds: those that a line mends come first, however many they are.
    saving = [one for one in told.findings if one.saved_bytes] or told.findings
    by_line = [one for one in saving if not one.needs_mechanism]
    others = [one for one in saving if one.needs_mechanism]
    shown = [*by_line[: MAX_ROWS - min(len(others), 5)], *others[:5]]
    rows = tuple(
        Row((f"{(one.name or one.pattern).replace('_', ' ')}{' *' if one.needs_mechanism else ''}",
             name_text(one.site or "–"), one.category, format_bytes(one.saved_bytes),  # noqa: RUF001
             one.saved_bytes / max(told.peak_bytes, 1), format_bytes(one.peak_if_mended_bytes), f"{one.num_blocks:,}"),
            (one.advice,))
        for one in shown
    )  # fmt: skip
    lowest = told.lower_bound_bytes
    bound = "" if lowest is None else f"; one operator touches {format_bytes(lowest)} at most: no order is below that"
    note = (
        f"{len(shown)} of {len(told.findings)}; those that save nothing of the peak come last. With all mended that a "
        f"line mends it would be {format_bytes(told.peak_if_all_mended_bytes)}{bound}. * takes recomputing, "
        f"swapping or "
        f"working in place. {untold}"
    )
    return Table(columns, rows, note=note, detail="advice")
