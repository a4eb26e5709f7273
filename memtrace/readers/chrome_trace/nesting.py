"""Finds the slice around each slice of a Chrome trace, for all slices at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.readers.tables import Array


@dataclass(frozen=True)
class Nesting:
    """Slices in the order of thread, start and length (longest first)."""

    thread: Array
    start_ns: Array
    end_ns: Array
    depth: Array
    """Number of slices around the slice."""
    parent: Array
    """Row of the slice around the slice, -1 for none."""
    order: Array
    """For each row its index in the arrays that ``of`` was given."""
    ends: Array
    """The ends of all slices in the order of thread and end."""
    ends_thread: Array
    """The thread of each element of ``ends``."""

    @classmethod
    def of(cls, thread: Array, start_ns: Array, end_ns: Array) -> Nesting:
        """Nest slices. Two slices of a thread must be disjoint, or one must contain the other, as calls do."""
        order = np.lexsort((-end_ns, start_ns, thread))
        thread, start_ns, end_ns = thread[order], start_ns[order], end_ns[order]
        by_end = np.lexsort((end_ns, thread))
        ends, ends_thread = end_ns[by_end], thread[by_end]
        # The slices around a slice are those of its thread before it in this order that have not ended.
        first = np.searchsorted(thread, thread, side="left")
        ended = _count_before(ends_thread, ends, thread, start_ns, side="right") - first
        depth = np.arange(len(thread)) - first - ended
        parent = np.full(len(thread), -1, np.int64)
        for level in range(1, int(depth.max(initial=0)) + 1):
            inner, outer = np.flatnonzero(depth == level), np.flatnonzero(depth == level - 1)
            index = np.searchsorted(outer, inner) - 1
            has_parent = index >= 0
            parent[inner[has_parent]] = outer[index[has_parent]]
        return cls(thread, start_ns, end_ns, depth, parent, order, ends, ends_thread)

    def innermost(self, thread: Array, time_ns: Array) -> Array:
        """Return for each thread and time the row of the innermost slice at that time, -1 for none."""
        first = np.searchsorted(self.thread, thread, side="left")
        begun = _count_before(self.thread, self.start_ns, thread, time_ns, side="right")
        ended = _count_before(self.ends_thread, self.ends, thread, time_ns, side="right") - first
        level = begun - first - ended - 1
        result = np.full(len(thread), -1, np.int64)
        for depth in np.unique(level[level >= 0]).tolist():
            queries = np.flatnonzero(level == depth)
            rows = np.flatnonzero(self.depth == depth)
            index = np.searchsorted(rows, begun[queries]) - 1
            has_slice = index >= 0
            result[queries[has_slice]] = rows[index[has_slice]]
        inside = (
            (result >= 0) & (self.thread[result] == thread) & (self.end_ns[result] > time_ns)
            if len(self.thread)
            else result >= 0
        )
        return np.where(inside, result, -1)


def _count_before(threads: Array, times: Array, thread: Array, time: Array, *, side: str) -> Array:
    """Return where each pair (thread, time) belongs in the sorted pairs (threads, times)."""
    position = np.empty(len(thread), np.int64)
    for number in np.unique(thread).tolist():
        low, high = np.searchsorted(threads, [number, number + 1])
        of_thread = thread == number
        offset = np.searchsorted(times[low:high], time[of_thread], side=side)  # type: ignore[call-overload]
        position[of_thread] = low + offset
    return position
