"""The result of step detection, and what makes a sequence of boundaries plausible as steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from memtrace.analysis.detection.similarity import StepSimilarity
from memtrace.analysis.thresholds import (
    LAST_STEP_RATIOS,
    MAX_FIRST_STEP_RATIO,
    MAX_STEP_LENGTH_RATIO,
    MIN_COVERED_SHARE,
    MIN_FIRST_STEP_SHARE,
    MIN_REUSE,
)
from memtrace.format.arrays import Array

Method = Literal["updates", "allocations", "none"]


@dataclass(frozen=True)
class DetectedSteps:
    """Steps detected in the events of a trace: step k covers the rows [rows[k], rows[k + 1]) of ``events``."""

    rows: Array
    """Boundaries, ascending; empty where nothing repeats or confidence is below ``MIN_CONFIDENCE``."""
    confidence: float
    """Agreement of the symbols of the cycle times the median similarity of neighbouring steps, from 0 to 1."""
    method: Method
    """What repeats: parameter ``updates``, ``allocations``, or ``none``."""

    @property
    def num_steps(self) -> int:
        """Number of complete steps."""
        return max(len(self.rows) - 1, 0)

    @property
    def period_events(self) -> int | None:
        """Median number of events of a step; None where no steps were detected."""
        return int(np.median(np.diff(self.rows))) if self.num_steps else None


NO_STEPS: Final = DetectedSteps(np.empty(0, np.int64), 0.0, "none")


def rate_updates(similarity: StepSimilarity, ends: Array, agreement: float, method: Method) -> DetectedSteps:
    """Return the steps between the ends of optimizer steps, with their confidence.

    Args:
        similarity: compares neighbouring steps.
        ends: rows of events at which optimizer steps end, ascending.
        agreement: share of cycles in which the repeating symbols occur once, from 0 to 1.
        method: what repeats.
    """
    if len(ends) < 2:
        return NO_STEPS
    rows = _with_first_step(ends)
    return _rated(similarity, rows, agreement, _covered_share(similarity, rows), method)


def rate_memory_minima(similarity: StepSimilarity, ends: Array, agreement: float) -> DetectedSteps:
    """Return the steps between minima of live memory, with their confidence.

    Minima are weaker evidence than updates, because the layers of one step have a cycle of their own (in backward, for
    example). Confidence is therefore 0 where the steps cover less than half of the events or share too few blocks.

    Args:
        similarity: compares neighbouring steps.
        ends: rows of events at which cycles end, ascending.
        agreement: share of cycles in which the repeating symbols occur once, from 0 to 1.
    """
    if len(ends) < 2:
        return NO_STEPS
    rows = _with_last_step(_with_first_step(ends), ends, similarity.num_events)
    covered = _covered_share(similarity, rows)
    length = np.diff(rows)
    regular = length <= MAX_STEP_LENGTH_RATIO * np.median(length)
    covered *= float(length[regular].sum() / max(length.sum(), 1))
    if covered < MIN_COVERED_SHARE or similarity.median_reuse(rows) < MIN_REUSE:
        covered = 0.0
    return _rated(similarity, rows, agreement, covered, "allocations")


def _rated(similarity: StepSimilarity, rows: Array, agreement: float, covered: float, method: Method) -> DetectedSteps:
    confidence = agreement * similarity.median_similarity(rows) * min(1.0, covered / MIN_COVERED_SHARE)
    return DetectedSteps(rows, round(confidence, 4), method)


def _covered_share(similarity: StepSimilarity, rows: Array) -> float:
    return float(rows[-1] - rows[0]) / similarity.num_events


def _with_first_step(ends: Array) -> Array:
    """Prepend a boundary where enough events precede the first end for a step of their own.

    The step begins with the trace, or a median step before its end where the events before it hold set-up work too.
    """
    median = float(np.median(np.diff(ends)))
    if ends[0] < MIN_FIRST_STEP_SHARE * min(median, *np.diff(ends[:2])):
        return ends
    start = 0 if ends[0] <= MAX_FIRST_STEP_RATIO * median else ends[0] - int(median)
    return np.concatenate([[start], ends])


def _with_last_step(rows: Array, ends: Array, num_events: int) -> Array:
    """Append the end of the trace where the events after the last boundary are about as many as in a step."""
    median, (shortest, longest) = float(np.median(np.diff(ends))), LAST_STEP_RATIOS
    return np.append(rows, num_events) if shortest * median <= num_events - ends[-1] <= longest * median else rows
