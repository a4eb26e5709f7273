"""Memory growth: how much more memory is live at the end of each step, and the live bytes of each site."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.attribution import step_rows
from memtrace.analysis.blocks import blocks
from memtrace.analysis.leaks import LeakAnalysis, find_leaks, keeps_growing
from memtrace.analysis.retained_memory import kept_bytes_at_step_ends, live_bytes_at_step_ends, step_end_lifetimes
from memtrace.analysis.thresholds import WARM_UP_STEPS
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.trace import Trace

MAX_SOURCES: Final = 5
"""Number of sites that are reported as sources of growth."""


@dataclass(frozen=True)
class GrowthSource:
    """A site whose retained memory grows."""

    site: str
    """``file:line function (category)``."""
    bytes_per_step: int


@dataclass(frozen=True)
class MemoryGrowth(Displayed):
    """Growth of the memory that is live at the ends of steps."""

    bytes_per_step: int
    """Growth of all live memory."""
    num_steps: int
    """Analyzed steps, warm-up excluded."""
    num_warm_up_steps: int
    """Excluded steps at the start."""
    sources: tuple[GrowthSource, ...]
    """The sites that grow fastest, at most ``MAX_SOURCES``; empty where the growth is spread over many sites."""


@dataclass(frozen=True)
class GrowthCurve:
    """Live bytes of one site at the end of each step."""

    site: str
    live_bytes: Array
    """One element per step, warm-up included."""
    is_leak: bool
    """Whether the bytes keep growing after warm-up."""


def measure_growth(trace: Trace) -> MemoryGrowth | None:
    """Return the memory growth of a single-rank trace, of all live memory; None with too few steps."""
    return describe_growth(find_leaks(trace, with_long_lived=False))


def describe_growth(result: LeakAnalysis) -> MemoryGrowth | None:
    """Return the growth by what leaks; None with too few steps."""
    if result.bytes_per_step is None:
        return None
    sources = tuple(
        GrowthSource(f"{leak.site or 'no stack'} ({leak.category})", round(leak.bytes_per_step))
        for leak in result.leaks[:MAX_SOURCES]
    )
    return MemoryGrowth(round(result.bytes_per_step), result.num_steps, result.num_warm_up_steps, sources)


def growth_curves(trace: Trace, max_sites: int) -> tuple[GrowthCurve, ...]:
    """Return the curves of the sites that retain most at the last step's end, leaks first.

    Args:
        trace: a single-rank trace.
        max_sites: number of curves to return.
    """
    ends, table = step_rows(trace).end_row, blocks(trace)
    lifetimes = step_end_lifetimes(trace, ends)
    retained = np.flatnonzero((table.alloc_event >= 0) & (lifetimes.end > lifetimes.first))
    if not len(ends) or not len(retained):
        return ()
    sites, group = allocation_sites(trace, table.stack[retained])
    first, end = lifetimes.first[retained], lifetimes.end[retained]
    live = live_bytes_at_step_ends(group, table.size[retained], first, end, (len(sites), len(ends)))
    kept = kept_bytes_at_step_ends(group, table.size[retained], first, end, (len(sites), len(ends)))
    is_leak = np.array(
        [
            keeps_growing(row[WARM_UP_STEPS:]) or keeps_growing(kept_row[WARM_UP_STEPS:])
            for row, kept_row in zip(live, kept, strict=True)
        ]
    )
    order = np.lexsort((-live[:, -1], ~is_leak))[:max_sites]
    return tuple(GrowthCurve(sites[row] or "no stack", live[row], bool(is_leak[row])) for row in order.tolist())
