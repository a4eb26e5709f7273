"""The allocator's own size of each block of a snapshot, where the file tells it or the rules leave no doubt.

A request is rounded up to 512 bytes. Up to 1 MiB (the small pool) and in expandable segments the block is exactly
that; elsewhere it may be longer by up to 1 MiB, which only an exact replay of the allocator can tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from memtrace.format.encode import Known
from memtrace.readers.cuda_snapshot.blocks import Snapshot
from memtrace.readers.cuda_snapshot.segments import LiveBlocks
from memtrace.readers.tables import Array

ROUNDING_BYTES: Final = 512
SMALL_BYTES: Final = 1 << 20


def rounded(requested: Array) -> Array:
    """What the allocator makes of a request under its default rounding."""
    sizes: Array = np.maximum(-(-requested // ROUNDING_BYTES), 1) * ROUNDING_BYTES
    return sizes


def allocated_sizes(found: Snapshot, requested: Array, device: Array, address: Array) -> Known:
    """The size of each block in the allocator's count; arguments are columns of the blocks."""
    sizes = np.zeros(len(requested), np.int64)
    known = np.zeros(len(requested), bool)
    if rounds_by_default(found.settings, found.live):
        sizes = rounded(requested)
        known = (sizes <= SMALL_BYTES) | _in_expandable(found, device, address)
    in_file = found.blocks.live >= 0
    sizes[in_file] = found.live.size[found.blocks.live[in_file]]
    return Known(sizes, known | in_file)


def rounds_by_default(settings: Mapping[str, Any], live: LiveBlocks) -> bool:
    """Whether requests are rounded to 512 bytes: by the settings; before torch 2.3, which has none, by small blocks."""
    divisions = settings.get("roundup_power2_divisions")
    if isinstance(divisions, Mapping):
        return all(_is_off(value) for value in divisions.values())
    small = live.size <= SMALL_BYTES
    return bool(small.any()) and bool((rounded(live.requested[small]) == live.size[small]).all())


def _is_off(divisions: Any) -> bool:
    return divisions in (0, 1)


def _in_expandable(found: Snapshot, device: Array, address: Array) -> Array:
    """Whether each block lies in what is, at the dump, an expandable segment."""
    inside = np.zeros(len(address), bool)
    for number in np.unique(found.segments.device[found.segments.expandable == 1]).tolist():
        mine = np.flatnonzero((found.segments.expandable == 1) & (found.segments.device == number))
        mine = mine[np.argsort(found.segments.address[mine])]
        start, size = found.segments.address[mine], found.segments.size[mine]
        place = np.searchsorted(start, address, side="right") - 1
        inside |= (device == number) & (place >= 0) & (address < (start + size)[np.maximum(place, 0)])
    return inside
