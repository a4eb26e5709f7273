"""The steps after warm-up: those that look like the rest of the training run."""

from __future__ import annotations

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.thresholds import WARM_UP_STEPS
from memtrace.format.arrays import Array
from memtrace.trace import Trace


def has_warm_up(trace: Trace) -> bool:
    """Return whether the trace has enough steps to leave out those of the warm-up."""
    return len(step_rows(trace).number) > WARM_UP_STEPS + 1


def steps_after_warm_up(trace: Trace) -> Array:
    """Return the numbers of the steps after warm-up, or of all steps if the trace has too few."""
    steps = step_rows(trace).number
    return steps[WARM_UP_STEPS:] if has_warm_up(trace) else steps
