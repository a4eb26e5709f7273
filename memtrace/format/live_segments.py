"""The CUDA segments that are reserved at a row of ``events``, as rows that make them reserved again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from memtrace.format.arrays import Array
from memtrace.format.schema import EVENT_KINDS

_GROWS = tuple(EVENT_KINDS.index(kind) for kind in ("segment_alloc", "segment_map"))
_SHRINKS = tuple(EVENT_KINDS.index(kind) for kind in ("segment_free", "segment_unmap"))

Row = dict[str, int]


class LiveSegments:
    """Reserved address ranges by device.

    Segments older than the recording have no events, so they are not in the set.
    """

    def __init__(self) -> None:
        self._rows: list[Row] = []

    def copy(self) -> LiveSegments:
        """Return a copy, which changes on its own."""
        other = LiveSegments()
        other._rows = list(self._rows)
        return other

    def advance(self, events: Mapping[str, Array]) -> None:
        """Apply the segment events among ``events``, which are columns of the table events.

        A Python loop: a recording has tens of segment events, seldom thousands.
        """
        kind = events["kind"]
        for index in np.flatnonzero(np.isin(kind, _GROWS + _SHRINKS)).tolist():
            row = {name: int(values[index]) for name, values in events.items()}
            if row["kind"] in _SHRINKS:
                self._release(row["device"], row["address"], row["size"])
            else:
                self._rows.append(row)

    def _release(self, device: int, start: int, size: int) -> None:
        """Remove an address range; an expandable segment can be unmapped in other pieces than it was mapped in."""
        kept: list[Row] = []
        for row in self._rows:
            low, high = row["address"], row["address"] + row["size"]
            if row["device"] != device or start >= high or start + size <= low:
                kept.append(row)
                continue
            for first, last in ((low, start), (start + size, high)):
                if first < last:
                    kept.append({**row, "address": first, "size": last - first})
        self._rows = kept

    def columns(self, names: tuple[str, ...]) -> dict[str, Array]:
        """Return columns of the reserved ranges, in order of their reservation."""
        return {name: np.array([row.get(name, -1) for row in self._rows], np.int64) for name in names}
