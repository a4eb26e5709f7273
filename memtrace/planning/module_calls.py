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

    def innermost_at(self, rows: Array) -> Array:
        """Return the innermost call that is running at each row; -1: none."""
        edges, running = self._pieces()
        found: Array = running[np.searchsorted(edges, rows, side="right")]
        return found

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


def find_module_calls(trace: Trace, start_ns: int, end_ns: int) -> ModuleCalls:
    """Return the calls of modules that begin between two times, except those that backward repeats (recomputation).

    Args:
        trace: A single-rank trace.
        start_ns: First time.
        end_ns: The time after the last one.
    """
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns", "thread")
    start, duration = spans["start_ns"], spans["duration_ns"]
    chosen = np.flatnonzero((spans["kind"] == SPAN["module"]) & (start >= start_ns) & (start < end_ns))
    phases = phase_rows(trace)
    if phases is not None:
        chosen = chosen[phases.of_times(start[chosen]) != PHASE["backward"]]
    if len(chosen):
        # Calls of other threads overlap those of the main thread without being nested in them.
        threads, counts = np.unique(spans["thread"][chosen], return_counts=True)
        chosen = chosen[spans["thread"][chosen] == threads[int(counts.argmax())]]
    # By start, longer calls first: a caller comes before the modules that it calls. Spans are in the order of their
    # end, so that of two equal spans the later one is the caller.
    chosen = chosen[np.lexsort((-chosen, -duration[chosen], start[chosen]))]
    first, end = rows_at(trace, start[chosen]), rows_at(trace, start[chosen] + duration[chosen])
    parent = np.full(len(chosen), -1, np.int64)
    open_calls: list[int] = []
    stop = (start[chosen] + duration[chosen]).tolist()
    for call, begin in enumerate(start[chosen].tolist()):
        while open_calls and (stop[open_calls[-1]] <= begin or stop[open_calls[-1]] < stop[call]):
            open_calls.pop()
        parent[call] = open_calls[-1] if open_calls else -1
        open_calls.append(call)
    return ModuleCalls(spans["name"][chosen].astype(np.int64), first, end, start[chosen], duration[chosen], parent)
