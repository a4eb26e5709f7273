"""The levels of byte counts over a run of parts: live, allocated and reserved bytes, and where they are highest.

Levels are relative to the start of the run, so that runs are joined without knowing what comes before them. Rows count
from the first event of the run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from memtrace.analysis.peak import Maximum
from memtrace.format.arrays import Array


@dataclass(frozen=True)
class LevelFacts:
    """One byte count of one device over a run of parts."""

    total: int = 0
    """Change over the run."""
    top: int = 0
    """Highest level after any row of the run, or 0 where none is above the start."""
    top_row: int = -1
    """First row after which it is reached; -1: the start."""
    top_part: int = -1
    """The part of that row."""
    highest_change: int | None = None
    """Highest level after a row that changes it; None: no row does."""

    def moved(self, num_rows: int) -> LevelFacts:
        """Return the same facts with rows counted from ``num_rows`` before the run."""
        return replace(self, top_row=self.top_row + num_rows) if self.top_row >= 0 else self

    def joined(self, later: LevelFacts) -> LevelFacts:
        """Return the facts of two runs that follow each other; the rows of both have one origin."""
        is_later_higher = later.top_row >= 0 and self.total + later.top > self.top
        changes = [self.highest_change, None if later.highest_change is None else self.total + later.highest_change]
        return LevelFacts(
            total=self.total + later.total,
            top=self.total + later.top if is_later_higher else self.top,
            top_row=later.top_row if is_later_higher else self.top_row,
            top_part=later.top_part if is_later_higher else self.top_part,
            highest_change=max((change for change in changes if change is not None), default=None),
        )

    def maximum(self, start: int) -> Maximum:
        """Return the maximum of a count whose level at the start of the run is known."""
        return Maximum(start + self.top, self.top_row)


def find_levels(change: Array, part: int) -> LevelFacts:
    """Return the facts about a level by its change in each row of a part."""
    changed = np.flatnonzero(change)
    if not len(changed):
        return LevelFacts()
    level = np.cumsum(change[changed])
    place = int(level.argmax())
    top = int(level[place])
    is_above = top > 0
    return LevelFacts(
        total=int(level[-1]),
        top=top if is_above else 0,
        top_row=int(changed[place]) if is_above else -1,
        top_part=part if is_above else -1,
        highest_change=top,
    )


@dataclass(frozen=True)
class FullestMoment:
    """Of the rows of a run that change the live bytes: with most reserved bytes, then with most live bytes."""

    reserved: int
    live: int
    row: int
    part: int

    def moved(self, num_rows: int, reserved: int, live: int) -> FullestMoment:
        """Return the moment with levels and rows counted from before the run."""
        return FullestMoment(self.reserved + reserved, self.live + live, self.row + num_rows, self.part)


@dataclass(frozen=True)
class DeviceFacts:
    """The memory of one device over a run of parts. Bytes."""

    live: LevelFacts = LevelFacts()
    """Requested bytes, or the allocator's where those are unknown."""
    allocated: LevelFacts = LevelFacts()
    """As the allocator counts the blocks, until the program requests their free."""
    allocated_until_free: LevelFacts = LevelFacts()
    """The same until they are freed, for devices on which no free is requested."""
    num_requests: int = 0
    """Number of requested frees."""
    reserved: LevelFacts = LevelFacts()
    fullest: FullestMoment | None = None
    """None without segment events, or without blocks."""
    is_requested: bool = True
    """Whether the requested bytes of all blocks are known."""
    is_allocated_known: bool = True
    """Whether the allocator's sizes of all blocks are known."""
    num_blocks: int = 0
    older_bytes: int = 0
    """Bytes of the blocks that are older than the recording and first seen in the run."""
    older_allocated_bytes: int = 0
    """The same as the allocator counts them."""
    waiting_bytes: int = 0
    """Those of them that were freed without a request: they only waited for a stream."""
    older_ids: tuple[tuple[int, Array], ...] = ()
    """The ids of these blocks, by the part in which they are first seen."""
    segment_rows: tuple[Array, ...] = ()
    """Columns of the segment events: row, kind, address, size, stream, pool."""

    def allocated_maximum(self) -> Maximum:
        """Return the peak of the allocated bytes of a whole trace."""
        if self.num_requests:
            return self.allocated.maximum(self.older_allocated_bytes - self.waiting_bytes)
        return self.allocated_until_free.maximum(self.older_allocated_bytes)

    def joined(self, later: DeviceFacts, num_rows: int) -> DeviceFacts:
        """Return the facts of two runs that follow each other.

        Args:
            later: the facts of the later run.
            num_rows: number of events of the earlier run.
        """
        moved = None
        if later.fullest is not None:
            moved = later.fullest.moved(num_rows, self.reserved.total, self.live.total)
        moments = [moment for moment in (self.fullest, moved) if moment is not None]
        segments = later.segment_rows
        if segments:
            segments = (segments[0] + num_rows, *segments[1:])
        return DeviceFacts(
            live=self.live.joined(later.live.moved(num_rows)),
            allocated=self.allocated.joined(later.allocated.moved(num_rows)),
            allocated_until_free=self.allocated_until_free.joined(later.allocated_until_free.moved(num_rows)),
            num_requests=self.num_requests + later.num_requests,
            reserved=self.reserved.joined(later.reserved.moved(num_rows)),
            fullest=max(moments, key=lambda moment: (moment.reserved, moment.live, -moment.row), default=None),
            is_requested=self.is_requested and later.is_requested,
            is_allocated_known=self.is_allocated_known and later.is_allocated_known,
            num_blocks=self.num_blocks + later.num_blocks,
            older_bytes=self.older_bytes + later.older_bytes,
            older_allocated_bytes=self.older_allocated_bytes + later.older_allocated_bytes,
            waiting_bytes=self.waiting_bytes + later.waiting_bytes,
            older_ids=self.older_ids + later.older_ids,
            segment_rows=_joined_columns(self.segment_rows, segments),
        )


def _joined_columns(earlier: tuple[Array, ...], later: tuple[Array, ...]) -> tuple[Array, ...]:
    if not earlier or not later:
        return earlier or later
    return tuple(np.concatenate(pair) for pair in zip(earlier, later, strict=True))


NO_DEVICE = DeviceFacts()


def find_fullest(live_change: Array, reserved_change: Array, part: int) -> FullestMoment | None:
    """Return the fullest moment of a part; None where no row changes the live bytes."""
    rows = np.flatnonzero(live_change)
    if not len(rows):
        return None
    reserved, live = np.cumsum(reserved_change)[rows], np.cumsum(live_change)[rows]
    highest = int(reserved.max())
    place = int(np.argmax(np.where(reserved == highest, live, np.iinfo(np.int64).min)))
    return FullestMoment(highest, int(live[place]), int(rows[place]), part)
