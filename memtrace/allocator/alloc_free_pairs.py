"""Pairs of allocations and frees, matched by address.

An address is allocated, freed and allocated again. Where its first entry is a free, the memory was allocated before the
history; where its last entry is an allocation, the memory is held at the end. The matching is one sort by address.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.allocator.history import Bools, Int64s


@dataclass(frozen=True, slots=True)
class AllocFreePairs:
    """Which entries of a sequence of allocations and frees belong together. Arrays hold row numbers of the sequence."""

    partner: Int64s
    """For a free the row of its allocation, for an allocation the row of its free; -1: none."""
    held_before: Int64s
    """Frees of memory that was allocated before the history."""
    held_after: Int64s
    """Allocations that are never freed."""
    num_conflicts: int
    """Allocations of an address in use, and frees of a free address: no allocator does either."""


def pair_by_address(address: Int64s, is_alloc: Bools) -> AllocFreePairs:
    """Pair the entries of each address in the order in which they occurred.

    Args:
        address: address of each entry, oldest first.
        is_alloc: whether the entry is an allocation; otherwise it is a free.
    """
    order = np.argsort(address, kind="stable")
    sorted_address, sorted_alloc = address[order], is_alloc[order]
    same_as_next = np.append(sorted_address[1:] == sorted_address[:-1], False)
    next_alloc = np.append(sorted_alloc[1:], False)
    is_first = np.append(True, ~same_as_next[:-1]) if len(order) else np.zeros(0, np.bool_)
    matched = np.flatnonzero(same_as_next & sorted_alloc & ~next_alloc)
    partner = np.full(len(order), -1, np.int64)
    partner[order[matched]] = order[matched + 1]
    partner[order[matched + 1]] = order[matched]
    conflicts = same_as_next & (sorted_alloc == next_alloc)
    return AllocFreePairs(
        partner=partner,
        held_before=np.sort(order[is_first & ~sorted_alloc]),
        held_after=np.sort(order[~same_as_next & sorted_alloc]),
        num_conflicts=int(conflicts.sum()),
    )
