"""Which block each event of a history is about: an address is used again and again, each time by another block."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.format.schema import EVENT_KINDS
from memtrace.readers.tables import Array

ALLOC = np.int8(EVENT_KINDS.index("alloc"))
FREE = np.int8(EVENT_KINDS.index("free"))
FREE_REQUESTED = np.int8(EVENT_KINDS.index("free_requested"))


@dataclass(frozen=True)
class Lifetimes:
    """The blocks that a history speaks of, in no order that matters."""

    of_row: Array
    """For each event its lifetime, -1 for events that are about no block."""
    first_row: Array
    allocated: Array
    """True: the history holds its ``alloc``. False: it is older."""
    ended: Array
    """True: the history holds its ``free``."""
    size_changed: Array
    """True: its events disagree about its size."""
    over_live: Array
    """True: its ``alloc`` falls on the address of a block that was not freed."""
    again: Array
    """True: it has no ``alloc``, yet its address was freed before in the history."""

    def __len__(self) -> int:
        return len(self.first_row)


def lifetimes(kind: Array, device: Array, address: Array, size: Array) -> Lifetimes:
    """The lifetimes in a history: from an ``alloc`` to the ``free`` at its address; for a block older than the history
    from its first free. Arguments are columns of the events in their order; other kinds than these are passed over."""
    about = np.flatnonzero(np.isin(kind, [ALLOC, FREE_REQUESTED, FREE]))
    if len(about) and device[about].min() != device[about].max():
        order = about[np.lexsort((address[about], device[about]))]
    else:
        order = about[np.argsort(address[about], kind="stable")]
    rows = len(kind)
    kind, device, address, size = (column[order] for column in (kind, device, address, size))
    new_place = np.ones(len(order), bool)
    new_place[1:] = (address[1:] != address[:-1]) | (device[1:] != device[:-1])
    after_free = np.zeros(len(order), bool)
    after_free[1:] = (kind[:-1] == FREE) & ~new_place[1:]
    starts = new_place | after_free | (kind == ALLOC)
    number = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    of_row = np.full(rows, -1, np.int64)
    of_row[order] = number
    ended = np.zeros(len(first), bool)
    ended[number[kind == FREE]] = True
    differs = np.zeros(len(first), bool)
    differs[number[size != size[first][number]]] = True
    allocated = kind[first] == ALLOC
    fresh = new_place[first] | after_free[first]
    return Lifetimes(
        of_row, order[first], allocated, ended, differs, allocated & ~fresh, ~allocated & after_free[first]
    )


def slots(group: Array, kind: Array) -> Array:
    """Stand-ins for addresses where a file has none: a free ends the youngest block of its ``group``.

    ``kind`` is ``alloc`` or ``free``. Each group (blocks of one size, say) is a stack of slots; the same slot is used
    again by the next block at that height, so ``lifetimes`` takes slots for addresses.
    """
    _, group = np.unique(group, return_inverse=True)
    order = np.argsort(group, kind="stable")
    step = np.where(kind[order] == ALLOC, 1, -1)
    height = np.cumsum(step)
    in_order = group[order]
    first = np.ones(len(order), bool)
    first[1:] = in_order[1:] != in_order[:-1]
    before = (height - step)[first][in_order] if len(order) else height
    # An alloc takes the slot above, a free leaves the one it stands on; below 1 are blocks older than the file.
    level = height - before + (step < 0)
    lowest = level.min(initial=0)
    slot = np.empty(len(order), np.int64)
    slot[order] = in_order * (level.max(initial=0) - lowest + 1) + level - lowest
    return slot
