"""How similar neighbouring steps are, and the allocation sites by which they are compared."""

from __future__ import annotations

import numpy as np

from memtrace.analysis.detection.lifetimes import RowLifetimes
from memtrace.analysis.event_codes import KIND
from memtrace.analysis.operators import op_column
from memtrace.format.arrays import Array
from memtrace.trace import Trace

_KIND_CODES = 16
"""More than the number of event kinds: a site and a kind make one symbol."""


def allocation_sites(trace: Trace, rows: Array) -> Array:
    """Return a number for the site of each row of events; 0 where nothing of it is known.

    A site is the stack, module and name of the operator. The module distinguishes the layers that a single line calls,
    so that layers are not mistaken for steps.
    """
    op = trace.columns("events", "op_id")["op_id"][rows]
    site = np.zeros(len(rows), np.int64)
    for column in ("stack", "module", "name"):
        code = op_column(trace, op, column).astype(np.int64) + 1
        site = site * (int(code.max(initial=0)) + 1) + code
    return site


class StepSimilarity:
    """Compares neighbouring steps by the sites of their allocations and writes, and by the blocks they touch."""

    def __init__(self, trace: Trace, lifetimes: RowLifetimes) -> None:
        kind = trace.columns("events", "kind")["kind"]
        self.num_events = len(kind)
        self.has_accesses = bool((kind == KIND["write"]).any())
        self._trace, self._lifetimes = trace, lifetimes
        self._rows = np.flatnonzero((kind == KIND["alloc"]) | (kind == KIND["write"]))
        site = allocation_sites(trace, self._rows)
        self._symbol = np.unique(site * _KIND_CODES + kind[self._rows], return_inverse=True)[1]
        if not len(self._symbol) or self._symbol.max() <= 1:  # without sites only sizes are left to compare
            size = trace.columns("events", "size")["size"][self._rows]
            self._symbol = np.unique(size, return_inverse=True)[1]

    def median_similarity(self, bounds: Array) -> float:
        """Return the median over steps of the similarity to the more similar neighbour, from 0 to 1.

        The similarity of two steps is the share of allocations and writes, by site, that both have.
        """
        num_steps = len(bounds) - 1
        if num_steps < 2:
            return 0.0
        step = np.searchsorted(bounds, self._rows, side="right") - 1
        inside = (step >= 0) & (step < num_steps)
        key = self._symbol[inside].astype(np.int64) * (num_steps + 1) + step[inside]
        keys, count = np.unique(key, return_counts=True)
        total = np.maximum(np.bincount(step[inside], minlength=num_steps), 1)
        in_next = np.flatnonzero(np.diff(keys) == 1)
        common = np.minimum(count[in_next], count[in_next + 1])
        shared = np.bincount(keys[in_next] % (num_steps + 1), weights=common, minlength=num_steps)[: num_steps - 1]
        similarity = shared / np.maximum(total[:-1], total[1:])
        return float(np.median(np.maximum(np.append(similarity, 0), np.append(0, similarity))))

    def median_reuse(self, bounds: Array) -> float:
        """Return the median over steps of the share of older blocks that the step before touched or allocated too.

        Steps share the weights; a loop over layers or parameters moves on to others. 1 without accesses.
        """
        kind, block = (self._trace.columns("events", "kind", "block_id")[name] for name in ("kind", "block_id"))
        rows = np.flatnonzero((kind == KIND["alloc"]) | (kind == KIND["read"]) | (kind == KIND["write"]))
        rows = rows[(rows >= bounds[0]) & (rows < bounds[-1])]
        if (kind[rows] == KIND["alloc"]).all():
            return 1.0
        rows = rows[np.argsort(block[rows], kind="stable")]
        step, touched = np.searchsorted(bounds, rows, side="right") - 1, block[rows]
        same_block = np.append(False, touched[1:] == touched[:-1])
        steps_since = np.where(same_block, np.diff(step, prepend=0), -1)
        older = ~self._lifetimes.is_allocated[touched] | (self._lifetimes.begin[touched] < bounds[step])
        num_steps = len(bounds) - 1
        num_touched = np.bincount(step[older & (steps_since != 0)], minlength=num_steps)[1:]
        num_reused = np.bincount(step[older & (steps_since == 1)], minlength=num_steps)[1:]
        known = num_touched > 0
        return float(np.median(num_reused[known] / num_touched[known])) if known.any() else 1.0
