"""The timeline of a step that accumulates gradients over several micro-batches."""

from __future__ import annotations

import numpy as np

from memtrace.format.arrays import Array
from memtrace.planning.timeline import TICKS_PER_ROW, Timeline


def accumulate(timeline: Timeline, num_microbatches: int) -> Timeline:
    """Return the timeline of the last of several micro-batches into which the recorded batch is split.

    From the second micro-batch on, the gradients of those before are there from the start, and each new contribution is
    a temporary until it has been added.
    """
    if num_microbatches == 1:
        return timeline
    split = timeline.scale_batch(1 / num_microbatches)
    is_gradient = split.of_category("gradient")
    is_new = is_gradient & (split.begin >= split.start)
    # What the step before left behind is freed by zero_grad, before the first micro-batch.
    is_old = is_gradient & ~is_new & (split.end < split.stop) & is_new.any()
    begin, size = split.begin[is_new], split.size[is_new]
    added = split.begin[is_new] + _until_next(split.begin[is_new]) + TICKS_PER_ROW
    kept = split.extend(is_new, begin=split.start).remove(is_old)
    return kept.insert(size, begin, added, "temporary")


def _until_next(begin: Array) -> Array:
    """Return how long each contribution lives: until the gradient after it is computed, at most some events.

    Autograd adds a contribution as soon as its operator has returned.
    """
    order = np.argsort(begin, kind="stable")
    gap = np.full(len(begin), 2 * TICKS_PER_ROW, np.int64)
    if len(begin) > 1:
        gap[order[:-1]] = np.minimum(np.diff(begin[order]), 2 * TICKS_PER_ROW)
    return gap
