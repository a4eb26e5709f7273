"""The calls of modules in a recorded step, and how they contain each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import SPAN, rows_at
from memtrace.format.arrays import Array
from memtrace.planning.recorded_step import RecordedStep
from memtrace.trace import Trace


@dataclass(frozen=True)
class ModuleCalls:
    """Forward calls of modules in the order of their start, outer before inner."""

    name: Array
    """The module's name (names.id)."""
    start_ns: Array
    end_ns: Array
    end_row: Array
    """The first row of events after the call."""
    parent: Array
    """The call that contains this one; -1: none."""
    root: Array
    """The outermost call that contains this one."""

    def innermost(self, time_ns: Array) -> Array:
        """Return the innermost call at each time, -1 outside all calls."""
        call = np.searchsorted(self.start_ns, time_ns, side="right") - 1
        while True:
            has_ended = (call >= 0) & (self.end_ns[call] <= time_ns) if len(self.name) else call >= 0
            if not has_ended.any():
                return call
            call = np.where(has_ended, self.parent[call], call)

    def child_towards(self, outer: Array, inner: Array) -> Array:
        """Return the call inside the innermost common call of ``outer`` and ``inner`` that contains ``inner``.

        -1 where ``inner`` is itself the common call. Both are calls, or -1 for the program outside all calls.
        """
        child = np.full(len(inner), -1)
        outer, inner = outer.copy(), inner.copy()
        while len(self.name):
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


def find_module_calls(trace: Trace, step: RecordedStep) -> ModuleCalls:
    """Return the module calls that begin in a step."""
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    start = spans["start_ns"]
    is_inside = (start >= step.start_ns) & (start < step.start_ns + step.duration_ns)
    chosen = np.flatnonzero((spans["kind"] == SPAN["module"]) & is_inside)
    # Spans are written in the order of their end, so that of two with the same limits the inner one comes first.
    order = np.lexsort((-chosen, -spans["duration_ns"][chosen], start[chosen]))
    chosen = chosen[order]
    start, end = start[chosen], start[chosen] + spans["duration_ns"][chosen]
    parent, root = _nest(start.tolist(), end.tolist())
    return ModuleCalls(spans["name"][chosen], start, end, rows_at(trace, end), parent, root)


def _nest(start: list[int], end: list[int]) -> tuple[Array, Array]:
    parent, root = np.full(len(start), -1), np.arange(len(start))
    open_calls: list[int] = []
    for call, begin in enumerate(start):
        while open_calls and end[open_calls[-1]] <= begin:
            open_calls.pop()
        if open_calls:
            parent[call], root[call] = open_calls[-1], root[open_calls[-1]]
        open_calls.append(call)
    return parent, root
