"""The beat of a sequence: the symbols that come once in every repetition, whatever comes between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.format.arrays import Array

MIN_TICKS = 3
# A symbol follows a beat when it comes exactly once in so many of its cycles; warm-up and odd steps may differ.
FOLLOWS = 0.8
_CANDIDATES = 8
_REFERENCES = 3


@dataclass(frozen=True)
class Clock:
    """``symbols`` come once a cycle; cycle k is [ticks[k], ticks[k + 1]). ``agreement``: their mean share of cycles in
    which they come exactly once. ``weight``: the weight of the symbols together."""

    ticks: Array
    symbols: Array
    agreement: float
    weight: float


def clocks(symbol: Array, place: Array, weight: Array) -> list[Clock]:
    """The beats of a sequence, the heaviest first; n log n. Empty where nothing repeats.

    ``symbol``: small integers from 0; ``place``: where each stands, rising; ``weight``: by symbol, how much each
    tells. Beats are told by counts: symbols of one beat are there equally often, and one after the other.
    """
    if not len(symbol):
        return []
    counts = np.bincount(symbol, minlength=len(weight))
    order = np.argsort(symbol, kind="stable")
    starts = np.concatenate([[0], np.cumsum(counts)])
    often = np.flatnonzero(counts >= MIN_TICKS)
    if not len(often):
        return []
    by_count = np.zeros(int(counts.max()) + 2)
    np.add.at(by_count, counts[often], weight[often])
    # A cut first or last cycle makes neighbours of one count.
    near = by_count + 0.5 * (np.roll(by_count, 1) + np.roll(by_count, -1))
    candidates = [int(count) for count in np.argsort(-near, kind="stable")[:_CANDIDATES] if by_count[count] > 0]
    found = [_best_of(count, counts, weight, symbol, place, order, starts) for count in candidates]
    return sorted((clock for clock in found if clock is not None), key=lambda clock: -clock.weight)


def _best_of(
    count: int, counts: Array, weight: Array, symbol: Array, place: Array, order: Array, starts: Array
) -> Clock | None:
    slack = max(2, count // 10)
    group = np.flatnonzero(np.abs(counts - count) <= slack)
    mine = np.isin(symbol, group) if len(group) < len(counts) else np.ones(len(symbol), bool)
    local = np.searchsorted(group, symbol[mine])
    places = place[mine]
    exact = group[counts[group] == count]
    # What goes on through the whole sequence is the better reference.
    span = place[order[starts[exact + 1] - 1]] - place[order[starts[exact]]]
    references = exact[np.argsort(-weight[exact] * span, kind="stable")[:_REFERENCES]]
    best: Clock | None = None
    for reference in references.tolist():
        ticks = place[order[starts[reference] : starts[reference + 1]]]
        once = _share_once(local, places, ticks, len(group))
        following = once >= FOLLOWS
        clock = Clock(ticks, group[following], float(once[following].mean()), float(weight[group[following]].sum()))
        if best is None or clock.weight > best.weight:
            best = clock
    return best


def _share_once(symbol: Array, place: Array, ticks: Array, num_symbols: int) -> Array:
    """For each symbol the share of the cycles in which it comes exactly once."""
    cycles = len(ticks) - 1
    cycle = np.searchsorted(ticks, place, side="right") - 1
    inside = (cycle >= 0) & (cycle < cycles)
    table = np.bincount(symbol[inside] * cycles + cycle[inside], minlength=num_symbols * cycles)
    share: Array = (table.reshape(num_symbols, cycles) == 1).mean(axis=1)
    return share
