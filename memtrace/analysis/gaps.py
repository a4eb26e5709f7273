"""Gaps: times in which nothing was observed, between the steps that a schedule records.

Of a gap only the frees of the blocks that were known are recorded. A block that was allocated in a gap begins at its
end, without an operator; one that was allocated and freed there is missing. Steps, accesses and peaks in a gap are
unknown.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.event_codes import SPAN
from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True)
class Gaps:
    """The gaps of a trace in order of time, half-open [start, end)."""

    start_ns: Array
    end_ns: Array
    first_row: Array
    """First row of events of the gap."""
    end_row: Array
    """Row after the last one."""

    def __len__(self) -> int:
        return len(self.start_ns)

    def contain_rows(self, rows: Array) -> Array:
        """Return whether each row of events lies in a gap."""
        place = np.searchsorted(self.first_row, rows, side="right") - 1
        if not len(self):
            return np.zeros(len(rows), bool)
        inside: Array = (place >= 0) & (rows < self.end_row[np.maximum(place, 0)])
        return inside

    def cut_rows(self, first_row: Array, end_row: Array) -> Array:
        """Return whether a part of a gap lies between two rows of events each: after the first, before the second."""
        after = np.searchsorted(self.end_row, first_row, side="right")
        cut: Array = np.searchsorted(self.first_row, end_row, side="right") > after
        return cut

    def cut_times(self, start_ns: Array, end_ns: Array) -> Array:
        """Return whether a part of a gap lies between two times each."""
        after = np.searchsorted(self.end_ns, start_ns, side="right")
        cut: Array = np.searchsorted(self.start_ns, end_ns, side="left") > after
        return cut


def find_gaps(trace: Trace) -> Gaps:
    """Return the gaps of a single-rank trace; empty where all steps were recorded."""
    return trace.cached(_find_gaps)


def _find_gaps(trace: Trace) -> Gaps:
    spans = trace.columns("spans", "kind", "start_ns", "duration_ns")
    chosen = np.flatnonzero(spans["kind"] == SPAN["gap"])
    chosen = chosen[np.argsort(spans["start_ns"][chosen], kind="stable")]
    start = spans["start_ns"][chosen].astype(np.int64)
    end = start + spans["duration_ns"][chosen]
    if not len(chosen):
        return Gaps(start, end, start, end)
    # The blocks that are listed at the end of a gap belong to it, and so does what other threads did then.
    time = np.maximum.accumulate(trace.columns("events", "time_ns")["time_ns"])
    return Gaps(start, end, np.searchsorted(time, start, side="left"), np.searchsorted(time, end, side="left"))
