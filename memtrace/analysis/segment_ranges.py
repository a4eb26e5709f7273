"""Where and when memory of a device was reserved: ranges of addresses, each with the events that begin and end it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.event_codes import KIND
from memtrace.format.arrays import Array
from memtrace.trace import Trace

_BEGINS = (KIND["segment_alloc"], KIND["segment_map"])
_ENDS = (KIND["segment_free"], KIND["segment_unmap"])


@dataclass(frozen=True)
class SegmentRanges:
    """Reserved ranges of addresses: segments, and mapped parts of expandable segments. One element per range."""

    address: Array
    size: Array
    begin_row: Array
    """Row of events that reserves the range; -1: reserved from the start of the trace."""
    end_row: Array
    """Row of events that returns the range; the number of rows where it is reserved at the end."""
    is_expandable: Array

    def __len__(self) -> int:
        return len(self.address)


@dataclass
class _Reserved:
    """The ranges reserved at one moment of a replay, in the order of their addresses."""

    num_rows: int
    starts: list[int]
    ranges: list[tuple[int, int, bool]]
    """End, row that reserved the range, whether it belongs to an expandable segment."""
    finished: list[tuple[int, int, int, int, bool]]
    """Rows of `SegmentRanges`: address, size, begin_row, end_row, is_expandable."""

    def reserve(self, start: int, end: int, row: int, is_expandable: bool) -> None:
        self.release(start, end, row, is_expandable, is_known=True)
        place = bisect_left(self.starts, start)
        self.starts.insert(place, start)
        self.ranges.insert(place, (end, row, is_expandable))

    def release(self, start: int, end: int, row: int, is_expandable: bool, *, is_known: bool = False) -> None:
        """End what is reserved between two addresses at a row; the rest was reserved from the start of the trace.

        With ``is_known`` the rest was not reserved.
        """
        place = bisect_left(self.starts, start)
        if place and self.ranges[place - 1][0] > start:
            place -= 1
        at = start
        while place < len(self.starts) and self.starts[place] < end:
            first, (last, begin, expandable) = self.starts.pop(place), self.ranges.pop(place)
            if not is_known and first > at:
                self.finished.append((at, first - at, -1, row, is_expandable))
            low, high = max(first, start), min(last, end)
            self.finished.append((low, high - low, begin, row, expandable))
            for rest_start, rest_end in ((first, low), (high, last)):
                if rest_start < rest_end:
                    self.starts.insert(place, rest_start)
                    self.ranges.insert(place, (rest_end, begin, expandable))
                    place += 1
            at = high
        if not is_known and at < end:
            self.finished.append((at, end - at, -1, row, is_expandable))

    def finish(self, segments: list[tuple[int, int, bool]]) -> list[tuple[int, int, int, int, bool]]:
        """Return all ranges; ``segments`` (address, end, is_expandable) are those held at the end of the trace.

        A segment of which no event exists was reserved throughout.
        """
        known = [(start, end, begin) for start, (end, begin, _) in zip(self.starts, self.ranges, strict=True)]
        held = [(start, end - start, begin, self.num_rows, kind[2])
                for (start, end, begin), kind in zip(known, self.ranges, strict=True)]  # fmt: skip
        for start, end, is_expandable in segments:
            at, place = start, max(0, bisect_left(self.starts, start) - 1)
            for low, high, _ in known[place:]:
                if low >= end:
                    break
                if low > at:
                    held.append((at, low - at, -1, self.num_rows, is_expandable))
                at = max(at, high)
            if at < end:
                held.append((at, end - at, -1, self.num_rows, is_expandable))
        return self.finished + held


def find_segment_ranges(trace: Trace, device: str) -> SegmentRanges:
    """Return the reserved ranges of a device of a single-rank trace (cached); none for the CPU.

    The source is the segment events and the segments at the end of the trace.
    """
    return trace.cached(_find_segment_ranges, device)


def _find_segment_ranges(trace: Trace, device: str) -> SegmentRanges:
    events = trace.columns("events", "kind", "device", "address", "size")
    code = trace.devices.index(device)
    rows = np.flatnonzero((events["device"] == code) & np.isin(events["kind"], _BEGINS + _ENDS))
    reserved = _Reserved(trace.num_rows("events"), [], [], [])
    columns = (rows, events["kind"][rows], events["address"][rows], events["size"][rows])
    for row, kind, address, size in zip(*(column.tolist() for column in columns), strict=True):
        is_expandable = kind in (KIND["segment_map"], KIND["segment_unmap"])
        act = reserved.reserve if kind in _BEGINS else reserved.release
        act(address, address + size, row, is_expandable)
    table = trace.columns("segments", "device", "address", "size", "expandable")
    held = table["device"] == code
    start, size = table["address"][held], table["size"][held]
    segments = zip(start.tolist(), (start + size).tolist(), table["expandable"][held].tolist(), strict=True)
    ranges = np.array(reserved.finish(list(segments)), dtype=np.int64).reshape(-1, 5)
    ranges = ranges[np.lexsort((ranges[:, 0], ranges[:, 2]))]
    return SegmentRanges(
        address=ranges[:, 0],
        size=ranges[:, 1],
        begin_row=ranges[:, 2],
        end_row=ranges[:, 3],
        is_expandable=ranges[:, 4] > 0,
    )
