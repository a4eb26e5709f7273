"""Finds the block of each entry in the history of a snapshot, and the blocks that are older than the history.

A block is one lifetime at an address: from the allocation to the completed free. The lifetime of a block that is older
than the history begins with the history. The blocks that are live at the end of the history must be those in use in
``segments``; ``memtrace.readers.cuda_snapshot.notes`` reports where they are not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from memtrace.format.arrays import distinct
from memtrace.readers.cuda_snapshot.entries import SnapshotEntries
from memtrace.readers.cuda_snapshot.segments import LiveBlocks, SnapshotSegments
from memtrace.readers.lifetimes import Lifetimes
from memtrace.readers.tables import Array


@dataclass(frozen=True)
class SnapshotBlocks:
    """The blocks of a snapshot in the numbering of the trace, in which blocks older than the history come first."""

    num_baseline: int
    """Number of blocks that are older than the history."""
    of_row: Array
    """For each entry its block, -1 for entries of segments and of failures."""
    lifetime: Array
    """For each block its index in ``Lifetimes``, -1 for a block that only ``segments`` contains."""
    live: Array
    """For each block its row in ``LiveBlocks``, -1 for a block that is not live at the end."""


def match_blocks(entries: SnapshotEntries, lives: Lifetimes, live: LiveBlocks) -> SnapshotBlocks:
    """Match the lifetimes in the history with the blocks in the final state and number all blocks.

    A block of the final state that the history does not mention is older than the history.
    """
    first = lives.first_row
    match = np.full(len(lives), -1, np.int64)
    open_ended = np.flatnonzero(~lives.ended)
    # Of several open lifetimes at one address, only the last can be the block in `segments`.
    open_ended = open_ended[np.argsort(first[open_ended], kind="stable")]
    rows = first[open_ended]
    live_rows = _live_block_rows(entries.device[rows], entries.address[rows], live)
    last: dict[int, int] = dict(zip(live_rows.tolist(), open_ended.tolist(), strict=True))
    last.pop(-1, None)
    match[np.fromiter(last.values(), np.int64, len(last))] = np.fromiter(last.keys(), np.int64, len(last))
    is_matched = np.zeros(len(live), bool)
    is_matched[match[match >= 0]] = True
    only_live = np.flatnonzero(~is_matched)
    older = np.flatnonzero(~lives.allocated)
    allocated = _in_order_of_rows(np.flatnonzero(lives.allocated), first, len(entries))
    lifetime = np.concatenate([older, np.full(len(only_live), -1, np.int64), allocated])
    number = np.full(len(lives) + 1, -1, np.int64)
    number[lifetime[lifetime >= 0]] = np.flatnonzero(lifetime >= 0)
    in_live = np.concatenate([match[older], only_live, match[allocated]])
    return SnapshotBlocks(len(older) + len(only_live), number[lives.of_row], lifetime, in_live)


def _in_order_of_rows(lives: Array, first_row: Array, num_rows: int) -> Array:
    """Return lifetimes in the order of their first rows, which no two of them share."""
    life_at = np.full(num_rows, -1, np.int64)
    life_at[first_row[lives]] = lives
    ordered: Array = life_at[life_at >= 0]
    return ordered


def _live_block_rows(device: Array, address: Array, blocks: LiveBlocks) -> Array:
    """Return for each device and address the row of the live block that begins there, -1 for none."""
    row = np.full(len(address), -1, np.int64)
    if not len(blocks):
        return row
    order = np.lexsort((blocks.address, blocks.device))
    for number in distinct(device).tolist():
        on_device = order[blocks.device[order] == number]
        queries = np.flatnonzero(device == number)
        if not len(on_device):
            continue
        index = np.minimum(np.searchsorted(blocks.address[on_device], address[queries]), len(on_device) - 1)
        begins_there = blocks.address[on_device][index] == address[queries]
        row[queries[begins_there]] = on_device[index[begins_there]]
    return row


@dataclass(frozen=True)
class Snapshot:
    """The history and the final state of a snapshot, and how they match."""

    entries: SnapshotEntries
    segments: SnapshotSegments
    live: LiveBlocks
    """The live blocks of the final state."""
    lives: Lifetimes
    """The lifetimes in the history."""
    blocks: SnapshotBlocks
    settings: Mapping[str, Any]
    """The settings of the allocator as the file contains them."""
