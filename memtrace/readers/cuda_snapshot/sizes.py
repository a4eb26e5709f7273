"""Finds the allocator's size of each block of a snapshot: from the file, or from the rules of the allocator.

In the small pool and in expandable segments, a block has exactly the rounded size of its request. Elsewhere it can be
larger, and only a replay of the allocator can find by how much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from memtrace.allocator.rules import SMALL_REQUEST_BYTES, round_sizes
from memtrace.format.arrays import distinct
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
    divisions = read_divisions(snapshot.settings, snapshot.live)
    if divisions is not None:
        sizes = round_sizes(requested, divisions)
        known = (sizes <= SMALL_REQUEST_BYTES) | _in_expandable_segment(snapshot, device, address)
    in_file = snapshot.blocks.live >= 0
    sizes[in_file] = snapshot.live.size[snapshot.blocks.live[in_file]]
    return Known(sizes, known | in_file)


def read_divisions(settings: Mapping[str, Any], live: LiveBlocks) -> tuple[int, ...] | None:
    """Return `AllocatorSettings.roundup_power2_divisions`, () for the default rule of rounding; None: unknown.

    They are in the settings. Snapshots of torch before 2.3 contain no settings: there the sizes of the live blocks of
    the small pool can show that the default rule was in force.
    """
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping):
        counts = tuple(divisions.values())
        if not all(isinstance(count, int) and count >= 0 and count & (count - 1) == 0 for count in counts):
            return None  # torch accepts powers of two only
        return counts if any(count > 1 for count in counts) else ()
    small = live.size <= SMALL_REQUEST_BYTES
    is_default = bool(small.any()) and bool((round_sizes(live.requested[small]) == live.size[small]).all())
    return () if is_default else None


def _in_expandable_segment(snapshot: Snapshot, device: Array, address: Array) -> Array:
    """Return whether each block is in a segment that is expandable when the snapshot is taken."""
    segments = snapshot.segments
    inside = np.zeros(len(address), bool)
    for number in distinct(segments.device[segments.expandable == 1]).tolist():
        rows = np.flatnonzero((segments.expandable == 1) & (segments.device == number))
        rows = rows[np.argsort(segments.address[rows])]
        start, size = segments.address[rows], segments.size[rows]
        index = np.searchsorted(start, address, side="right") - 1
        inside |= (device == number) & (index >= 0) & (address < (start + size)[np.maximum(index, 0)])
    return inside
