"""Which block each entry of a snapshot's history is about, and which blocks are older than the history.

A block is one lifetime at an address: from an ``alloc`` to the completed free, or, for a block older than the
history, from the beginning to its first free or to the end. What the history leaves live must be what ``segments``
says is in use; where it is not, the file contradicts itself and is said to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrace.readers.cuda_snapshot.entries import Entries
from memtrace.readers.cuda_snapshot.segments import LiveBlocks, Segments
from memtrace.readers.lifetimes import Lifetimes
from memtrace.readers.tables import Array


def places_in(device: Array, address: Array, blocks: LiveBlocks) -> Array:
    """For each (device, address) the row of ``blocks`` that starts there, -1 where none does."""
    place = np.full(len(address), -1, np.int64)
    if not len(blocks):
        return place
    order = np.lexsort((blocks.address, blocks.device))
    for number in np.unique(device).tolist():
        mine = order[blocks.device[order] == number]
        wanted = np.flatnonzero(device == number)
        if not len(mine):
            continue
        at = np.minimum(np.searchsorted(blocks.address[mine], address[wanted]), len(mine) - 1)
        found = blocks.address[mine][at] == address[wanted]
        place[wanted[found]] = mine[at[found]]
    return place


@dataclass(frozen=True)
class Blocks:
    """The blocks of a snapshot, numbered as the trace numbers them: those older than the history come first."""

    num_baseline: int
    of_row: Array
    """For each entry its block, -1 where it is about none."""
    lifetime: Array
    """For each block its lifetime, -1 for one that only ``segments`` tells of."""
    live: Array
    """For each block its row in the live blocks of ``segments``, -1 where it is not there."""


def number_blocks(entries: Entries, lives: Lifetimes, live: LiveBlocks) -> Blocks:
    """Join history and final state: survivors of the history find themselves in ``segments``; what is there and was
    never allocated in the history is older than it."""
    first = lives.first_row
    match = np.full(len(lives), -1, np.int64)
    open_ended = np.flatnonzero(~lives.ended)
    # Of several lifetimes left open at one address only the last can be the one in `segments`.
    open_ended = open_ended[np.argsort(first[open_ended], kind="stable")]
    rows = first[open_ended]
    found = places_in(entries.device[rows], entries.address[rows], live)
    last: dict[int, int] = dict(zip(found.tolist(), open_ended.tolist(), strict=True))
    last.pop(-1, None)
    match[np.fromiter(last.values(), np.int64, len(last))] = np.fromiter(last.keys(), np.int64, len(last))
    untold = np.setdiff1d(np.arange(len(live)), match)
    older = np.flatnonzero(~lives.allocated)
    young = np.flatnonzero(lives.allocated)
    young = young[np.argsort(first[young])]
    lifetime = np.concatenate([older, np.full(len(untold), -1, np.int64), young])
    number = np.full(len(lives) + 1, -1, np.int64)
    number[lifetime[lifetime >= 0]] = np.flatnonzero(lifetime >= 0)
    in_live = np.concatenate([match[older], untold, match[young]])
    return Blocks(len(older) + len(untold), number[lives.of_row], lifetime, in_live)


@dataclass(frozen=True)
class Snapshot:
    """A snapshot's history, its final state, and how the two join."""

    entries: Entries
    segments: Segments
    live: LiveBlocks
    lives: Lifetimes
    blocks: Blocks
    settings: Mapping[str, Any]
