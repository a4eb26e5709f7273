"""Finds the block of each event in a history.

An allocator uses an address for many blocks, one after another. A block is one lifetime at an address.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.format.schema import EVENT_KINDS
from memtrace.readers.tables import Array
from memtrace.readers.wording import format_clause

ALLOC = np.int8(EVENT_KINDS.index("alloc"))
FREE = np.int8(EVENT_KINDS.index("free"))
FREE_REQUESTED = np.int8(EVENT_KINDS.index("free_requested"))


@dataclass(frozen=True)
class Lifetimes:
    """The lifetimes in a history, one per element of each array but ``of_row``, in unspecified order."""

    of_row: Array
    """For each event the index of its lifetime; -1 for events of segments and of failures."""
    first_row: Array
    """Row of the first event."""
    allocated: Array
    """Whether the history contains the allocation. If not, the block is older than the history."""
    ended: Array
    """Whether the history contains the free."""
    size_changed: Array
    """Whether the events of the lifetime have different sizes."""
    over_live: Array
    """Whether the block was allocated at the address of a block that was not freed."""
    freed_twice: Array
    """Whether the lifetime has no allocation although the block at its address was freed in the history."""

    def __len__(self) -> int:
        return len(self.first_row)


def describe_contradictions(lives: Lifetimes) -> list[str]:
    """Return what an allocator cannot have done, such as ``2 blocks were freed twice``."""
    clauses = (
        (lives.over_live, "was allocated at an address in use", "were allocated at addresses in use"),
        (lives.freed_twice, "was freed twice", "were freed twice"),
        (lives.size_changed, "was freed with a different size", "were freed with different sizes"),
    )
    counts = [(int(flags.sum()), singular, plural) for flags, singular, plural in clauses]
    return [format_clause(count, "block", singular, plural) for count, singular, plural in counts if count]


def find_lifetimes(kind: Array, device: Array, address: Array, size: Array) -> Lifetimes:
    """Find the lifetimes in a history: from an ``alloc`` to the ``free`` at the same address.

    The lifetime of a block older than the history begins with its first free. The arguments are columns of the events
    in their order; events of segments and of failures are ignored.
    """
    block_rows = np.flatnonzero(np.isin(kind, [ALLOC, FREE_REQUESTED, FREE]))
    if len(block_rows) and device[block_rows].min() != device[block_rows].max():
        order = block_rows[np.lexsort((address[block_rows], device[block_rows]))]
    else:
        order = block_rows[np.argsort(address[block_rows], kind="stable")]
    num_rows = len(kind)
    kind, device, address, size = (column[order] for column in (kind, device, address, size))
    new_address = np.ones(len(order), bool)
    new_address[1:] = (address[1:] != address[:-1]) | (device[1:] != device[:-1])
    after_free = np.zeros(len(order), bool)
    after_free[1:] = (kind[:-1] == FREE) & ~new_address[1:]
    starts = new_address | after_free | (kind == ALLOC)
    number = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    of_row = np.full(num_rows, -1, np.int64)
    of_row[order] = number
    ended = np.zeros(len(first), bool)
    ended[number[kind == FREE]] = True
    differs = np.zeros(len(first), bool)
    differs[number[size != size[first][number]]] = True
    allocated = kind[first] == ALLOC
    at_free_address = new_address[first] | after_free[first]
    return Lifetimes(
        of_row, order[first], allocated, ended, differs, allocated & ~at_free_address, ~allocated & after_free[first]
    )


def assign_slots(group: Array, kind: Array) -> Array:
    """Return substitutes for addresses, for files without addresses: a free ends the youngest block of its group.

    Each group is a stack of slots. The next block at the same height of the stack uses the same slot again, so that
    ``find_lifetimes`` can treat slots as addresses.

    Args:
        group: a number for each event; events of the same group belong to blocks that are alike (of the same size).
        kind: ``ALLOC`` or ``FREE`` for each event.
    """
    _, group = np.unique(group, return_inverse=True)
    order = np.argsort(group, kind="stable")
    step = np.where(kind[order] == ALLOC, 1, -1)
    height = np.cumsum(step)
    in_order = group[order]
    is_first = np.ones(len(order), bool)
    is_first[1:] = in_order[1:] != in_order[:-1]
    before = (height - step)[is_first][in_order] if len(order) else height
    # An alloc takes the next slot up, a free leaves the top slot; slots below 1 belong to blocks older than the file.
    level = height - before + (step < 0)
    lowest = level.min(initial=0)
    slot = np.empty(len(order), np.int64)
    slot[order] = in_order * (level.max(initial=0) - lowest + 1) + level - lowest
    return slot
