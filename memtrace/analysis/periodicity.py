"""Periodicity of a symbol sequence: the symbols that occur once in every cycle, whatever occurs between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.thresholds import (
    COUNT_TOLERANCE_DIVISOR,
    MAX_CANDIDATE_COUNTS,
    MAX_REFERENCE_SYMBOLS,
    MIN_COUNT_TOLERANCE,
    MIN_CYCLE_STARTS,
    MIN_SHARE_ONCE,
)
from memtrace.format.arrays import Array


@dataclass(frozen=True)
class Periodicity:
    """A repetition in a sequence: cycle k covers the positions [starts[k], starts[k + 1])."""

    starts: Array
    """Positions of the reference symbol, which starts each cycle."""
    symbols: Array
    """Symbols that occur once in (nearly) every cycle."""
    agreement: float
    """Mean over ``symbols`` of the share of cycles in which the symbol occurs exactly once, from 0 to 1."""
    weight: float
    """Sum of the weights of ``symbols``."""


@dataclass(frozen=True)
class _Sequence:
    """A symbol sequence with an index by symbol: the occurrences of s are ``order[first[s] : first[s + 1]]``."""

    symbol: Array
    position: Array
    weight: Array
    count: Array
    order: Array
    first: Array

    def positions_of(self, symbol: int) -> Array:
        """Positions at which a symbol occurs, ascending."""
        positions: Array = self.position[self.order[self.first[symbol] : self.first[symbol + 1]]]
        return positions


def find_periodicities(symbol: Array, position: Array, weight: Array) -> list[Periodicity]:
    """Return the repetitions of a sequence, heaviest first; empty where nothing repeats. Takes O(n log n) time.

    Symbols of one cycle occur equally often and one after the other. Each of the most common numbers of occurrences
    is therefore tried as the number of cycles.

    Args:
        symbol: the sequence, as integers from 0.
        position: ascending position of each element.
        weight: how much each symbol counts, indexed by symbol.
    """
    if not len(symbol):
        return []
    count = np.bincount(symbol, minlength=len(weight))
    frequent = np.flatnonzero(count >= MIN_CYCLE_STARTS)
    if not len(frequent):
        return []
    weight_by_count = np.zeros(int(count.max()) + 2)
    np.add.at(weight_by_count, count[frequent], weight[frequent])
    # Where the first or last cycle is cut, symbols of one cycle differ by one occurrence.
    smoothed = weight_by_count + 0.5 * (np.roll(weight_by_count, 1) + np.roll(weight_by_count, -1))
    candidates = np.argsort(-smoothed, kind="stable")[:MAX_CANDIDATE_COUNTS].tolist()
    first = np.concatenate([[0], np.cumsum(count)])
    sequence = _Sequence(symbol, position, weight, count, np.argsort(symbol, kind="stable"), first)
    periodicities = [_best_periodicity(sequence, number) for number in candidates if weight_by_count[number] > 0]
    return sorted((item for item in periodicities if item is not None), key=lambda item: -item.weight)


def _best_periodicity(sequence: _Sequence, num_cycles: int) -> Periodicity | None:
    """Return the heaviest repetition with about ``num_cycles`` cycles."""
    count, weight = sequence.count, sequence.weight
    tolerance = max(MIN_COUNT_TOLERANCE, num_cycles // COUNT_TOLERANCE_DIVISOR)
    group = np.flatnonzero(np.abs(count - num_cycles) <= tolerance)
    in_group = np.isin(sequence.symbol, group) if len(group) < len(count) else np.ones(len(sequence.symbol), bool)
    symbol, position = np.searchsorted(group, sequence.symbol[in_group]), sequence.position[in_group]
    exact = group[count[group] == num_cycles]
    # A symbol that occurs throughout the sequence is the better reference.
    last = sequence.position[sequence.order[sequence.first[exact + 1] - 1]]
    span = last - sequence.position[sequence.order[sequence.first[exact]]]
    references = exact[np.argsort(-weight[exact] * span, kind="stable")[:MAX_REFERENCE_SYMBOLS]]
    best: Periodicity | None = None
    for reference in references.tolist():
        starts = sequence.positions_of(reference)
        once = _share_once(symbol, position, starts, len(group))
        regular = once >= MIN_SHARE_ONCE
        periodicity = Periodicity(
            starts, group[regular], float(once[regular].mean()), float(weight[group[regular]].sum())
        )
        if best is None or periodicity.weight > best.weight:
            best = periodicity
    return best


def _share_once(symbol: Array, position: Array, starts: Array, num_symbols: int) -> Array:
    """Return for each symbol the share of the cycles in which it occurs exactly once."""
    num_cycles = len(starts) - 1
    cycle = np.searchsorted(starts, position, side="right") - 1
    inside = (cycle >= 0) & (cycle < num_cycles)
    occurrences = np.bincount(symbol[inside] * num_cycles + cycle[inside], minlength=num_symbols * num_cycles)
    share: Array = (occurrences.reshape(num_symbols, num_cycles) == 1).mean(axis=1)
    return share
