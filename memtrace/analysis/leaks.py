"""Memory leaks: allocation sites whose live bytes grow from step to step, and when a capacity is exhausted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.block_signatures import assign_signatures, describe_signature, median_by_group
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak
from memtrace.analysis.retained_memory import RetainedMemory, retained_memory, step_end_lifetimes
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
    retained = retained_memory(trace)
    result = measure_leaks(retained, min_growing_steps)
    if result.bytes_per_step is None:
        return replace(result, capacity_bytes=capacity_bytes)
    ends = step_rows(trace).end_row[WARM_UP_STEPS:]
    return replace(
        result,
        capacity_bytes=capacity_bytes,
        steps_to_capacity=_steps_to_capacity(trace, capacity_bytes, result.bytes_per_step),
        long_lived=_long_lived_signatures(trace, ends) if with_long_lived else (),
    )


def measure_leaks(retained: RetainedMemory, min_growing_steps: int = MIN_GROWING_STEPS) -> LeakAnalysis:
    """Return how retained memory grows, without the time to exhaustion and without ``long_lived``."""
    result = LeakAnalysis(
        leaks=(),
        bytes_per_step=None,
        unattributed_bytes_per_step=None,
        num_steps=0,
        num_warm_up_steps=WARM_UP_STEPS,
        num_required_steps=WARM_UP_STEPS + min_growing_steps + 1,
        capacity_bytes=None,
        steps_to_capacity=None,
        long_lived=(),
        records_gc=retained.gc_freed_bytes is not None,
        gc_freed_bytes=retained.gc_freed_bytes,
    )
    if retained.num_ends <= min_growing_steps:
        return result
    leaks = _leaking_sites(retained, min_growing_steps)
    of_sites = sum(leak.bytes_per_step for leak in leaks)
    bytes_per_step = max(of_sites, _total_growth(retained, min_growing_steps))
    return replace(
        result,
        leaks=tuple(leaks[:MAX_ROWS]),
        bytes_per_step=bytes_per_step,
        unattributed_bytes_per_step=bytes_per_step - of_sites,
        num_steps=retained.num_ends,
    )


def _steps_to_capacity(trace: Trace, capacity_bytes: int | None, bytes_per_step: float) -> int | None:
    if capacity_bytes is None or bytes_per_step <= 0:
        return None
    highest = max((find_peak(trace, device).requested.bytes for device in trace.devices), default=0)
    # Memory that grows by copying is allocated twice at the peak, which then grows faster than what is retained. Peaks
    # that rise until the garbage collector runs do not count.
    steps = step_columns(trace)
    peaks, numbers = steps.peak_bytes[WARM_UP_STEPS:], steps.step[WARM_UP_STEPS:]
    peak_growth = float(np.median(np.diff(peaks) / np.diff(numbers))) if keeps_growing(peaks) else 0.0
    return max(int((capacity_bytes - highest) // max(bytes_per_step, peak_growth)), 0)


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
    return _total_growth(retained_memory(trace), min_growing_steps)


def _total_growth(retained: RetainedMemory, min_growing_steps: int) -> float:
    if retained.num_ends <= min_growing_steps:
        return 0.0
    live, kept = retained.all_sites()
    for series in (live, kept):
        if keeps_growing(series, min_growing_steps):
            return _slope_of_growth(series, retained.numbers)
    return _significant_slope(live, retained.numbers)


def _slope_of_growth(live: Array, numbers: Array) -> float:
    """Return the slope of the least-squares line through live bytes, from the first step that grows.

    Args:
        live: live bytes at the ends of steps.
        numbers: the numbers of the steps. Of a series that leaves out the first steps, the last ones count.
    """
    start = int(np.argmax(np.diff(live) > 0))
    return float(np.polyfit(numbers[len(numbers) - len(live) + start :], live[start:], 1)[0])


def _significant_slope(live: Array, numbers: Array) -> float:
    """Return the median slope of live bytes, 0 unless they rise significantly, in both halves of the steps as well."""
    if len(live) > MAX_STEPS_OF_TREND:
        # Equally spaced steps show the same trend.
        spacing = -(-len(live) // MAX_STEPS_OF_TREND)
        return _significant_slope(live[::spacing], numbers[::spacing])
    half = len(live) // 2
    parts = (slice(None), slice(half), slice(half, None))
    slopes = [_median_slope(live[part], numbers[part]) for part in parts] if half >= 2 else [0.0]
    earlier, later = np.triu_indices(len(live), 1)
    score = int(np.sign(live[later] - live[earlier]).sum())
    deviation = np.sqrt(len(live) * (len(live) - 1) * (2 * len(live) + 5) / 18)
    return slopes[0] if min(slopes) > 0 and score >= MIN_TREND_DEVIATIONS * deviation else 0.0


def _median_slope(live: Array, numbers: Array) -> float:
    earlier, later = np.triu_indices(len(live), 1)
    return float(np.median((live[later] - live[earlier]) / (numbers[later] - numbers[earlier])))


def _leaking_sites(retained: RetainedMemory, min_growing_steps: int) -> list[Leak]:
    """Return all leaking sites, fastest growth first."""
    leaks = []
    for number, site in enumerate(retained.sites):
        both = retained.of_site(number)
        if not any(len(series) and series[-1] > series[0] for series in both):
            continue
        growing = next((series for series in both if keeps_growing(series, min_growing_steps)), None)
        if growing is None:
            continue
        of_site = retained.at_end(number)
        # Blocks of the last step may still be in use, such as gradients allocated by the line of a retained loss.
        older = np.flatnonzero((of_site.first > 0) & (of_site.first < retained.num_ends - 1))
        grown = older if len(older) else np.arange(len(of_site.first))
        category = np.bincount(of_site.category[grown], of_site.size[grown], minlength=len(CATEGORIES)).argmax()
        leaks.append(
            Leak(
                site=site,
                category=CATEGORIES[int(category)],
                bytes_per_step=_slope_of_growth(growing, retained.numbers),
                num_growing_steps=int((np.diff(growing) > 0).sum()),
                num_blocks=len(of_site.first),
                live_bytes=int(both[0][-1]),
                gc_freed_bytes=retained.gc_freed_bytes_of(of_site.stack),
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
