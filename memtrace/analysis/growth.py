"""What grows: memory that is still live at the end of every step and becomes more from step to step."""

from __future__ import annotations

from dataclasses import dataclass

from memtrace.analysis.leaks import leaks
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
    """('file:line function (category)', bytes a step), the most first."""


def growth(trace: Trace) -> Growth | None:
    """The growth of a trace, the sum of its ``leaks``; None where it has too few steps to tell."""
    found = trace.cached(leaks, with_outliving=False)
    if found.bytes_per_step is None:
        return None
    rows = ((f"{one.site or 'no stack'} ({one.category})", round(one.bytes_per_step)) for one in found.leaks[:5])
    return Growth(round(found.bytes_per_step), found.num_steps, tuple(rows))
