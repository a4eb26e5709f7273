"""Which entry ends what another began: blocks and segments followed by their addresses.

An address is taken, given back, taken again; an address whose first entry gives it back was taken before the
history, one whose last entry takes it is still held. Everything is a sort by address, so millions of entries
take no loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.allocator.history import Bools, Int64s


@dataclass(frozen=True, slots=True)
class Pairing:
    """What becomes of each entry of a sequence of takings and givings-back."""

    partner: Int64s
    """For a giving-back the entry that took; for a taking the one that gave back; -1: none."""
    held_before: Int64s
    """Entries that give back what was taken before the history."""
    held_after: Int64s
    """Entries whose taking is never given back."""
    num_conflicts: int
    """Addresses taken twice with no giving-back between, or given back twice: no allocator does that."""


def pair(address: Int64s, takes: Bools) -> Pairing:
    """Pair the entries of each address in the order they came; `takes` tells takings from givings-back."""
    order = np.argsort(address, kind="stable")
    where, taking = address[order], takes[order]
    same = np.append(where[1:] == where[:-1], False)  # the next one is of the same address
    next_takes = np.append(taking[1:], False)
    first = np.append(True, ~same[:-1]) if len(order) else np.zeros(0, np.bool_)
    matched = same & taking & ~next_takes
    partner = np.full(len(order), -1, np.int64)
    begin = np.flatnonzero(matched)
    partner[order[begin]] = order[begin + 1]
    partner[order[begin + 1]] = order[begin]
    conflicts = same & (taking == next_takes)
    return Pairing(
        partner=partner,
        held_before=np.sort(order[first & ~taking]),
        held_after=np.sort(order[~same & taking]),
        num_conflicts=int(conflicts.sum()),
    )
