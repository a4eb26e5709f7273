"""The section of the page on wasted memory: findings, and what each fix would save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memtrace.dashboards.sections import Column, Row, Table
from memtrace.dashboards.text import name_text

from memtrace.analysis.findings import DeviceWaste, Finding, find_device_waste
from memtrace.analysis.options import DEFAULT_OPTIONS, AnalysisOptions
from memtrace.units import UNKNOWN, format_bytes

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_ROWS: Final = 15
"""Most findings on the page."""
MAX_RESTRUCTURING_ROWS: Final = 5
"""Most findings on the page whose fix needs more than a single line."""
_COLUMNS: Final = (
    Column("Pattern"),
    Column("Allocation site [module]", "code"),
    Column("Category", "category"),
    Column("Saves", "number"),
    Column("Share of peak", "share"),
    Column("New peak", "number"),
    Column("Blocks", "number"),
)


def findings_table(trace: Trace, device: str, options: AnalysisOptions = DEFAULT_OPTIONS) -> Table | None:
    """Return the findings of a device with the peak after each fix; None if there is nothing to show."""
    waste = find_device_waste(trace, device, min_bytes=options.min_waste_bytes)
    skipped = " ".join(f"Not checked: {', '.join(part.patterns)} ({part.reason})." for part in waste.skipped_patterns)
    if not waste.findings:
        return Table((), (), note=f"No wasted memory was found. {skipped}") if skipped else None
    findings = _choose_findings(waste)
    rows = tuple(_row(waste, finding) for finding in findings)
    return Table(_COLUMNS, rows, note=f"{_note(waste, findings)} {skipped}".rstrip(), detail="advice")


def _choose_findings(waste: DeviceWaste) -> list[Finding]:
    """Return the best findings of both kinds of fixes, so that many of one kind do not hide the other."""
    saving = [finding for finding in waste.findings if finding.saved_bytes] or list(waste.findings)
    single_line = [finding for finding in saving if finding.is_single_line_fix]
    others = [finding for finding in saving if not finding.is_single_line_fix][:MAX_RESTRUCTURING_ROWS]
    return [*single_line[: MAX_ROWS - len(others)], *others]


def _row(waste: DeviceWaste, finding: Finding) -> Row:
    mark = "" if finding.is_single_line_fix else " *"
    cells = (
        f"{finding.pattern}{mark}",
        name_text(f"{finding.site or UNKNOWN} [{finding.module}]" if finding.module else finding.site or UNKNOWN),
        finding.category,
        f"{'up to ' if finding.is_upper_bound else ''}{format_bytes(finding.saved_bytes)}",
        finding.saved_bytes / max(waste.peak_bytes, 1),
        format_bytes(finding.peak_if_fixed_bytes),
        f"{finding.num_blocks:,}",
    )
    return Row(cells, (finding.advice,))


def _note(waste: DeviceWaste, shown: list[Finding]) -> str:
    sentences = [f"{len(shown)} of {len(waste.findings)} findings."]
    if any(finding.saved_bytes and finding.is_single_line_fix for finding in waste.findings):
        sentences.append(f"All single-line fixes together: {format_bytes(waste.peak_if_all_fixed_bytes)}.")
    if waste.lower_bound_bytes is not None:
        sentences.append(f"No schedule can go below {format_bytes(waste.lower_bound_bytes)}.")
    if not all(finding.is_single_line_fix for finding in shown):
        sentences.append("* Needs recomputation, offloading or in-place operators.")
    return " ".join(sentences)
