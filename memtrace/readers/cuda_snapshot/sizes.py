"""Finds the allocator's size of each block of a snapshot: from the file, or from the rules of the allocator.

In the small pool and in expandable segments, a block has exactly the rounded size of its request. Elsewhere it can be
larger, and only a replay of the allocator can find by how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memtrace.allocator.rules import SMALL_REQUEST_BYTES, round_sizes
from memtrace.format.encode import Known
from memtrace.readers.cuda_snapshot.blocks import Snapshot
from memtrace.readers.cuda_snapshot.segments import LiveBlocks
from memtrace.readers.tables import Array


def allocated_sizes(snapshot: Snapshot, requested: Array, device: Array, address: Array) -> Known:
    """Return the allocator's size of each block in bytes, where it is known.

    Args:
        snapshot: the snapshot.
        requested: requested bytes of each block.
        device: device number of each block.
        address: address of each block.
    """
    sizes = np.zeros(len(requested), np.int64)
    known = np.zeros(len(requested), bool)
    if rounds_by_default(snapshot.settings, snapshot.live):
        sizes = round_sizes(requested)
        known = (sizes <= SMALL_REQUEST_BYTES) | _in_expandable_segment(snapshot, device, address)
    in_file = snapshot.blocks.live >= 0
    sizes[in_file] = snapshot.live.size[snapshot.blocks.live[in_file]]
    return Known(sizes, known | in_file)


def rounds_by_default(settings: Mapping[str, Any], live: LiveBlocks) -> bool:
    """Return whether the allocator rounds requests by its default rule.

    It follows from the settings. Snapshots of torch before 2.3 contain no settings: there it follows from the sizes of
    the live blocks of the small pool.
    """
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping):
        return all(_is_off(value) for value in divisions.values())
    small = live.size <= SMALL_REQUEST_BYTES
    return bool(small.any()) and bool((round_sizes(live.requested[small]) == live.size[small]).all())


def _is_off(divisions: Any) -> bool:
    return divisions in (0, 1)


def _in_expandable_segment(snapshot: Snapshot, device: Array, address: Array) -> Array:
    """Return whether each block is in a segment that is expandable when the snapshot is taken."""
    segments = snapshot.segments
    inside = np.zeros(len(address), bool)
    for number in np.unique(segments.device[segments.expandable == 1]).tolist():
        rows = np.flatnonzero((segments.expandable == 1) & (segments.device == number))
        rows = rows[np.argsort(segments.address[rows])]
        start, size = segments.address[rows], segments.size[rows]
        index = np.searchsorted(start, address, side="right") - 1
        inside |= (device == number) & (index >= 0) & (address < (start + size)[np.maximum(index, 0)])
    return inside
