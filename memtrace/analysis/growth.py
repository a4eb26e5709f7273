"""What grows: memory that is still live at the end of every step and becomes more from step to step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.analysis.sites import site
from memtrace.analysis.steps import step_columns
from memtrace.arrays import Array
from memtrace.schema import CATEGORIES
from memtrace.trace import Trace

# Optimizer state and workspaces are made in the first steps: those tell nothing about growth.
WARM_UP_STEPS = 2
MIN_STEPS = 4


@dataclass(frozen=True)
class Growth:
    """Bytes a step by which the memory live at step ends grows, and which sites and categories keep it."""

    bytes_per_step: int
    num_steps: int
    """Steps that were looked at, warm-up left out."""
    sources: tuple[tuple[str, int], ...]
    """('file:line function (category)', bytes a step) of blocks made after warm-up and still live, the most first."""


def growth(trace: Trace) -> Growth | None:
    """The growth of a trace; None where it has too few steps to tell.

    The slope is the median over the steps of the change from one step's end to the next: one step that keeps
    something for good is not growth.
    """
    columns = step_columns(trace)
    live = columns["live_end_bytes"][WARM_UP_STEPS:]
    if len(live) < MIN_STEPS:
        return None
    slope = int(np.median(np.diff(live)))
    return Growth(slope, len(live), _sources(trace, columns, len(live)) if slope > 0 else ())


def _sources(trace: Trace, columns: dict[str, Array], num_steps: int) -> tuple[tuple[str, int], ...]:
    found = blocks(trace)
    first = int(columns["step"][WARM_UP_STEPS])
    last = int(columns["step"][-1])
    # The last step's own survivors are there in every step.
    kept = (found.step >= first) & (found.step < last) & (found.free_event < 0)
    totals: dict[str, int] = {}
    for stack, category in set(zip(found.stack[kept].tolist(), found.category[kept].tolist(), strict=True)):
        here = kept & (found.stack == stack) & (found.category == category)
        text = f"{site(trace, stack) or 'no stack'} ({CATEGORIES[category]})"
        totals[text] = totals.get(text, 0) + int(found.size[here].sum())
    rows = ((text, total // max(num_steps - 1, 1)) for text, total in totals.items())
    return tuple(sorted(rows, key=lambda row: -row[1])[:5])
