"""Memory leaks: allocation sites whose live bytes grow from step to step, and when a capacity is exhausted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.attribution import SPAN, rows_at, step_rows
from memtrace.analysis.block_signatures import assign_signatures, describe_signature, median_by_group
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak
from memtrace.analysis.steps import step_columns
from memtrace.analysis.thresholds import (
    MAX_LOST_SHARE,
    MAX_USUAL_LIFETIME_STEPS,
    MIN_EXTRA_STEPS,
    MIN_GROWING_STEPS,
    MIN_GROWTH_SPAN,
    MIN_TREND_DEVIATIONS,
    MIN_USUAL_SHARE,
    WARM_UP_STEPS,
)
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

MAX_ROWS: Final = 10
"""Number of leaks, and of long-lived signatures, that are reported."""
MAX_STEPS_OF_TREND: Final = 1_000
"""Most steps that are compared with each other for a trend; bounds the run time."""
GC_RANGE: Final = "gc"
"""Name of the ranges that a recording writes for the runs of Python's garbage collector that freed something."""


@dataclass(frozen=True)
class Leak:
    """An allocation site that retains more bytes from step to step."""

    site: str | None
    """``file:line function``; None where no stack was recorded."""
    category: str
    """Category of most of the retained bytes."""
    bytes_per_step: float
    """Slope of the least-squares line through the live bytes at the ends of steps, from the first step that grows."""
    num_growing_steps: int
    """Steps at whose end more is live than at the end of the step before."""
    num_blocks: int
    """Blocks of the site that are live at the end of the last step."""
    live_bytes: int
    """Bytes of these blocks."""
    gc_freed_bytes: int
    """Bytes of the site's blocks that only the garbage collector freed: reference cycles kept them alive."""


@dataclass(frozen=True)
class LongLivedSignature:
    """A block signature of which some blocks live for more steps than usual."""

    site: str
    """``file:line function, operator`` of the allocation."""
    bytes: int
    """Sum of the sizes of these blocks."""
    num_blocks: int
    usual_steps: int
    """Median number of step ends that a block of the signature outlives."""
    longest_steps: int
    """Largest number of step ends that a block of the signature outlives."""


@dataclass(frozen=True)
class LeakAnalysis(Displayed):
    """Memory growth, as ``memtrace leaks --json`` prints it."""

    leaks: tuple[Leak, ...]
    """Leaking sites, fastest growth first."""
    bytes_per_step: float | None
    """Growth of all live memory at the ends of steps, 0 where it does not keep growing; None with too few steps."""
    unattributed_bytes_per_step: float | None
    """The part of it that grows at no single site, such as buffers of many sites; None with too few steps."""
    num_steps: int
    """Analyzed steps, warm-up excluded; 0 with too few steps."""
    num_warm_up_steps: int
    """Excluded steps at the start."""
    num_required_steps: int
    """Number of steps that a trace must have to be analyzed, warm-up included."""
    capacity_bytes: int | None
    """Memory capacity as given."""
    steps_to_capacity: int | None
    """Steps after the end of the trace until the capacity is exhausted; None without a capacity or without growth."""
    long_lived: tuple[LongLivedSignature, ...]
    """Signatures of which some blocks live longer than usual, most bytes first."""
    records_gc: bool
    """Whether the trace holds runs of the garbage collector."""
    gc_freed_bytes: int | None
    """Bytes of all blocks that only the garbage collector freed; None where its runs were not recorded."""


def find_leaks(
    trace: Trace,
    *,
    min_growing_steps: int = MIN_GROWING_STEPS,
    capacity_bytes: int | None = None,
    with_long_lived: bool = True,
) -> LeakAnalysis:
    """Return how the live memory of a single-rank trace grows from step to step, and the sites that retain it.

    The growth of all live memory is measured first (see ``measure_total_growth``) and then attributed to sites. A site
    leaks when its live bytes at step ends keep growing after warm-up, see ``keeps_growing``. Allocations made
    once (optimizer state, a workspace) and caches that fill up and then stay the same size are not leaks.

    The time to exhaustion is measured from the highest peak of any device. Peaks that grow faster than the retained
    memory (``torch.cat`` holds the old and the new tensor) determine it.

    Args:
        trace: a single-rank trace.
        min_growing_steps: minimum number of steps in which a site must grow.
        capacity_bytes: memory capacity; gives ``steps_to_capacity``.
        with_long_lived: also compute ``long_lived``, which takes most of the time.
    """
    return trace.cached(_find_leaks, min_growing_steps, capacity_bytes, with_long_lived)


