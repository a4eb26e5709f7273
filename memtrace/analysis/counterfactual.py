"""The peak that would result if blocks were absent for part of their lives, by replaying the timeline without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import requested_bytes
from memtrace.format.arrays import Array
from memtrace.trace import Trace

FOREVER: Final = 1 << 40


@dataclass(frozen=True)
class Absences:
    """Stretches in which blocks need not be there, one a row: from row ``begin`` of events (-1: the start) to ``end``.

    ``begin`` is the last row that needs a block, or its allocation; ``end`` the next that does, or its free, or
    ``FOREVER``.
    """

    block: Array
    begin: Array
    end: Array

    def __len__(self) -> int:
        return len(self.block)

    def take(self, rows: Array) -> Absences:
        """Some of the rows."""
        return Absences(self.block[rows], self.begin[rows], self.end[rows])

    @classmethod
    def joined(cls, parts: list[Absences]) -> Absences:
        """All rows of several."""
        nothing = np.zeros(0, np.int64)
        columns = ([nothing, *(getattr(part, name) for part in parts)] for name in ("block", "begin", "end"))
        return cls(*(np.concatenate(column) for column in columns))


def merged(absences: Absences) -> Absences:
    """The same without overlaps: a byte that is absent for two reasons is absent once."""
    order = np.lexsort((absences.begin, absences.block))
    rows = absences.take(order)
    if not len(rows):
        return rows
    # A row begins a run where nothing before it of the same block reaches it. Blocks are numbered anew and set far
    # apart, so that the running maximum of the ends never mixes two.
    shift = np.unique(rows.block, return_inverse=True)[1] * (2 * FOREVER)
    reach = np.maximum.accumulate(rows.end + shift)
    starts = np.ones(len(rows), bool)
    starts[1:] = rows.begin[1:] + shift[1:] > reach[:-1]
    first = np.flatnonzero(starts)
    return Absences(rows.block[first], rows.begin[first], np.maximum.reduceat(rows.end + shift, first) - shift[first])


def peak_without(trace: Trace, device: str, absences: Absences) -> int:
    """The requested peak of a device with its blocks absent as told. Bytes."""
    live = requested_bytes(trace, device)
    absent = absent_bytes(trace, device, absences)
    return int((np.concatenate([[live.start], live.bytes]) - absent).max())


def absent_bytes(trace: Trace, device: str, absences: Absences) -> Array:
    """How much less is live: at the start, and after each row of ``requested_bytes(trace, device)``. Bytes."""
    found, rows = blocks(trace), requested_bytes(trace, device).rows
    chosen = merged(absences.take(np.flatnonzero(found.device[absences.block] == trace.devices.index(device))))
    size = found.size[chosen.block]
    # Level k lasts from change k - 1 to change k. A block is absent from the levels that lie wholly in its absence.
    begin = np.where(chosen.begin < 0, 0, np.searchsorted(rows, chosen.begin, side="left") + 1)
    end = np.where(chosen.end >= FOREVER, len(rows) + 1, np.searchsorted(rows, chosen.end, side="right"))
    covers = begin < end
    change = np.zeros(len(rows) + 2, np.int64)
    np.add.at(change, begin[covers], size[covers])
    np.add.at(change, end[covers], -size[covers])
    return np.cumsum(change)[: len(rows) + 1]
