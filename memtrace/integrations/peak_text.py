"""What held the peak of a trace, as lines of plain text for test reports and notebooks."""

from __future__ import annotations

from typing import Final

from memtrace.analysis.peak import find_peak
from memtrace.analysis.summary import describe_peak, summarize_peak
from memtrace.categories import CATEGORY_LABELS
from memtrace.trace import Trace
from memtrace.units import format_bytes, format_share

MAX_SITES: Final = 5


def added_peak_bytes(trace: Trace, device: str) -> int:
    """Return how far the live bytes of a device rise above those that were live when the recording began."""
    peak = find_peak(trace, device)
    return peak.requested.bytes - peak.baseline_bytes


def describe_peak_holders(trace: Trace, device: str) -> list[str]:
    """Return the peak of a device, then the categories and the allocation sites that hold it, largest first.

    Args:
        trace: a single-rank trace.
        device: one of ``trace.devices``.
    """
    peak = summarize_peak(trace, device)
    lines = [f"{device}: {describe_peak(peak)}"]
    by_size = sorted(peak.by_category.items(), key=lambda item: -item[1])
    rows = [(num_bytes, CATEGORY_LABELS[category]) for category, num_bytes in by_size]
    lines += _rows("by category", rows, peak.bytes)
    sites = [(group.bytes, group.name or f"no call stack{_reason(group.no_stack_reason)}") for group in peak.top_sites]
    return lines + _rows("by allocation site", sites[:MAX_SITES], peak.bytes)


def _rows(title: str, rows: list[tuple[int, str]], whole: int) -> list[str]:
    if not rows:
        return []
    return [
        f"  {title}:",
        *(f"    {format_bytes(size):>10}  {format_share(size, whole):>6}  {name}" for size, name in rows),
    ]


def _reason(reason: str | None) -> str:
    return f" ({reason})" if reason else ""
