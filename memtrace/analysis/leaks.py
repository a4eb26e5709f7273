"""Leaks: sites whose live bytes grow step by step, how fast, and when a capacity is reached."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.attribution import SPAN, rows_at, step_rows
from memtrace.analysis.block_signatures import WARM_UP_STEPS, middle_by, role_text, roles
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak
from memtrace.analysis.steps import step_columns
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

MIN_STEPS = 3
TOP = 10
GC_RANGE = "gc"
"""Name of the ranges that a recording writes for Python's garbage collections that freed something."""


@dataclass(frozen=True)
class Leak:
    """A site that keeps more bytes at the end of every step than of the one before."""

    site: str | None
    category: str
    bytes_per_step: float
    """Slope of the least-squares line through its live bytes at the ends of steps, since they began to grow."""
    num_growing_steps: int
    num_blocks: int
    """Blocks of it that are live at the end of the last step."""
    bytes_live: int
    cycle_bytes: int
    """Bytes of its blocks that only Python's garbage collector freed: reference cycles held them."""


@dataclass(frozen=True)
class Outliving:
    """A role some of whose blocks live for more steps than is usual for it."""

    site: str
    bytes: int
    num_blocks: int
    usual_steps: int
    longest_steps: int


@dataclass(frozen=True)
class Leaks:
    """What grows. None in ``steps_to_capacity``: no capacity is known, or nothing grows.

    ``bytes_per_step``: of all of them; None where there are too few steps to tell.
    """

    leaks: tuple[Leak, ...]
    bytes_per_step: float | None
    num_steps: int
    """Steps looked at, warm-up left out; 0 where there are too few to tell."""
    capacity_bytes: int | None
    steps_to_capacity: int | None
    outliving: tuple[Outliving, ...]
    cycles_told: bool
    """Whether the trace tells of garbage collections."""
    cycle_bytes: int | None
    """Bytes of all blocks that only the garbage collector freed; None where collections are not told."""

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; bytes, bytes a step."""
        return asdict(self)


def leaks(
    trace: Trace, min_steps: int = MIN_STEPS, capacity_bytes: int | None = None, with_outliving: bool = True
) -> Leaks:
    """The leaks of a trace, the steepest first.

    A site leaks when its live bytes at step ends grow in at least ``min_steps`` steps after warm-up, over a third of
    them or more and still in the last third, and no more than a tenth of what it gains is given back. What is made
    once (optimizer state, a workspace) and a cache that fills up and then stays are none. ``steps_to_capacity`` counts
    from the end of the trace, from the peak of the device that has the highest, by what grows faster: what is live at
    the steps' ends or their peaks. ``with_outliving``: roles are worked out.
    """
    ends = step_rows(trace).end_row[WARM_UP_STEPS:]
    cycle = _cycle_blocks(trace)
    if len(ends) <= min_steps:
        told = None if cycle is None else int(blocks(trace).size[cycle].sum())
        return Leaks((), None, 0, capacity_bytes, None, (), cycle is not None, told)
    found = blocks(trace)
    first, end = ends_lived(trace, ends)
    kept = np.flatnonzero((found.alloc_event >= 0) & (end > first) & (found.size > 0))
    rows = _growing(trace, kept, first[kept], end[kept], len(ends), min_steps, cycle)
    slope = sum(leak.bytes_per_step for leak in rows)
    top = max((find_peak(trace, device).requested.bytes for device in trace.devices), default=0)
    left = None
    if capacity_bytes is not None and slope > 0:
        # What is grown by copying (torch.cat) is there twice at the peak, which then grows faster than what stays.
        of_peaks = float(np.median(np.diff(step_columns(trace)["peak_bytes"][WARM_UP_STEPS:])))
        left = max(int((capacity_bytes - top) // max(slope, of_peaks)), 0)
    outliving = _outliving(trace, first, end) if with_outliving else ()
    return Leaks(
        tuple(rows[:TOP]), slope, len(ends), capacity_bytes, left, outliving,
        cycle is not None, None if cycle is None else int(found.size[cycle].sum()),
    )  # fmt: skip


def ends_lived(trace: Trace, ends: Array) -> tuple[Array, Array]:
    """For each block the first of some steps' ends at which it is live, and the first one after at which it is not.

    An end is the first row of the next step: a block freed by that row has outlived the step.
    """
    found = blocks(trace)
    first = np.searchsorted(ends, np.maximum(found.alloc_event, 0), side="right")
    end = np.where(found.free_event >= 0, np.searchsorted(ends, found.free_event, side="right"), len(ends))
    return first, end


def live_at_ends(group: Array, size: Array, first: Array, end: Array, num_groups: int, num_steps: int) -> Array:
    """Live bytes of each group at the end of each step: blocks count in the steps [first, end)."""
    change = np.zeros((num_groups, num_steps + 1), np.int64)
    np.add.at(change, (group, first), size)
    np.add.at(change, (group, end), -size)
    live: Array = np.cumsum(change, axis=1)[:, :num_steps]
    return live


def is_growth(live: Array, min_steps: int) -> bool:
    """Whether a curve of live bytes at step ends grows for good; see ``leaks``."""
    change = np.diff(live)
    gains, losses = int(change[change > 0].sum()), -int(change[change < 0].sum())
    third = max(len(change) // 3, 1)
    grows = np.flatnonzero(change > 0)
    goes_on = len(grows) >= min_steps and grows[-1] - grows[0] >= third and grows[-1] >= len(change) - third
    return bool(goes_on and losses <= 0.1 * gains)


def growth_curves(trace: Trace, top: int = TOP) -> list[tuple[str, Array, bool]]:
    """(site, live bytes at each step's end, whether it leaks) of the sites that keep most, for a figure."""
    ends = step_rows(trace).end_row
    found = blocks(trace)
    first, end = ends_lived(trace, ends)
    kept = np.flatnonzero((found.alloc_event >= 0) & (end > first))
    if not len(ends) or not len(kept):
        return []
    sites, group = allocation_sites(trace, found.stack[kept])
    live = live_at_ends(group, found.size[kept], first[kept], end[kept], len(sites), len(ends))
    grows = np.array([is_growth(row[WARM_UP_STEPS:], MIN_STEPS) for row in live])
    order = np.lexsort((-live[:, -1], ~grows))[:top]
    return [(sites[one] or "no stack", live[one], bool(grows[one])) for one in order]


def _growing(
    trace: Trace, kept: Array, first: Array, end: Array, num_steps: int, min_steps: int, cycle: Array | None
) -> list[Leak]:
    if not len(kept):
        return []
    found = blocks(trace)
    # By site alone: a leaked block and the one that is still in use may differ in category.
    sites, group = allocation_sites(trace, found.stack[kept])
    live = live_at_ends(group, found.size[kept], first, end, len(sites), num_steps)
    freed_by_gc = np.zeros(len(found), bool)
    if cycle is not None:
        freed_by_gc[cycle] = True
    rows = []
    for one in np.flatnonzero(live[:, -1] > live[:, 0]).tolist():
        if not is_growth(live[one], min_steps):
            continue
        live_now = (group == one) & (end == num_steps)
        mine = kept[live_now]
        # What the last step made at this line may be in use, such as the gradients of the line of a kept loss.
        older = kept[live_now & (first > 0) & (first < num_steps - 1)]
        grown = older if len(older) else mine
        largest = np.bincount(found.category[grown], found.size[grown], minlength=len(CATEGORIES)).argmax()
        since = int(np.argmax(np.diff(live[one]) > 0))
        of_site = np.isin(found.stack, found.stack[mine])
        rows.append(
            Leak(
                sites[one],
                CATEGORIES[int(largest)],
                float(np.polyfit(np.arange(since, num_steps), live[one, since:], 1)[0]),
                int((np.diff(live[one]) > 0).sum()),
                len(mine),
                int(live[one, -1]),
                int(found.size[of_site & freed_by_gc].sum()),
            )
        )
    return sorted(rows, key=lambda leak: -leak.bytes_per_step)


def _outliving(trace: Trace, first: Array, end: Array) -> tuple[Outliving, ...]:
    """Roles with blocks that live on for at least two steps more than is usual for them."""
    found, size = roles(trace), blocks(trace).size
    steady = blocks(trace).step >= step_rows(trace).number[WARM_UP_STEPS]
    mine = np.flatnonzero((found.of_block >= 0) & steady)
    role, lasts = found.of_block[mine], (end - first)[mine]
    usual = middle_by(role, lasts, len(found))
    # Only roles that nearly every step has say what is usual.
    often = found.num_steps >= 0.5 * len(step_rows(trace).number)
    longer = (lasts >= usual[role] + 2) & often[role] & (usual[role] <= 1)
    rows = []
    for one in np.unique(role[longer]).tolist():
        these = mine[longer & (role == one)]
        longest = int(lasts[longer & (role == one)].max())
        rows.append(Outliving(role_text(trace, one), int(size[these].sum()), len(these), int(usual[one]), longest))
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:TOP])


def _cycle_blocks(trace: Trace) -> Array | None:
    """The blocks freed during garbage collections; None where the trace does not tell of any."""
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    ranges = np.flatnonzero(spans["kind"] == SPAN["range"])
    names = {int(name) for name in np.unique(spans["name"][ranges]) if trace.name(int(name)) == GC_RANGE}
    if not names:
        return None
    chosen = ranges[np.isin(spans["name"][ranges], list(names))]
    chosen = chosen[np.argsort(spans["start_ns"][chosen], kind="stable")]
    start = rows_at(trace, spans["start_ns"][chosen])
    end = rows_at(trace, spans["start_ns"][chosen] + spans["duration_ns"][chosen])
    free = blocks(trace).free_event
    place = np.searchsorted(start, free, side="right") - 1
    inside = (free >= 0) & (place >= 0) & (free < end[np.maximum(place, 0)])
    held: Array = np.flatnonzero(inside)
    return held
