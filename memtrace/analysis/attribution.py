"""The operator call, phase and step of an event.

The order of the rows of ``events`` is authoritative; times follow it except for small disorder between threads. A time
therefore cuts the rows at the first row whose time is at or past it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.detection import detect_steps
from memtrace.analysis.event_codes import KIND, PHASE, SPAN
from memtrace.analysis.gaps import find_gaps
from memtrace.analysis.operators import op_column
from memtrace.format.arrays import Array
from memtrace.trace import Trace

# Re-exported for modules that also need steps or phases from here.
__all__ = [
    "KIND",
    "PHASE",
    "SPAN",
    "PhaseRows",
    "StepRows",
    "detected_step_rows",
    "op_column",
    "phase_rows",
    "rows_at",
    "step_rows",
    "steps_are_marked",
]


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

    A step that contains a part of a gap was not observed whole, and is left out.

    Empty where no step is marked and nothing repeats (see ``memtrace.analysis.detection``).
    """
    return trace.cached(_step_rows)


def _step_rows(trace: Trace) -> StepRows:
    spans = trace.columns("spans", "kind", "start_ns", "duration_ns", "index")
    chosen = np.flatnonzero(spans["kind"] == SPAN["step"])
    if not len(chosen):
        return detected_step_rows(trace)
    chosen = chosen[np.argsort(spans["start_ns"][chosen], kind="stable")]
    gaps = find_gaps(trace)
    if len(gaps):
        start = spans["start_ns"][chosen].astype(np.int64)
        chosen = chosen[~gaps.cut_times(start, start + spans["duration_ns"][chosen])]
    start, duration = spans["start_ns"][chosen], spans["duration_ns"][chosen]
    return StepRows(spans["index"][chosen], start, duration, rows_at(trace, start), rows_at(trace, start + duration))


def detected_step_rows(trace: Trace) -> StepRows:
    """Return the steps detected in the events, whether steps are marked or not."""
    rows = detect_steps(trace).rows
    time = trace.columns("events", "time_ns")["time_ns"]
    at = time[np.minimum(rows, len(time) - 1)] if len(rows) else rows
    whole = np.arange(max(len(rows) - 1, 0))
    if len(gaps := find_gaps(trace)):
        whole = whole[~gaps.cut_rows(rows[:-1], rows[1:] - 1)]
    return StepRows(np.arange(len(whole)), at[whole], np.diff(at)[whole], rows[whole], rows[whole + 1])


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
