"""Step detection from allocations, for traces without reads and writes.

Allocations repeat by site, size and rough lifetime. The shortest cycle whose blocks do not regularly outlive the next
one is a step. It ends where the least memory is live, or, where backward passes are known, before the first allocation
of the next step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from memtrace.analysis.detection.backward import BackwardPasses
from memtrace.analysis.detection.lifetimes import RowLifetimes, live_byte_changes
from memtrace.analysis.detection.similarity import StepSimilarity, allocation_sites
from memtrace.analysis.detection.steps import NO_STEPS, DetectedSteps, rate_memory_minima
from memtrace.analysis.periodicity import Periodicity, find_periodicities
from memtrace.analysis.thresholds import (
    MAX_DRIFT,
    MAX_OFFSET_SHARE,
    MAX_RATED_CYCLES,
    MAX_SLOWER_CYCLE_SHARE,
    MIN_CYCLE_STARTS,
    MIN_LIKELY_CONFIDENCE,
    MIN_LIKELY_WEIGHT,
)
from memtrace.format.arrays import Array
from memtrace.trace import Trace

_LIFETIME_CODES: Final = 64
_NEVER_FREED: Final = _LIFETIME_CODES - 2
"""Lifetime code of blocks that are never freed; all others have log2 of their lifetime in allocations, halved."""


@dataclass(frozen=True)
class _Candidate:
    """A periodicity with the steps it implies."""

    periodicity: Periodicity
    steps: DetectedSteps
    confidence_factor: float


def detect_from_allocations(trace: Trace, lifetimes: RowLifetimes, similarity: StepSimilarity) -> DetectedSteps:
    """Return the steps by the cycle of allocations; ``NO_STEPS`` where allocations do not repeat."""
    blocks = np.flatnonzero(lifetimes.is_allocated)
    if len(blocks) < 2 * MIN_CYCLE_STARTS:
        return NO_STEPS
    blocks = blocks[np.argsort(lifetimes.begin[blocks], kind="stable")]
    rows, end = lifetimes.begin[blocks], lifetimes.end[blocks]
    is_kept = end >= similarity.num_events
    num_alive = np.searchsorted(rows, end) - np.arange(len(blocks))
    site = np.unique(allocation_sites(trace, rows), return_inverse=True)[1]
    symbol = _symbols(site, lifetimes.size[blocks], num_alive, is_kept)
    live = live_byte_changes(trace, lifetimes)
    passes = BackwardPasses(trace, rows, site)
    candidates = []
    for periodicity in _usable_periodicities(symbol):
        ends = _memory_minima(live, rows[periodicity.starts])
        factor = passes.confidence_factor(ends, np.isin(symbol, periodicity.symbols))
        agreement = 0.0 if factor == 0 or _accumulates(live, ends) else periodicity.agreement
        steps = rate_memory_minima(similarity, passes.move_behind_optimizer(ends), agreement)
        candidates.append(_Candidate(periodicity, steps, factor))
    if not candidates:
        return NO_STEPS
    best = _shortest_complete(candidates, symbol, np.where(is_kept, 0, num_alive))
    return replace(best.steps, confidence=round(best.confidence_factor * best.steps.confidence, 4))


def _symbols(site: Array, size: Array, num_alive: Array, is_kept: Array) -> Array:
    """Return a number for each allocation: the same for the same site, size and rough lifetime."""
    lifetime = np.log2(np.maximum(num_alive, 1)).astype(np.int64) // 2
    lifetime = np.where(is_kept, _NEVER_FREED, lifetime)
    size_code = np.unique(size, return_inverse=True)[1]
    key = (site * (int(size_code.max()) + 1) + size_code) * _LIFETIME_CODES + lifetime
    symbol: Array = np.unique(key, return_inverse=True)[1]
    return symbol


def _usable_periodicities(symbol: Array) -> list[Periodicity]:
    weight = np.ones(int(symbol.max()) + 1)
    periodicities = find_periodicities(symbol, np.arange(len(symbol)), weight)
    usable = [item for item in periodicities if len(item.starts) >= MIN_CYCLE_STARTS and len(item.symbols) > 1]
    return usable[:MAX_RATED_CYCLES]


def _memory_minima(live: Array, starts: Array) -> Array:
    """Return the row after the memory minimum of each cycle (the last of equal ones): steps end there.

    In the first cycle nothing is retained yet, so that its minimum may be elsewhere. A cycle whose minimum is far from
    the usual offset ends at the usual offset.

    Args:
        live: live bytes after each row of events.
        starts: row at which each cycle starts.
    """
    inside, length = live[starts[0] : starts[-1]], np.diff(starts)
    minimum = np.minimum.reduceat(inside, starts[:-1] - starts[0])
    cycle = np.repeat(np.arange(len(minimum)), length)
    at_minimum = np.flatnonzero(inside == minimum[cycle])
    last = np.zeros(len(minimum), np.int64)
    last[cycle[at_minimum]] = at_minimum
    offset = last + starts[0] - starts[:-1]
    usual = int(np.median(offset[len(offset) // 2 :]))
    is_elsewhere = np.abs(offset - usual) > MAX_OFFSET_SHARE * length
    offset[is_elsewhere] = np.minimum(usual, length[is_elsewhere] - 1)
    ends = starts[:-1] + offset + 1
    return np.append(ends, starts[-1] + usual + 1) if starts[-1] + usual < len(live) else ends


def _accumulates(live: Array, ends: Array) -> bool:
    """Return whether live memory changes from cycle to cycle by most of what a cycle allocates.

    The layers of one forward pass accumulate activations, and those of one backward pass free them; steps do neither.
    """
    if len(ends) < 2:
        return False
    start = live[ends[:-1] - 1]
    peak = np.maximum.reduceat(live, ends[:-1])
    drift = abs(float(np.median(np.diff(start)))) if len(start) > 1 else 0.0
    return drift > MAX_DRIFT * float(np.median(peak - start))


def _shortest_complete(candidates: list[_Candidate], symbol: Array, num_alive: Array) -> _Candidate:
    """Return the shortest likely cycle, or a longer one if blocks of the longer one live through several short cycles.

    Gradients that live through the micro-batches of a step show that micro-batches are not steps.
    """
    best = max(item.steps.confidence for item in candidates)
    heaviest = candidates[0].periodicity.weight
    likely = [
        item
        for item in candidates
        if item.steps.confidence >= MIN_LIKELY_CONFIDENCE * best
        and item.periodicity.weight >= MIN_LIKELY_WEIGHT * heaviest
    ]
    likely = sorted(likely, key=lambda item: -len(item.periodicity.starts)) or candidates
    position = np.arange(len(symbol))
    chosen = likely[0]
    while True:
        starts = chosen.periodicity.starts
        num_crossed = np.searchsorted(starts, position + num_alive) - np.searchsorted(starts, position)
        outliving = np.unique(symbol[num_crossed >= 2])
        max_cycles = MAX_SLOWER_CYCLE_SHARE * len(starts)
        longer = (item for item in likely if len(item.periodicity.starts) <= max_cycles)
        complete = (item for item in longer if len(np.intersect1d(item.periodicity.symbols, outliving)) > 1)
        replacement = next(complete, None)
        if replacement is None:
            return chosen
        chosen = replacement
