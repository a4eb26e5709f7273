"""The forward calls of modules in a step, and how they are nested."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import PHASE, SPAN, phase_rows, rows_at
from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True)
class ModuleCalls:
    """Forward calls of modules, in the order in which they begin. Limits are rows of events: [first_row, end_row)."""

    module: Array
    """Name of the module (names.id)."""
    first_row: Array
    end_row: Array
    start_ns: Array
    duration_ns: Array
    parent: Array
    """The call that the call is nested in; -1: none."""

    def __len__(self) -> int:
        return len(self.module)

    @property
    def end_ns(self) -> Array:
        """The time at which each call returns."""
        ends: Array = self.start_ns + self.duration_ns
        return ends

    @property
    def root(self) -> Array:
        """The outermost call that contains each call."""
        root = np.arange(len(self))
        while len(self) and (self.parent[root] >= 0).any():
            root = np.where(self.parent[root] >= 0, self.parent[root], root)
        return root

    def innermost_at(self, rows: Array) -> Array:
        """Return the innermost call that is running at each row; -1: none."""
        edges, running = self._pieces()
        found: Array = running[np.searchsorted(edges, rows, side="right")]
        return found

    def innermost_during(self, time_ns: Array) -> Array:
        """Return the innermost call that is running at each time; -1: none."""
        call = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        end_ns = self.end_ns
        while len(self):
            has_ended = (call >= 0) & (end_ns[call] <= time_ns)
            if not has_ended.any():
                break
            call = np.where(has_ended, self.parent[call], call)
        return call

    def child_towards(self, outer: Array, inner: Array) -> Array:
        """Return the call inside the innermost common call of ``outer`` and ``inner`` that contains ``inner``.

        -1 where ``inner`` is itself the common call. Both are calls, or -1 for the program outside all calls.
        """
        child = np.full(len(inner), -1)
        outer, inner = outer.copy(), inner.copy()
        while len(self):
            # Calls are in the order of their start, so the later one of two different calls cannot contain the other.
            climbs_inner, climbs_outer = inner > outer, outer > inner
            if not (climbs_inner | climbs_outer).any():
                break
            child = np.where(climbs_inner, inner, child)
            inner, outer = (
                np.where(climbs_inner, self.parent[inner], inner),
                np.where(climbs_outer, self.parent[outer], outer),
            )
        return child

    def contains(self, call: Array, rows: Array) -> Array:
        """Return for each pair of a call and a row whether the row belongs to the call; False for the call -1."""
        if not len(self):
            return np.zeros(len(call), bool)
        inside: Array = (call >= 0) & (self.first_row[call] <= rows) & (rows < self.end_row[call])
        return inside

    def chain(self, call: int) -> list[int]:
        """Return a call and the calls that it is nested in, innermost first."""
        calls = []
        while call >= 0:
            calls.append(call)
            call = int(self.parent[call])
        return calls

    def outermost_without(self, read_row: Array, other_row: Array) -> Array:
        """Return the outermost call that contains ``read_row`` and not ``other_row``; -1: none does."""
        call = self.innermost_at(read_row)
        call = np.where(self.contains(call, other_row), -1, call)
        if not len(self):
            return call
        while True:
            outer = np.where(call >= 0, self.parent[call], -1)
            moves = (outer >= 0) & ~self.contains(outer, other_row)
            if not moves.any():
                return call
            call = np.where(moves, outer, call)

    def _pieces(self) -> tuple[Array, Array]:
        """Return the rows at which the innermost call changes, and the innermost call before, between and after."""
        edges: list[int] = []
        running = [-1]
        open_calls: list[int] = []

        def close_until(row: int) -> None:
            while open_calls and self.end_row[open_calls[-1]] <= row:
                edges.append(int(self.end_row[open_calls.pop()]))
                running.append(open_calls[-1] if open_calls else -1)

        for call, first in enumerate(self.first_row.tolist()):
            close_until(first)
            open_calls.append(call)
            edges.append(first)
            running.append(call)
        close_until(int(np.iinfo(np.int64).max))
        return np.array(edges, np.int64), np.array(running, np.int64)


def find_module_calls(trace: Trace, start_ns: int, end_ns: int, *, include_repeated: bool = False) -> ModuleCalls:
    """Return the calls of modules that begin between two times, on the thread that calls the most modules.

    Args:
        trace: A single-rank trace.
        start_ns: First time.
        end_ns: The time after the last one.
        include_repeated: Whether to include calls that backward repeats (recomputation), on whatever thread it runs.
    """
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns", "thread")
    start, duration = spans["start_ns"], spans["duration_ns"]
    chosen = np.flatnonzero((spans["kind"] == SPAN["module"]) & (start >= start_ns) & (start < end_ns))
    is_repeated = _is_in_backward(trace, start[chosen])
    # Calls of other threads overlap those of the main thread without being nested in them. Backward does not overlap
    # forward, because the main thread waits for it.
    is_main = ~is_repeated
    if is_main.any():
        threads, counts = np.unique(spans["thread"][chosen[is_main]], return_counts=True)
        is_main &= spans["thread"][chosen] == threads[int(counts.argmax())]
    chosen = chosen[is_main | (is_repeated & include_repeated)]
    # By start, longer calls first: a caller comes before the modules that it calls. Spans are in the order of their
    # end, so that of two equal spans the later one is the caller.
    chosen = chosen[np.lexsort((-chosen, -duration[chosen], start[chosen]))]
    start, duration = start[chosen], duration[chosen]
    return ModuleCalls(
        module=spans["name"][chosen].astype(np.int64),
        first_row=rows_at(trace, start),
        end_row=rows_at(trace, start + duration),
        start_ns=start,
        duration_ns=duration,
        parent=_find_parents(start.tolist(), (start + duration).tolist()),
    )


def _is_in_backward(trace: Trace, time_ns: Array) -> Array:
    phases = phase_rows(trace)
    if phases is None:
        return np.zeros(len(time_ns), bool)
    in_backward: Array = phases.of_times(time_ns) == PHASE["backward"]
    return in_backward


def _find_parents(start: list[int], end: list[int]) -> Array:
    """Return the innermost call that contains each call, -1 for none; calls are ordered by start, then by length."""
    parent = np.full(len(start), -1, np.int64)
    open_calls: list[int] = []
    for call, begin in enumerate(start):
        while open_calls and (end[open_calls[-1]] <= begin or end[open_calls[-1]] < end[call]):
            open_calls.pop()
        parent[call] = open_calls[-1] if open_calls else -1
        open_calls.append(call)
    return parent