def _find_leaks(
    trace: Trace, min_growing_steps: int, capacity_bytes: int | None, with_long_lived: bool
) -> LeakAnalysis:
    ends = step_rows(trace).end_row[WARM_UP_STEPS:]
    gc_freed = _gc_freed_blocks(trace)
    result = LeakAnalysis(
        leaks=(),
        bytes_per_step=None,
        unattributed_bytes_per_step=None,
        num_steps=0,
        num_warm_up_steps=WARM_UP_STEPS,
        num_required_steps=WARM_UP_STEPS + min_growing_steps + 1,
        capacity_bytes=capacity_bytes,
        steps_to_capacity=None,
        long_lived=(),
        records_gc=gc_freed is not None,
        gc_freed_bytes=None if gc_freed is None else int(blocks(trace).size[gc_freed].sum()),
    )
    if len(ends) <= min_growing_steps:
        return result
    leaks = _leaking_sites(trace, ends, min_growing_steps, gc_freed)
    of_sites = sum(leak.bytes_per_step for leak in leaks)
    bytes_per_step = max(of_sites, measure_total_growth(trace, min_growing_steps))
    return replace(
        result,
        leaks=tuple(leaks[:MAX_ROWS]),
        bytes_per_step=bytes_per_step,
        unattributed_bytes_per_step=bytes_per_step - of_sites,
        num_steps=len(ends),
        steps_to_capacity=_steps_to_capacity(trace, capacity_bytes, bytes_per_step),
        long_lived=_long_lived_signatures(trace, ends) if with_long_lived else (),
    )


