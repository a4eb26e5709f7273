"""Slices of one trace nest on each thread: which slice is around which, for all of them at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.readers.tables import Array


@dataclass(frozen=True)
class Nesting:
    """Slices in order of (thread, start, longest first). ``parent`` is the row of the slice around, -1 at the outside;
    ``depth`` is 0 there."""

    thread: Array
    start_ns: Array
    end_ns: Array
    depth: Array
    parent: Array
    order: Array
    """Row in the order given -> here."""
    ends: Array
    """All ends, sorted by (thread, end)."""
    ends_thread: Array

    @classmethod
    def of(cls, thread: Array, start_ns: Array, end_ns: Array) -> Nesting:
        """Nest slices that lie within one another or apart, as calls on a thread do."""
        order = np.lexsort((-end_ns, start_ns, thread))
        thread, start_ns, end_ns = thread[order], start_ns[order], end_ns[order]
        by_end = np.lexsort((end_ns, thread))
        ends, ends_thread = end_ns[by_end], thread[by_end]
        # Open around a slice are those of its thread that begin before it in this order, less those ended by then.
        first = np.searchsorted(thread, thread, side="left")
        ended = _count_before(ends_thread, ends, thread, start_ns, side="right") - first
        depth = np.arange(len(thread)) - first - ended
        parent = np.full(len(thread), -1, np.int64)
        for level in range(1, int(depth.max(initial=0)) + 1):
            inner, outer = np.flatnonzero(depth == level), np.flatnonzero(depth == level - 1)
            place = np.searchsorted(outer, inner) - 1
            found = place >= 0
            parent[inner[found]] = outer[place[found]]
        return cls(thread, start_ns, end_ns, depth, parent, order, ends, ends_thread)

    def innermost(self, thread: Array, time_ns: Array) -> Array:
        """For each (thread, time) the row of the innermost slice open then, -1 where none is."""
        first = np.searchsorted(self.thread, thread, side="left")
        begun = _count_before(self.thread, self.start_ns, thread, time_ns, side="right")
        ended = _count_before(self.ends_thread, self.ends, thread, time_ns, side="right") - first
        level = begun - first - ended - 1
        found = np.full(len(thread), -1, np.int64)
        for depth in np.unique(level[level >= 0]).tolist():
            wanted = np.flatnonzero(level == depth)
            rows = np.flatnonzero(self.depth == depth)
            place = np.searchsorted(rows, begun[wanted]) - 1
            hit = place >= 0
            found[wanted[hit]] = rows[place[hit]]
        inside = (
            (found >= 0) & (self.thread[found] == thread) & (self.end_ns[found] > time_ns)
            if len(self.thread)
            else found >= 0
        )
        return np.where(inside, found, -1)


def _count_before(threads: Array, times: Array, thread: Array, time: Array, *, side: str) -> Array:
    """In (threads, times), sorted so, the place of each (thread, time)."""
    place = np.empty(len(thread), np.int64)
    for number in np.unique(thread).tolist():
        low, high = np.searchsorted(threads, [number, number + 1])
        mine = thread == number
        place[mine] = low + np.searchsorted(times[low:high], time[mine], side=side)  # type: ignore[call-overload]
    return place
