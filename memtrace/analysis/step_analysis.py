"""Steps of a trace: where they begin and end, how certain that is, how similar they are, and what differs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from memtrace.analysis.attribution import KIND, StepRows, step_rows, steps_are_marked
from memtrace.analysis.block_signatures import select_steps
from memtrace.analysis.detection import DetectedSteps, detect_steps
from memtrace.analysis.detection.steps import Method
from memtrace.analysis.gaps import find_gaps
from memtrace.analysis.stability import AllocationFit, BlockDifference, fit_allocations, measure_stability
from memtrace.analysis.thresholds import MIN_MATCHING_BYTES, MIN_SHIFTED_AGREEMENT
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.trace import Trace

StepSource = Literal["marks", "events", "none"]


@dataclass(frozen=True)
class MarkAgreement:
    """Comparison of the marked steps with the steps detected in the events alone."""

    agreement: float
    """Share of the marked steps whose end was also detected, from 0 to 1. Only frees may lie between the two ends."""
    shift_events: int | None
    """Most common distance of a detected end from its marked end, in events other than frees; negative: earlier. None
    where nothing was detected."""
    shifted_agreement: float | None
    """Share of the marked steps whose detected end has exactly this distance; None where nothing was detected."""

    @property
    def is_shifted(self) -> bool:
        """Whether most detected ends have the same distance from the marked ones.

        A weight average that is updated after each optimizer step, for example, shifts all of them.
        """
        return bool(self.shift_events) and (self.shifted_agreement or 0.0) >= MIN_SHIFTED_AGREEMENT


@dataclass(frozen=True)
class StepBoundaries:
    """The steps of a trace and where they come from."""

    source: StepSource
    rows: StepRows
    detected: DetectedSteps
    marks: MarkAgreement | None
    """Comparison with the detected steps; None where no steps are marked, or only some of them were recorded."""


@dataclass(frozen=True)
class StepMatch:
    """One step, and how much of it matches the usual step. Shares from 0 to 1."""

    step: int
    start_ns: int | None
    """Nanoseconds since the recording began; None where the trace has no times."""
    duration_ns: int | None
    """None where the trace has no times."""
    first_event: int
    """Row of ``events`` with which the step begins."""
    end_event: int
    """Row of ``events`` before which the step ends."""
    matching_events: float
    matching_bytes: float
    matching_blocks: float
    is_unusual: bool
    """Whether less than 99 % of the bytes match. Warm-up steps are never unusual."""


@dataclass(frozen=True)
class MedianMatch:
    """How much of the steps after warm-up matches the usual step: medians, from 0 to 1. None with too few steps."""

    num_warm_up_steps: int
    events: float | None
    bytes: float | None
    blocks: float | None


@dataclass(frozen=True)
class StepAnalysis(Displayed):
    """The steps of a trace, as ``memtrace steps --json`` prints them."""

    source: StepSource
    """``marks`` of the program or its optimizer, ``events`` (detected without marks) or ``none``."""
    is_iterative: bool | None
    """Whether the trace has steps; None for a file that holds totals by category."""
    num_steps: int
    median_events: int | None
    """Median number of events of a step; None without steps."""
    median_duration_ns: int | None
    """Median duration of a step; None without steps or times."""
    confidence: float | None
    """Confidence in the steps, from 0 to 1; 1 for marks, None for a file that holds totals by category."""
    method: Method
    """What repeats in the events: parameter ``updates``, ``allocations`` or ``none``."""
    marks: MarkAgreement | None
    """Comparison of marked with detected steps; None where no steps are marked, or only some of them were recorded."""
    stability: MedianMatch
    allocation_fit: AllocationFit | None
    """Allocations = c0 + c1 n; None with fewer than four steps."""
    steps: tuple[StepMatch, ...]
    differences: tuple[BlockDifference, ...]
    """Blocks that are not the same in every step after warm-up, largest first."""


def find_boundaries(trace: Trace, *, from_events: bool = False) -> StepBoundaries:
    """Return the marked steps of a trace, compared with the events, or the detected steps where none are marked.

    Args:
        trace: a single-rank trace.
        from_events: return the detected steps even if steps are marked.
    """
    detected = detect_steps(trace)
    # Where some of the steps are missing, the events do not repeat from step to step.
    are_marked = steps_are_marked(trace)
    is_comparable = are_marked and not len(find_gaps(trace))
    marks = _compare_marks(trace, step_rows(trace).end_row, detected) if is_comparable else None
    rows = select_steps(trace, from_events=from_events)
    if are_marked and not from_events:
        return StepBoundaries("marks", rows, detected, marks)
    return StepBoundaries("events" if detected.num_steps else "none", rows, detected, marks)


def analyze_steps(trace: Trace, *, from_events: bool = False) -> StepAnalysis:
    """Return the steps of a single-rank trace, their stability and what differs between them.

    Args:
        trace: a single-rank trace.
        from_events: analyze the detected steps even if steps are marked.
    """
    boundaries = find_boundaries(trace, from_events=from_events)
    stability = measure_stability(trace, from_events=from_events)
    rows, has_steps = boundaries.rows, len(boundaries.rows.number) > 0
    confidence = 1.0 if boundaries.source == "marks" else boundaries.detected.confidence
    return StepAnalysis(
        source=boundaries.source,
        is_iterative=has_steps if trace.has_blocks else None,
        num_steps=len(rows.number),
        median_events=int(np.median(rows.end_row - rows.first_row)) if has_steps else None,
        median_duration_ns=int(np.median(rows.duration_ns)) if has_steps and trace.has_times else None,
        confidence=confidence if trace.has_blocks else None,
        method=boundaries.detected.method,
        marks=boundaries.marks,
        stability=MedianMatch(
            stability.num_warm_up_steps,
            stability.median_matching_events,
            stability.median_matching_bytes,
            stability.median_matching_blocks,
        ),
        allocation_fit=fit_allocations(trace, from_events=from_events),
        steps=_step_matches(trace, rows, from_events),
        differences=stability.differences,
    )


def _step_matches(trace: Trace, rows: StepRows, from_events: bool) -> tuple[StepMatch, ...]:
    stability = measure_stability(trace, from_events=from_events)
    warm_up = stability.num_warm_up_steps
    return tuple(
        StepMatch(
            step=int(rows.number[index]),
            start_ns=int(rows.start_ns[index]) if trace.has_times else None,
            duration_ns=int(rows.duration_ns[index]) if trace.has_times else None,
            first_event=int(rows.first_row[index]),
            end_event=int(rows.end_row[index]),
            matching_events=float(stability.matching_events[index]),
            matching_bytes=float(stability.matching_bytes[index]),
            matching_blocks=float(stability.matching_blocks[index]),
            is_unusual=index >= warm_up and bool(stability.matching_bytes[index] < MIN_MATCHING_BYTES),
        )
        for index in range(len(rows.number))
    )


def _compare_marks(trace: Trace, marked_ends: Array, detected: DetectedSteps) -> MarkAgreement:
    if not len(marked_ends) or not detected.num_steps:
        return MarkAgreement(0.0, None, None)
    kind = trace.columns("events", "kind")["kind"]
    is_free = (kind == KIND["free"]) | (kind == KIND["free_requested"])
    num_other_events = np.concatenate([[0], np.cumsum(~is_free)])
    marked, ends = num_other_events[marked_ends], num_other_events[detected.rows[1:]]
    after = np.minimum(np.searchsorted(ends, marked), len(ends) - 1)
    before = np.maximum(after - 1, 0)
    nearest = np.where(np.abs(ends[after] - marked) <= np.abs(ends[before] - marked), after, before)
    shifts, count = np.unique(ends[nearest] - marked, return_counts=True)
    most_common = np.lexsort((np.abs(shifts), -count))[0]
    return MarkAgreement(
        agreement=float(np.isin(marked, ends).mean()),
        shift_events=int(shifts[most_common]),
        shifted_agreement=float(count[most_common] / len(marked)),
    )
