"""The operator call, phase and step of an event.

The order of the rows of ``events`` is authoritative; times follow it except for small disorder between threads. A time
therefore cuts the rows at the first row whose time is at or past it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.format.arrays import Array
from memtrace.format.keyframes import find_sorted
from memtrace.format.schema import EVENT_KINDS, PHASES, SPAN_KINDS
from memtrace.trace import Trace

KIND = {kind: np.int8(code) for code, kind in enumerate(EVENT_KINDS)}
PHASE = {phase: np.int8(code) for code, phase in enumerate(PHASES)}
SPAN = {kind: np.int8(code) for code, kind in enumerate(SPAN_KINDS)}


def rows_at(trace: Trace, times: Array) -> Array:
    """Return for each time the first row of events at or past it; the number of rows where there is none."""
    return np.searchsorted(trace.cached(_rising_times), times, side="left")


def _rising_times(trace: Trace) -> Array:
    time = trace.columns("events", "time_ns")["time_ns"]
    return time if bool(np.all(time[1:] >= time[:-1])) else np.maximum.accumulate(time)


@dataclass(frozen=True)
class StepRows:
    """The steps of a trace in order of time."""

    number: Array
    start_ns: Array
    duration_ns: Array
    first_row: Array
    """First row of events of the step."""
    end_row: Array
    """Row after the last one."""

    def of_rows(self, rows: Array) -> Array:
        """Return the step's number for each row of events, -1 outside all steps."""
        return self._find(self.first_row, self.end_row, rows)

    def of_times(self, times: Array) -> Array:
        """Return the step's number for each time (the largest time of all events up to a row), -1 outside all steps."""
        return self._find(self.start_ns, self.start_ns + self.duration_ns, times)

    def _find(self, first: Array, end: Array, positions: Array) -> Array:
        if not len(self.number):
            return np.full(len(positions), -1, np.int64)
        place = np.searchsorted(first, positions, side="right") - 1
        inside = (place >= 0) & (positions < end[place])
        return np.where(inside, self.number[place], -1)


def steps_are_marked(trace: Trace) -> bool:
    """Return whether the trace has marked steps; if not, they are detected in the events."""
    return bool((trace.columns("spans", "kind")["kind"] == SPAN["step"]).any())


def step_rows(trace: Trace) -> StepRows:
    """Return the steps, half-open [start, start + duration): the spans of kind step, else those detected in the events.

    Empty where no step is marked and nothing repeats (see ``memtrace.analysis.detection``).
    """
    return trace.cached(_step_rows)


def _step_rows(trace: Trace) -> StepRows:
    spans = trace.columns("spans", "kind", "start_ns", "duration_ns", "index")
    chosen = np.flatnonzero(spans["kind"] == SPAN["step"])
    if not len(chosen):
        return detected_step_rows(trace)
    chosen = chosen[np.argsort(spans["start_ns"][chosen], kind="stable")]
    start, duration = spans["start_ns"][chosen], spans["duration_ns"][chosen]
    return StepRows(spans["index"][chosen], start, duration, rows_at(trace, start), rows_at(trace, start + duration))


def detected_step_rows(trace: Trace) -> StepRows:
    """Return the steps detected in the events, whether steps are marked or not."""
    from memtrace.analysis.detection import detect

    rows = detect(trace).rows
    time = trace.columns("events", "time_ns")["time_ns"]
    at = time[np.minimum(rows, len(time) - 1)] if len(rows) else rows
    return StepRows(np.arange(max(len(rows) - 1, 0)), at[:-1], np.diff(at), rows[:-1], rows[1:])


