"""Step detection from the events alone, without marks.

Three signals are tried in turn until one is convincing:

1. Optimizer stacks: a step ends with the last allocation that the optimizer made (``memtrace.analysis.optimizers``).
2. Parameter updates, where reads and writes were recorded (``updates``).
3. Allocations that repeat by site, size and lifetime (``allocations``).

All of them take O(n log n) time in the number of events.
"""

from __future__ import annotations

from memtrace.analysis.detection.allocations import detect_from_allocations
from memtrace.analysis.detection.lifetimes import RowLifetimes, row_lifetimes
from memtrace.analysis.detection.similarity import StepSimilarity
from memtrace.analysis.detection.steps import NO_STEPS, DetectedSteps, rate_updates
from memtrace.analysis.detection.updates import detect_from_updates
from memtrace.analysis.optimizers import find_optimizer_bursts, find_step_ends
from memtrace.analysis.thresholds import MIN_CONFIDENCE, MIN_CYCLE_STARTS
from memtrace.trace import Trace

__all__ = ["DetectedSteps", "detect_steps"]


def detect_steps(trace: Trace) -> DetectedSteps:
    """Return the steps of a single-rank trace as its events show them; step marks are ignored.

    Returns ``NO_STEPS`` for files that hold totals by category: what repeats in them are totals, not blocks.
    """
    return trace.cached(_detect_steps) if trace.has_blocks else NO_STEPS


def _detect_steps(trace: Trace) -> DetectedSteps:
    lifetimes = row_lifetimes(trace)
    similarity = StepSimilarity(trace, lifetimes)
    detectors = [_detect_from_optimizers, detect_from_updates]
    if similarity.has_accesses and not find_optimizer_bursts(trace).is_periodic:
        # Updates show more precisely where an optimizer ends that does not repeat its operators per parameter.
        detectors.reverse()
    detectors.append(detect_from_allocations)
    candidates = []
    for detect in detectors:
        candidates.append(detect(trace, lifetimes, similarity))
        if candidates[-1].confidence >= MIN_CONFIDENCE:
            return candidates[-1]
    return DetectedSteps(NO_STEPS.rows, max(item.confidence for item in candidates), "none")


def _detect_from_optimizers(trace: Trace, _: RowLifetimes, similarity: StepSimilarity) -> DetectedSteps:
    ends = find_step_ends(find_optimizer_bursts(trace))
    if len(ends) < MIN_CYCLE_STARTS:
        return NO_STEPS
    return rate_updates(similarity, ends, 1.0, "updates" if similarity.has_accesses else "allocations")
