"""Access analysis: how access intervals are distributed, and which blocks could be swapped out during them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.bandwidth import CopyBandwidths
from memtrace.analysis.block_accesses import has_accesses
from memtrace.analysis.blocks import blocks
from memtrace.analysis.device_clock import describe_clocks
from memtrace.analysis.intervals import access_intervals
from memtrace.analysis.swap import (
    SwapCandidate,
    SwapTotals,
    assumed_bandwidths,
    find_swap_candidates,
    interval_clocks,
    swap_totals,
)
from memtrace.analysis.thresholds import MIN_SWAP_BYTES
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

PERCENTILES: Final = (1, 10, 25, 50, 75, 90, 99, 100)
SIZE_CLASSES: Final = (
    (0, "< 4 KiB"),
    (4 << 10, "4 to 64 KiB"),
    (64 << 10, "64 KiB to 1 MiB"),
    (1 << 20, "1 to 16 MiB"),
    (16 << 20, ">= 16 MiB"),
)
"""Smallest size in bytes and name of each size class, ascending."""


@dataclass(frozen=True)
class IntervalGroup:
    """The access intervals of the blocks of one category or size class."""

    name: str
    num_intervals: int
    median_ns: int
    p90_ns: int
    """90th percentile."""


@dataclass(frozen=True)
class AccessAnalysis(Displayed):
    """Access intervals and swap candidates, as ``memtrace access --json`` prints them."""

    num_intervals: int | None
    """None where reads and writes were not recorded, or times are unknown (fake tensors)."""
    num_intervals_by_clock: dict[str, int]
    """Number of intervals by the clock that measured them: ``host`` (operators on the CPU), ``launch`` (the host time
    at which operators on a GPU were launched) and ``device`` (the GPU's time)."""
    clock_note: str
    """A sentence about these clocks."""
    percentiles_ns: dict[str, int | None]
    """Length of the intervals at each percentile (``"50"`` is the median); None without intervals."""
    by_category: tuple[IntervalGroup, ...]
    by_size: tuple[IntervalGroup, ...]
    bandwidths: CopyBandwidths
    min_bytes: int
    """Smallest block that is considered for swapping."""
    swappable: SwapTotals
    """Intervals long enough for a swap at t = a + b * S per copy."""
    swappable_bandwidth_only: SwapTotals
    """The same without latency, at t = b * S per copy."""
    candidates: tuple[SwapCandidate, ...]
    """Swap candidates, most bytes at the peak first."""


def analyze_access(
    trace: Trace, bandwidths: CopyBandwidths | None = None, *, min_bytes: int = MIN_SWAP_BYTES
) -> AccessAnalysis:
    """Return the access intervals of a single-rank trace and the blocks that could be swapped out during them.

    Args:
        trace: a single-rank trace.
        bandwidths: cost of copies between device and host; default: ``assumed_bandwidths``.
        min_bytes: smallest block to swap.
    """
    bandwidths = bandwidths or assumed_bandwidths(trace)
    intervals, table = access_intervals(trace), blocks(trace)
    records_accesses = has_accesses(trace) and trace.has_times
    unknown = SwapTotals(None, None, None)
    clocks = interval_clocks(trace)
    percentiles = _percentiles(intervals.duration_ns, PERCENTILES) if len(intervals) else [None] * len(PERCENTILES)
    return AccessAnalysis(
        num_intervals=len(intervals) if records_accesses else None,
        num_intervals_by_clock=clocks,
        clock_note=describe_clocks(clocks),
        percentiles_ns={str(percent): value for percent, value in zip(PERCENTILES, percentiles, strict=True)},
        by_category=_groups(intervals.duration_ns, table.category[intervals.block], CATEGORIES),
        by_size=_groups(
            intervals.duration_ns, size_classes(table.size[intervals.block]), tuple(name for _, name in SIZE_CLASSES)
        ),
        bandwidths=bandwidths,
        min_bytes=min_bytes,
        swappable=swap_totals(trace, bandwidths, min_bytes=min_bytes) if records_accesses else unknown,
        swappable_bandwidth_only=(
            swap_totals(trace, bandwidths, with_latency=False, min_bytes=min_bytes) if records_accesses else unknown
        ),
        candidates=find_swap_candidates(trace, bandwidths, min_bytes=min_bytes),
    )


def size_classes(size: Array) -> Array:
    """Return the position in ``SIZE_CLASSES`` of each size in bytes."""
    return np.searchsorted([smallest for smallest, _ in SIZE_CLASSES], size, side="right") - 1


def _percentiles(values: Array, percents: tuple[int, ...]) -> list[int]:
    """Return percentiles that occur among the values, which are not empty."""
    return [int(value) for value in np.percentile(values, percents, method="inverted_cdf")]


def _groups(duration_ns: Array, code: Array, names: tuple[str, ...]) -> tuple[IntervalGroup, ...]:
    groups = []
    for number, name in enumerate(names):
        durations = duration_ns[code == number]
        if len(durations):
            median, p90 = _percentiles(durations, (50, 90))
            groups.append(IntervalGroup(name, len(durations), median, p90))
    return tuple(groups)
