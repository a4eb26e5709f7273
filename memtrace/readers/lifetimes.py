"""Finds the block of each event in a history.

An allocator uses an address for many blocks, one after another. A block is one lifetime at an address.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrace.format.arrays import stable_sort
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
    rows = np.flatnonzero(is_one_of(kind, (ALLOC, FREE_REQUESTED, FREE)))
    order, new_address = _by_address(rows, device, address)
    sorted_kind, sorted_size = kind[order], size[order]
    starts = new_address | (sorted_kind == ALLOC)
    after_free = np.zeros(len(order), bool)
    after_free[1:] = (sorted_kind[:-1] == FREE) & ~new_address[1:]
    starts |= after_free
    number = np.cumsum(starts)
    number -= 1
    first = np.flatnonzero(starts)
    of_row = np.full(len(kind), -1, np.int64)
    of_row[order] = number
    # A lifetime ends with its first free, which is therefore its last event.
    last = np.append(first, len(order))[1:] - 1
    differs = np.zeros(len(first), bool)
    differs[number[np.flatnonzero((sorted_size[1:] != sorted_size[:-1]) & ~starts[1:])]] = True
    allocated = sorted_kind[first] == ALLOC
    freed_before = after_free[first]
    at_free_address = new_address[first] | freed_before
    return Lifetimes(
        of_row,
        order[first],
        allocated,
        sorted_kind[last] == FREE,
        differs,
        allocated & ~at_free_address,
        ~allocated & freed_before,
    )


def is_one_of(codes: Array, wanted: Sequence[np.integer[Any]]) -> Array:
    """Return where a column of codes has one of a few values; much faster than ``np.isin`` on small integers."""
    result: Array = codes == wanted[0]
    for code in wanted[1:]:
        result |= codes == code
    return result


def _by_address(rows: Array, device: Array, address: Array) -> tuple[Array, Array]:
    """Return the rows in the order of device and address, and where another address begins."""
    is_new = np.ones(len(rows), bool)
    if len(rows) and device[rows].min() != device[rows].max():
        order = rows[np.lexsort((address[rows], device[rows]))]
        sorted_address, sorted_device = address[order], device[order]
        is_new[1:] = (sorted_address[1:] != sorted_address[:-1]) | (sorted_device[1:] != sorted_device[:-1])
        return order, is_new
    order, sorted_address = stable_sort(address[rows])
    is_new[1:] = sorted_address[1:] != sorted_address[:-1]
    return rows[order], is_new


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