def _steps_to_capacity(trace: Trace, capacity_bytes: int | None, bytes_per_step: float) -> int | None:
    if capacity_bytes is None or bytes_per_step <= 0:
        return None
    highest = max((find_peak(trace, device).requested.bytes for device in trace.devices), default=0)
    # Memory that grows by copying is allocated twice at the peak, which then grows faster than what is retained. Peaks
    # that rise until the garbage collector runs do not count.
    peaks = step_columns(trace).peak_bytes[WARM_UP_STEPS:]
    peak_growth = float(np.median(np.diff(peaks))) if keeps_growing(peaks) else 0.0
    return max(int((capacity_bytes - highest) // max(bytes_per_step, peak_growth)), 0)


@dataclass(frozen=True)
class StepEndLifetimes:
    """The step ends at which each block is live: ``first`` <= k < ``end``, indexed by block."""

    first: Array
    end: Array


def step_end_lifetimes(trace: Trace, ends: Array) -> StepEndLifetimes:
    """Return for each block the step ends at which it is live.

    Args:
        trace: a single-rank trace.
        ends: ascending rows of events at which steps end, each the first row of what follows. A block that is freed in
            that row has outlived the step.
    """
    table = blocks(trace)
    first = np.searchsorted(ends, np.maximum(table.alloc_event, 0), side="right")
    end = np.where(table.free_event >= 0, np.searchsorted(ends, table.free_event, side="right"), len(ends))
    return StepEndLifetimes(first, end)


def live_bytes_at_step_ends(group: Array, size: Array, first: Array, end: Array, shape: tuple[int, int]) -> Array:
    """Return the live bytes of each group (row) at the end of each step (column).

    Args:
        group: group of each block, from 0.
        size: bytes of each block.
        first: first step end at which each block is live.
        end: first later step end at which it is not.
        shape: number of groups and number of steps.
    """
    num_groups, num_steps = shape
    change = np.zeros((num_groups, num_steps + 1), np.int64)
    np.add.at(change, (group, first), size)
    np.add.at(change, (group, end), -size)
    live: Array = np.cumsum(change, axis=1)[:, :num_steps]
    return live


def kept_bytes_at_step_ends(group: Array, size: Array, first: Array, end: Array, shape: tuple[int, int]) -> Array:
    """Return the live bytes of each group at the end of each step but the first, without the blocks of the newest step.

    Those vary with the input of the step. The arguments are those of ``live_bytes_at_step_ends``.
    """
    return live_bytes_at_step_ends(group, size, np.minimum(first + 1, end), end, shape)[:, 1:]


def keeps_growing(live: Array, min_growing_steps: int = MIN_GROWING_STEPS) -> bool:
    """Return whether live bytes at step ends keep growing to the end.

    They must grow in at least ``min_growing_steps`` steps, spread over a third of the steps or more and into the last
    third, and lose at most a tenth of what they gain.

    Args:
        live: live bytes at the end of each step, warm-up excluded.
        min_growing_steps: minimum number of steps that grow.
    """
    change = np.diff(live)
    gained, lost = int(change[change > 0].sum()), -int(change[change < 0].sum())
    third = max(len(change) // MIN_GROWTH_SPAN, 1)
    growing = np.flatnonzero(change > 0)
    if len(growing) < min_growing_steps:
        return False
    is_lasting = growing[-1] - growing[0] >= third and growing[-1] >= len(change) - third
    return bool(is_lasting and lost <= MAX_LOST_SHARE * gained)


def measure_total_growth(trace: Trace, min_growing_steps: int = MIN_GROWING_STEPS) -> float:
    """Return by how many bytes per step the memory that is live at step ends grows; 0 where it does not keep growing.

    The growth is that of all blocks that outlive two step ends if it keeps growing, because the blocks of the newest
    step vary with its input; otherwise the median slope (Theil-Sen) of all live bytes, if their rank correlation with
    the step (Mann-Kendall) leaves no doubt.

    Args:
        trace: a single-rank trace.
        min_growing_steps: minimum number of steps in which the memory must grow.
    """
    ends, table = step_rows(trace).end_row[WARM_UP_STEPS:], blocks(trace)
    if len(ends) <= min_growing_steps:
        return 0.0
    lifetimes = step_end_lifetimes(trace, ends)
    retained = np.flatnonzero((table.alloc_event >= 0) & (lifetimes.end > lifetimes.first))
    first, end, size = lifetimes.first[retained], lifetimes.end[retained], table.size[retained]
    together, shape = np.zeros(len(retained), np.int64), (1, len(ends))
    live = live_bytes_at_step_ends(together, size, first, end, shape)[0]
    kept = kept_bytes_at_step_ends(together, size, first, end, shape)[0]
    for series in (live, kept):
        if keeps_growing(series, min_growing_steps):
            return _slope_of_growth(series)
    return _significant_slope(live)


def _slope_of_growth(live: Array) -> float:
    """Return the slope of the least-squares line through live bytes, from the first step that grows."""
    start = int(np.argmax(np.diff(live) > 0))
    return float(np.polyfit(np.arange(start, len(live)), live[start:], 1)[0])


def _significant_slope(live: Array) -> float:
    """Return the median slope of live bytes, 0 unless they rise significantly, in both halves of the steps as well."""
    if len(live) > MAX_STEPS_OF_TREND:
        # Equally spaced steps show the same trend.
        spacing = -(-len(live) // MAX_STEPS_OF_TREND)
        return _significant_slope(live[::spacing]) / spacing
    half = len(live) // 2
    slopes = [_median_slope(part) for part in (live, live[:half], live[half:])] if half >= 2 else [0.0]
    earlier, later = np.triu_indices(len(live), 1)
    score = int(np.sign(live[later] - live[earlier]).sum())
    deviation = np.sqrt(len(live) * (len(live) - 1) * (2 * len(live) + 5) / 18)
    return slopes[0] if min(slopes) > 0 and score >= MIN_TREND_DEVIATIONS * deviation else 0.0


def _median_slope(live: Array) -> float:
    earlier, later = np.triu_indices(len(live), 1)
    return float(np.median((live[later] - live[earlier]) / (later - earlier)))


def _leaking_sites(trace: Trace, ends: Array, min_growing_steps: int, gc_freed: Array | None) -> list[Leak]:
    """Return all leaking sites, fastest growth first."""
    table, lifetimes, num_steps = blocks(trace), step_end_lifetimes(trace, ends), len(ends)
    retained = np.flatnonzero((table.alloc_event >= 0) & (lifetimes.end > lifetimes.first) & (table.size > 0))
    if not len(retained):
        return []
    first, end = lifetimes.first[retained], lifetimes.end[retained]
    # By site alone: a leaked block and the one still in use can differ in category.
    sites, group = allocation_sites(trace, table.stack[retained])
    live = live_bytes_at_step_ends(group, table.size[retained], first, end, (len(sites), num_steps))
    is_gc_freed = np.zeros(len(table), bool)
    is_gc_freed[gc_freed if gc_freed is not None else []] = True
    kept = kept_bytes_at_step_ends(group, table.size[retained], first, end, (len(sites), num_steps))
    leaks = []
    for row in np.flatnonzero((live[:, -1] > live[:, 0]) | (kept[:, -1] > kept[:, 0])).tolist():
        growing = next((part[row] for part in (live, kept) if keeps_growing(part[row], min_growing_steps)), None)
        if growing is None:
            continue
        is_live = (group == row) & (end == num_steps)
        of_site = retained[is_live]
        # Blocks of the last step may still be in use, such as gradients allocated by the line of a retained loss.
        older = retained[is_live & (first > 0) & (first < num_steps - 1)]
        grown = older if len(older) else of_site
        category = np.bincount(table.category[grown], table.size[grown], minlength=len(CATEGORIES)).argmax()
        leaks.append(
            Leak(
                site=sites[row],
                category=CATEGORIES[int(category)],
                bytes_per_step=_slope_of_growth(growing),
                num_growing_steps=int((np.diff(growing) > 0).sum()),
                num_blocks=len(of_site),
                live_bytes=int(live[row, -1]),
                gc_freed_bytes=int(table.size[np.isin(table.stack, table.stack[of_site]) & is_gc_freed].sum()),
            )
        )
    return sorted(leaks, key=lambda leak: -leak.bytes_per_step)


def _long_lived_signatures(trace: Trace, ends: Array) -> tuple[LongLivedSignature, ...]:
    """Return the signatures of which some blocks outlive more step ends than usual, most bytes first."""
    signatures, table, lifetimes = assign_signatures(trace), blocks(trace), step_end_lifetimes(trace, ends)
    members = np.flatnonzero(signatures.step_index >= WARM_UP_STEPS)
    signature, lifetime = signatures.of_block[members], (lifetimes.end - lifetimes.first)[members]
    usual = median_by_group(signature, lifetime, len(signatures))
    # A signature that few steps have has no usual lifetime.
    is_frequent = signatures.num_steps >= MIN_USUAL_SHARE * len(step_rows(trace).number)
    is_long = is_frequent[signature] & (usual[signature] <= MAX_USUAL_LIFETIME_STEPS)
    is_long &= lifetime >= usual[signature] + MIN_EXTRA_STEPS
    rows = []
    for number in np.unique(signature[is_long]).tolist():
        chosen = is_long & (signature == number)
        rows.append(
            LongLivedSignature(
                site=describe_signature(trace, signatures, number),
                bytes=int(table.size[members[chosen]].sum()),
                num_blocks=int(chosen.sum()),
                usual_steps=int(usual[number]),
                longest_steps=int(lifetime[chosen].max()),
            )
        )
    return tuple(sorted(rows, key=lambda row: -row.bytes)[:MAX_ROWS])


def _gc_freed_blocks(trace: Trace) -> Array | None:
    """Return the blocks that were freed during garbage collections; None where the trace holds no collections."""
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    ranges = np.flatnonzero(spans["kind"] == SPAN["range"])
    names = [name for name in np.unique(spans["name"][ranges]).tolist() if trace.name(name) == GC_RANGE]
    if not names:
        return None
    collections = ranges[np.isin(spans["name"][ranges], names)]
    collections = collections[np.argsort(spans["start_ns"][collections], kind="stable")]
    start = rows_at(trace, spans["start_ns"][collections])
    end = rows_at(trace, spans["start_ns"][collections] + spans["duration_ns"][collections])
    free = blocks(trace).free_event
    collection = np.searchsorted(start, free, side="right") - 1
    inside = (free >= 0) & (collection >= 0) & (free < end[np.maximum(collection, 0)])
    freed: Array = np.flatnonzero(inside)
    return freed
