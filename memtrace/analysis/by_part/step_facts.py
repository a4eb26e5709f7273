"""The steps of a run of parts: their rows, peaks and counts, which are joined where a step spans parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.by_part.spans import Cuts
from memtrace.analysis.event_codes import KIND
from memtrace.format.arrays import Array

UNKNOWN = int(np.iinfo(np.int64).min)
"""A row or a level that another run of parts knows, or the end of the trace."""
SUMS = ("allocated_bytes", "num_allocs", "num_frees", "num_reads", "num_writes")
"""Facts that add up."""
ROWS = ("first_row", "end_row")
LEVELS = ("peak_bytes", "live_end_bytes")
"""Bytes live on all devices, relative to the start of the run."""
_COUNTED = {"num_allocs": "alloc", "num_frees": "free", "num_reads": "read", "num_writes": "write"}


@dataclass(frozen=True)
class StepFacts:
    """The steps that overlap a run of parts, in order. Rows count from the first event of the run."""

    first: int
    """Place of the first of them among all steps of the trace."""
    columns: dict[str, Array]
    """``ROWS``, ``LEVELS`` and ``SUMS``."""

    @property
    def end(self) -> int:
        """The place after the last of them."""
        return self.first + len(self.columns["first_row"])

    def joined(self, later: StepFacts, num_rows: int, live_bytes: int) -> StepFacts:
        """Return the steps of two runs that follow each other.

        Args:
            later: the steps of the later run.
            num_rows: number of events of the earlier run.
            live_bytes: change of the live bytes over the earlier run.
        """
        first, end = min(self.first, later.first), max(self.end, later.end)
        columns = {}
        for names, offset in ((ROWS, num_rows), (LEVELS, live_bytes), (SUMS, 0)):
            for name in names:
                empty = 0 if name in SUMS else UNKNOWN
                pieces = np.full((2, end - first), empty, np.int64)
                pieces[0, self.first - first : self.end - first] = self.columns[name]
                values = later.columns[name]
                pieces[1, later.first - first : later.end - first] = np.where(
                    values == UNKNOWN, UNKNOWN, values + offset
                )
                columns[name] = pieces.sum(axis=0) if name in SUMS else pieces.max(axis=0)
        return StepFacts(first, columns)


@dataclass(frozen=True)
class StepCutRows:
    """Where the steps lie in a part, cut at its ends; rows count from its first event."""

    first_row: Array
    end_row: Array
    owns_first: Array
    """Whether the step starts in the part."""
    owns_end: Array


def find_rows(time: Array, steps_start: Array, steps_end: Array, order_ns: int) -> StepCutRows:
    """Return where intervals lie in a part: from the first row at or past their start up to that at or past their end.

    Args:
        time: the times of the events of the part.
        steps_start: starts of the intervals.
        steps_end: ends of the intervals.
        order_ns: largest time of all earlier events.
    """
    rising = np.maximum.accumulate(time)
    last = int(rising[-1]) if len(rising) else UNKNOWN
    rows, owns = [], []
    for bounds in (steps_start, steps_end):
        is_later = bounds > order_ns
        rows.append(np.where(is_later, np.searchsorted(rising, bounds, side="left"), 0))
        owns.append(is_later & (bounds <= last))
    return StepCutRows(rows[0], rows[1], owns[0], owns[1])


def measure_steps(
    cuts: Cuts, rows: StepCutRows, kind: Array, live_change: Array, alloc_rows: Array, alloc_sizes: Array
) -> StepFacts:
    """Return the facts about the steps that overlap one part.

    Args:
        cuts: the steps.
        rows: where they lie in the part.
        kind: kind of each event of the part.
        live_change: change of the live bytes of all devices in each row.
        alloc_rows: rows of the allocations, ascending.
        alloc_sizes: their bytes.
    """
    num_rows = len(kind)
    level = np.concatenate([[0], np.cumsum(live_change), [0]])
    peaks = np.empty(0, np.int64)
    if len(rows.first_row):
        # The level before the first row, and those after all rows up to the end.
        bounds = np.stack([rows.first_row, np.minimum(rows.end_row, num_rows) + 1], axis=1).ravel()
        peaks = np.maximum.reduceat(level, bounds)[::2]
    is_inside = rows.first_row < num_rows
    columns = {
        "first_row": np.where(rows.owns_first, rows.first_row, UNKNOWN),
        "end_row": np.where(rows.owns_end, rows.end_row, UNKNOWN),
        "peak_bytes": np.where(is_inside, peaks, UNKNOWN),
        "live_end_bytes": np.where(rows.owns_end, level[np.minimum(rows.end_row, num_rows)], UNKNOWN),
    }
    total = np.concatenate([[0], np.cumsum(alloc_sizes)])
    edges = np.searchsorted(alloc_rows, [rows.first_row, rows.end_row])
    columns["allocated_bytes"] = total[edges[1]] - total[edges[0]]
    limits = list(zip(rows.first_row.tolist(), rows.end_row.tolist(), strict=True))
    for name, event in _COUNTED.items():
        counts = [np.count_nonzero(kind[low:high] == KIND[event]) for low, high in limits]
        columns[name] = np.array(counts, np.int64)
    return StepFacts(cuts.first_step, columns)