@dataclass(frozen=True)
class OpRows:
    """Finds the row of an operator call by its id."""

    first: int
    row_of: Array
    """Row by id - ``first``; -1 for calls whose row was never written (a killed process)."""
    far_ids: Array
    """Ids far below ``first``, ascending: a window has calls from long before it, which allocated blocks that live."""
    far_rows: Array

    def rows(self, ops: Array) -> Array:
        """Return the row of ``ops`` for each operator call, -1 where there is none."""
        rows = np.full(len(ops), -1, np.int32)
        if len(self.row_of):
            place = ops - self.first
            near = (place >= 0) & (place < len(self.row_of))
            rows = np.where(near, self.row_of[np.where(near, place, 0)], np.int32(-1))
        if len(self.far_ids):
            places, found = find_sorted(self.far_ids, ops)
            rows = np.where(found, self.far_rows[places], rows)
        return rows


def op_rows(trace: Trace) -> OpRows:
    """Return the lookup from operator call to its row, computed once."""
    return trace.cached(_op_rows)


def _op_rows(trace: Trace) -> OpRows:
    ids = trace.columns("ops", "op_id")["op_id"]
    rows = np.arange(len(ids), dtype=np.int32)
    # A table over the range of ids is quickest, but must not be larger than the trace.
    last = int(ids.max(initial=-1))
    is_near = ids > last - 4 * len(ids) - 1024
    far = rows[~is_near][np.argsort(ids[~is_near], kind="stable")]
    first = int(ids[is_near].min()) if len(ids) else 0
    row_of = np.full(last - first + 1 if len(ids) else 0, -1, np.int32)
    row_of[ids[is_near] - first] = rows[is_near]
    return OpRows(first, row_of, ids[far], far)


def op_column(trace: Trace, ops: Array, name: str) -> Array:
    """Return a column of the table ops for each operator call, -1 (False) where the call is not known."""
    column = trace.columns("ops", name)[name]
    missing = column.dtype.type(False) if column.dtype == bool else column.dtype.type(-1)
    if not len(column):
        return np.full(len(ops), missing, column.dtype)
    rows = op_rows(trace).rows(ops)
    return np.where(rows >= 0, column[rows], missing)


@dataclass(frozen=True)
class PhaseRows:
    """The rows of events, cut wherever a phase or a step begins or ends; each piece lies in one phase."""

    first_row: Array
    phase: Array
    cut_ns: Array
    """Times of the cuts: one less than there are pieces."""

    def pieces(self, rows: Array) -> Array:
        """Return the piece of each row."""
        return np.searchsorted(self.first_row, rows, side="right") - 1

    def of_times(self, times: Array) -> Array:
        """Return the phase at each time (the largest time of all events up to a row)."""
        return self.phase[np.searchsorted(self.cut_ns, times, side="right")]


def phase_rows(trace: Trace) -> PhaseRows | None:
    """Return the phases by the spans of kind phase: the innermost span, ``other`` between spans; None without spans."""
    return trace.cached(_phase_rows)


def _phase_rows(trace: Trace) -> PhaseRows | None:
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    chosen = np.flatnonzero(spans["kind"] == SPAN["phase"])
    if not len(chosen):
        return None
    chosen = chosen[np.argsort(spans["start_ns"][chosen], kind="stable")]
    start = spans["start_ns"][chosen]
    end = start + spans["duration_ns"][chosen]
    names = {int(name): PHASE.get(trace.name(int(name)) or "", np.int8(-1)) for name in set(spans["name"][chosen])}
    phase = np.array([names[int(name)] for name in spans["name"][chosen]], np.int8)
    steps = step_rows(trace)
    times = np.unique(np.concatenate([start, end, steps.start_ns, steps.start_ns + steps.duration_ns]))
    piece_phase = np.full(len(times) + 1, PHASE["other"], np.int8)
    # Spans in order of start, so an inner one overwrites its part of the outer one.
    for first, last, code in zip(np.searchsorted(times, start), np.searchsorted(times, end), phase, strict=True):
        piece_phase[first + 1 : last + 1] = code
    return PhaseRows(np.concatenate([[0], rows_at(trace, times)]), piece_phase, times)
