"""Swap candidates: blocks whose access interval is long enough to copy them to the host and back.

The swap inequality is S/B_d2h + S/B_h2d <= ATI. Intervals are measured by the GPU's clock where the recording has it
(``device_clock``). Source: "Pinpointing the Memory Behaviors of DNN Training" (ISPASS 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.bandwidth import CopyBandwidths, CopyCost, bandwidths_of_device_name
from memtrace.analysis.block_signatures import row_codes
from memtrace.analysis.blocks import blocks
from memtrace.analysis.device_clock import CLOCKS, Clock, count_clocks
from memtrace.analysis.intervals import access_intervals, device_intervals, spans_peak
from memtrace.analysis.peak import find_peak
from memtrace.analysis.thresholds import MIN_SWAP_BYTES
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

MAX_CANDIDATES: Final = 10
"""Number of sites that are reported as swap candidates, largest saving at the peak first."""


@dataclass(frozen=True)
class SwapTotals:
    """Intervals that are long enough for a swap, each for itself. None where accesses were not recorded."""

    num_intervals: int | None
    bytes: int | None
    """Sum of the sizes of the distinct blocks."""
    bytes_at_peak: int | None
    """Sum of the sizes of the blocks that can all be in host memory at the peak, with one copy at a time in each
    direction (``swapped_at_peak``)."""


@dataclass(frozen=True)
class SwapCandidate:
    """Blocks of one allocation site, category and size whose intervals are long enough for a swap."""

    site: str | None
    """``file:line function``; None where no stack was recorded."""
    category: str
    bytes: int
    """Size of one block."""
    num_intervals: int
    median_ns: int
    """Median length of these intervals."""
    clock: Clock | Literal["mixed"]
    """The clock that measured these intervals: ``host`` (operators on the CPU), ``launch`` (the host time at which
    operators on a GPU were launched) or ``device`` (the GPU's time)."""
    swap_ns: int
    """Time of the copy to the host and back of one block."""
    bytes_at_peak: int
    """Sum of the sizes of those of these blocks that can be in host memory at the peak, together with the blocks of all
    other candidates (``swapped_at_peak``)."""


def max_swappable_bytes(interval_ns: Array | float, costs: CopyBandwidths, *, with_latency: bool = True) -> Array:
    """Return the most bytes that can be copied to the host and back within intervals; 0 if the latency exceeds one.

    Args:
        interval_ns: length of one interval or of several.
        costs: cost of the copies.
        with_latency: t = a + b * S per copy; otherwise bandwidth alone, t = b * S.
    """
    left_ns = interval_ns - (costs.round_trip_latency_ns if with_latency else 0.0)
    num_bytes: Array = np.maximum(left_ns, 0.0) / costs.round_trip_ns_per_byte
    return num_bytes


def swappable_intervals(
    trace: Trace, costs: CopyBandwidths, *, with_latency: bool = True, min_bytes: int = MIN_SWAP_BYTES
) -> Array:
    """Return the intervals, as positions in ``access_intervals(trace)``, that are long enough to swap their block.

    Args:
        trace: a single-rank trace.
        costs: cost of the copies.
        with_latency: t = a + b * S per copy; otherwise bandwidth alone, t = b * S.
        min_bytes: smallest block to swap.
    """
    intervals = access_intervals(trace)
    size = blocks(trace).size[intervals.block]
    latency_ns = costs.round_trip_latency_ns if with_latency else 0.0
    is_long = size * costs.round_trip_ns_per_byte + latency_ns <= intervals.duration_ns
    rows: Array = np.flatnonzero(is_long & (size >= max(min_bytes, 1)))
    return rows


def assumed_bandwidths(trace: Trace) -> CopyBandwidths:
    """Return the costs of copies where none are given: those of the recorded card if it is known, else a TITAN Xp's."""
    names = (info.name for device, info in sorted(trace.manifest.devices.items()) if device != "cpu")
    return bandwidths_of_device_name(next(names, None))


def swappable_peak_bytes(
    trace: Trace, costs: CopyBandwidths | None = None, *, min_bytes: int = MIN_SWAP_BYTES
) -> int | None:
    """Return the bytes that could be in host memory at the peak; None where accesses or times are unknown.

    Copies are serialised in each direction (``swapped_at_peak``). By default they cost ``assumed_bandwidths``.

    ``interval_clocks`` returns the clocks of this answer.
    """
    if not len(access_intervals(trace)):
        return None
    costs = costs or assumed_bandwidths(trace)
    return _swap_totals(trace, swappable_intervals(trace, costs, min_bytes=min_bytes), costs).bytes_at_peak


def interval_clocks(trace: Trace) -> dict[str, int]:
    """Return the number of access intervals by the clock that measured them (``device_clock.CLOCKS``)."""
    return count_clocks(access_intervals(trace).clock)


def swap_totals(
    trace: Trace, costs: CopyBandwidths, *, with_latency: bool = True, min_bytes: int = MIN_SWAP_BYTES
) -> SwapTotals:
    """Return the totals of ``swappable_intervals``, of a trace with recorded accesses."""
    rows = swappable_intervals(trace, costs, with_latency=with_latency, min_bytes=min_bytes)
    return _swap_totals(trace, rows, costs, with_latency=with_latency)


def device_swap_totals(
    trace: Trace, device: str, costs: CopyBandwidths, *, min_bytes: int = MIN_SWAP_BYTES
) -> SwapTotals:
    """Return the totals of the intervals of one device that are long enough, of a trace with recorded accesses."""
    rows = swappable_intervals(trace, costs, min_bytes=min_bytes)
    return _swap_totals(trace, rows[np.isin(rows, device_intervals(trace, device))], costs)


def _swap_totals(trace: Trace, rows: Array, costs: CopyBandwidths, *, with_latency: bool = True) -> SwapTotals:
    block, size = access_intervals(trace).block[rows], blocks(trace).size
    at_peak = block[swapped_at_peak(trace, rows, costs, with_latency=with_latency)]
    return SwapTotals(len(rows), int(size[np.unique(block)].sum()), int(size[np.unique(at_peak)].sum()))


def swapped_at_peak(trace: Trace, rows: Array, costs: CopyBandwidths, *, with_latency: bool = True) -> Array:
    """Return for each of some intervals whether its block can be in host memory at the peak, all of these together.

    Copies of a device are serialised in each direction: those to the host end before the peak, and those back begin
    after it and end before the next access. Larger blocks are considered first.

    Args:
        trace: a single-rank trace.
        rows: positions in ``access_intervals(trace)``.
        costs: cost of the copies.
        with_latency: t = a + b * S per copy; otherwise bandwidth alone, t = b * S.
    """
    intervals, table = access_intervals(trace), blocks(trace)
    is_swapped = np.zeros(len(rows), bool)
    spanning = spans_peak(trace, rows)
    for code, device in enumerate(trace.devices):
        chosen = np.flatnonzero(spanning & (table.device[intervals.block[rows]] == code))
        time_ns = find_peak(trace, device).time_ns
        if not len(chosen) or time_ns is None:
            continue
        of_device = rows[chosen]
        size = table.size[intervals.block[of_device]]
        begin_ns = intervals.start_ns[of_device]
        before = _Copies(size, time_ns - begin_ns, costs.d2h, with_latency=with_latency)
        after = _Copies(
            size, begin_ns + intervals.duration_ns[of_device] - time_ns, costs.h2d, with_latency=with_latency
        )
        for position in np.argsort(-size, kind="stable").tolist():
            if before.has_room(position) and after.has_room(position):
                before.add(position)
                after.add(position)
                is_swapped[chosen[position]] = True
    return is_swapped


class _Copies:
    """Copies in one direction, each of which must happen within a window that begins or ends at the peak."""

    def __init__(self, size: Array, window_ns: Array, cost: CopyCost, *, with_latency: bool) -> None:
        self._order = np.argsort(window_ns, kind="stable")
        self._place = np.argsort(self._order, kind="stable")
        self._copy_ns = size * cost.ns_per_byte + (cost.latency_ns if with_latency else 0.0)
        # What is left of each window after the copies that must happen within it.
        self._left_ns = window_ns[self._order].astype(np.float64)

    def has_room(self, position: int) -> bool:
        """Return whether one more copy fits: every window that contains its own has room for it."""
        return bool((self._left_ns[self._place[position] :] >= self._copy_ns[position]).all())

    def add(self, position: int) -> None:
        """Add a copy."""
        self._left_ns[self._place[position] :] -= self._copy_ns[position]


@dataclass(frozen=True)
class IntervalSample:
    """Some access intervals of a device, for a figure: half of them the longest of the largest blocks."""

    rows: Array
    """Positions in ``access_intervals(trace)``."""
    is_swappable: Array
    """Whether each interval, for itself, is long enough to swap its block."""
    is_swapped_at_peak: Array
    """Whether its block can be in host memory at the peak, together with all others (``swapped_at_peak``)."""
    num_intervals: int
    """Number of intervals from which the sample was taken."""
    swappable: SwapTotals
    """Totals of all these intervals."""


def sample_intervals(
    trace: Trace, device: str, costs: CopyBandwidths, max_intervals: int, *, min_bytes: int = MIN_SWAP_BYTES
) -> IntervalSample | None:
    """Return a sample of the access intervals of a device; None where it has none.

    Half of the sample are the intervals with the largest product of size and length, which matter most for swapping;
    the other half is spread evenly over the rest. Those that are swapped at the peak come first.

    Args:
        trace: a single-rank trace.
        device: name of a device of the trace.
        costs: cost of the copies.
        max_intervals: size of the sample, approximately.
        min_bytes: smallest block to swap.
    """
    intervals, size = access_intervals(trace), blocks(trace).size
    rows = device_intervals(trace, device)
    rows = rows[size[intervals.block[rows]] > 0]
    if not len(rows):
        return None
    swappable = np.intersect1d(swappable_intervals(trace, costs, min_bytes=min_bytes), rows)
    at_peak = swappable[swapped_at_peak(trace, swappable, costs)]
    weight = np.log2(size[intervals.block[rows]]) + np.log2(intervals.duration_ns[rows])
    order = rows[np.lexsort((-weight, ~np.isin(rows, at_peak)))]
    head, rest = order[: max_intervals // 2], order[max_intervals // 2 :]
    stride = max(1, -(-2 * len(rest) // max_intervals))
    chosen = np.concatenate([head, rest[::stride]])
    return IntervalSample(
        rows=chosen,
        is_swappable=np.isin(chosen, swappable),
        is_swapped_at_peak=np.isin(chosen, at_peak),
        num_intervals=len(rows),
        swappable=_swap_totals(trace, swappable, costs),
    )


def find_swap_candidates(
    trace: Trace, costs: CopyBandwidths, *, min_bytes: int = MIN_SWAP_BYTES
) -> tuple[SwapCandidate, ...]:
    """Return the swap candidates by allocation site, category and size, most bytes at the peak first.

    Args:
        trace: a single-rank trace.
        costs: cost of the copies.
        min_bytes: smallest block to swap.
    """
    rows = swappable_intervals(trace, costs, min_bytes=min_bytes)
    if not len(rows):
        return ()
    intervals, table = access_intervals(trace), blocks(trace)
    block = intervals.block[rows]
    sites, site = allocation_sites(trace, table.stack[block])
    group = row_codes(site, table.category[block], table.size[block])
    _, example, count = np.unique(group, return_index=True, return_counts=True)
    at_peak = swapped_at_peak(trace, rows, costs)
    bytes_at_peak = np.zeros(len(count), np.int64)
    np.add.at(bytes_at_peak, group[at_peak], table.size[block[at_peak]])
    order = np.lexsort((-table.size[block[example]] * count, -bytes_at_peak))[:MAX_CANDIDATES]
    candidates = []
    for row in order.tolist():
        first = int(block[example[row]])
        size = int(table.size[first])
        durations = intervals.duration_ns[rows[group == row]]
        clocks = np.unique(intervals.clock[rows[group == row]]).tolist()
        candidates.append(
            SwapCandidate(
                site=sites[site[example[row]]],
                category=CATEGORIES[table.category[first]],
                bytes=size,
                num_intervals=int(count[row]),
                median_ns=int(np.percentile(durations, 50, method="inverted_cdf")),
                clock=CLOCKS[clocks[0]] if len(clocks) == 1 else "mixed",
                swap_ns=round(costs.round_trip_latency_ns + size * costs.round_trip_ns_per_byte),
                bytes_at_peak=int(bytes_at_peak[row]),
            )
        )
    return tuple(candidates)
