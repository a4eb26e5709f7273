"""Where steps may end among allocations: after the optimizer, which follows the last backward pass of a step."""

from __future__ import annotations

import numpy as np

from memtrace.analysis.event_codes import PHASE
from memtrace.analysis.operators import op_column
from memtrace.analysis.optimizers import find_optimizer_bursts
from memtrace.analysis.thresholds import (
    CONFIDENCE_MAYBE_LAYERS,
    CONFIDENCE_SEVERAL_BACKWARDS,
    CONFIDENCE_WITH_BACKWARD,
    CONFIDENCE_WITHOUT_BACKWARD,
)
from memtrace.format.arrays import Array
from memtrace.trace import Trace


class BackwardPasses:
    """The backward passes, optimizer steps and beginnings of steps of a trace, where operators and stacks show them.

    Args:
        trace: a single-rank trace.
        rows: rows of events of all allocations, ascending.
        site: the site of each of these rows, see ``allocation_sites``.
    """

    def __init__(self, trace: Trace, rows: Array, site: Array) -> None:
        op = trace.columns("events", "op_id")["op_id"][rows]
        self._optimizer_steps = find_optimizer_bursts(trace)
        in_backward = op_column(trace, op, "phase") == PHASE["backward"]
        self._backward_rows = rows[in_backward]
        self._in_module = op_column(trace, op, "module") >= 0
        self._has_site = site > 0
        # A step begins with the sites that the trace holds before its first backward pass.
        is_first = rows < self._backward_rows[0] if len(self._backward_rows) else np.zeros(len(rows), bool)
        forward = self._has_site & ~in_backward
        begins = np.isin(site[forward], site[is_first & self._has_site])
        # An optimizer shares single operators with the forward pass, but not several in a row.
        in_a_row = begins & np.append(begins[1:], True) & np.append(begins[2:], [True, True])[: len(begins)]
        self._step_begins = rows[forward][in_a_row]

    def move_behind_optimizer(self, ends: Array) -> Array:
        """Return memory minima moved to the first allocation after the preceding backward pass that can begin a step.

        The minimum alone is imprecise: gradients may be freed later than that, and the next batch loaded earlier.
        """
        if not len(self._backward_rows) or not len(self._step_begins):
            return ends
        last = np.searchsorted(self._backward_rows, ends) - 1
        ends, last = ends[last >= 0], last[last >= 0]
        after = np.searchsorted(self._step_begins, self._backward_rows[last])
        known = after < len(self._step_begins)
        return np.unique(np.where(known, self._step_begins[np.minimum(after, len(self._step_begins) - 1)], ends))

    def confidence_factor(self, ends: Array, is_regular: Array) -> float:
        """Return how plausible boundaries are as the ends of steps, from 0 to 1.

        Args:
            ends: boundaries as rows of events, ascending.
            is_regular: whether each allocation belongs to the repeating symbols.
        """
        steps = self._optimizer_steps
        step = np.searchsorted(steps.first, ends, side="right") - 1
        cuts_optimizer = (step >= 0) & (ends < np.append(steps.end, 0)[step])
        if 2 * cuts_optimizer.sum() > len(ends):
            return 0.0
        if len(self._backward_rows):
            return self._factor_by_passes(ends)
        if self._has_site[is_regular].any() and not self._in_module[is_regular].any():
            return CONFIDENCE_MAYBE_LAYERS
        return CONFIDENCE_WITHOUT_BACKWARD

    def _factor_by_passes(self, ends: Array) -> float:
        """Return the confidence factor by the number of backward passes in each step; 0 where most have none."""
        # The first backward allocation after the beginning of a step stands for its pass. Where beginnings are
        # unknown, every backward allocation counts.
        after = np.unique(np.searchsorted(self._backward_rows, self._step_begins))
        passes = self._backward_rows[after[after < len(self._backward_rows)]] if len(after) else self._backward_rows
        num_passes = np.diff(np.searchsorted(passes, ends))
        if 2 * (num_passes > 0).sum() < len(num_passes):
            return 0.0
        has_one = not len(after) or 2 * (num_passes > 1).sum() <= len(num_passes)
        return CONFIDENCE_WITH_BACKWARD if has_one else CONFIDENCE_SEVERAL_BACKWARDS
