"""What the figures and tables of several runs have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memtrace.dashboards.text import NO_VALUE, figure_text, name_text

from memtrace.analysis.compare import GroupComparison, Run, RunComparison
from memtrace.analysis.diff import Grouping
from memtrace.categories import CATEGORY_LABELS
from memtrace.units import (
    format_bytes,
    format_count,
    format_share,
)

MAX_CURVES: Final = 28
"""Largest number of runs whose curves are drawn; the first ones, whose lines differ."""
MAX_BARS: Final = 200
"""Largest number of runs drawn as bars and listed in the table."""
MAX_LABEL_CHARS: Final = 28
LEGEND_ABOVE: Final = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
GROUPING_TITLES: Final[dict[Grouping, str]] = {
    "category": "category",
    "module": "module",
    "site": "allocation site",
}
MINUS: Final = "\N{MINUS SIGN}"


@dataclass(frozen=True)
class ComparedRuns:
    """The runs and their comparison: the argument of the build functions."""

    runs: tuple[Run, ...]
    comparison: RunComparison


def axis_labels(labels: Sequence[str]) -> list[str]:
    """Return labels for axes and legends: bounded in length, and still different from each other."""
    short = [figure_text(label, MAX_LABEL_CHARS) for label in labels]
    return [label if short.count(label) == 1 else f"{number + 1}: {label}" for number, label in enumerate(short)]


def signed_bytes(num_bytes: int) -> str:
    """Return a difference of bytes with its sign."""
    return f"{'+' if num_bytes >= 0 else MINUS}{format_bytes(abs(num_bytes))}"


def signed_share(change: int, whole: int) -> str:
    """Return a change as a percentage of ``whole`` with its sign."""
    if not whole:
        return NO_VALUE
    return f"{'+' if change >= 0 else MINUS}{format_share(abs(change), whole)}"


def note_left_out(num_runs: int, most: int, verb: str) -> str:
    """Return a sentence about the runs beyond the first ``most``; empty where there are none."""
    hidden = num_runs - most
    return f"{format_count(hidden, 'more run')} {'is' if hidden == 1 else 'are'} not {verb}." if hidden > 0 else ""


def group_name(group: GroupComparison) -> str:
    """Return the name of a category, module or allocation site as people read it."""
    if group.grouping == "category":
        return CATEGORY_LABELS[group.name or "unknown"]
    return name_text(group.name) if group.name else f"unknown {GROUPING_TITLES[group.grouping]}"
