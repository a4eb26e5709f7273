"""Step detection from parameter updates.

The same long-lived blocks are read and written in place once per step by operators that allocate nothing: that is what
an optimizer does to parameters. A step ends with the last of these updates.
"""

from __future__ import annotations

import numpy as np

from memtrace.analysis.detection.lifetimes import RowLifetimes
from memtrace.analysis.detection.similarity import StepSimilarity
from memtrace.analysis.detection.steps import NO_STEPS, DetectedSteps, rate_updates
from memtrace.analysis.event_codes import KIND, PHASE
from memtrace.analysis.operators import op_column
from memtrace.analysis.periodicity import Periodicity, find_periodicities
from memtrace.analysis.thresholds import (
    MAX_COUNTER_BYTES,
    MIN_CYCLE_STARTS,
    MIN_PARAMETER_LIFETIME_SHARE,
    MIN_PAUSE_SHARE,
    MIN_READS_PER_UPDATE,
)
from memtrace.format.arrays import Array
from memtrace.trace import Trace


def detect_from_updates(trace: Trace, lifetimes: RowLifetimes, similarity: StepSimilarity) -> DetectedSteps:
    """Return the steps that end after the last update of each cycle; ``NO_STEPS`` where updates do not repeat."""
    rows = _update_rows(trace, lifetimes)
    if len(rows) < MIN_CYCLE_STARTS:
        return NO_STEPS
    events = trace.columns("events", "block_id", "op_id")
    block = events["block_id"][rows].astype(np.int64)
    name = op_column(trace, events["op_id"][rows], "name").astype(np.int64) + 1
    num_names = int(name.max()) + 1
    keys, symbol = np.unique(block * num_names + name, return_inverse=True)
    size = lifetimes.size[keys // num_names].astype(np.float64)
    periodicities = find_periodicities(symbol, rows, size)
    if not periodicities or len(periodicities[0].starts) < MIN_CYCLE_STARTS:
        return NO_STEPS
    periodicity = periodicities[0]
    regular = np.isin(symbol, periodicity.symbols)
    ends = _update_ends(symbol[regular], rows[regular], periodicity)
    return rate_updates(similarity, ends, periodicity.agreement, "updates")


def _update_rows(trace: Trace, lifetimes: RowLifetimes) -> Array:
    """Return the rows that write a long-lived block in place, by operators that read the block and allocate nothing.

    Operators of backward are left out, because they accumulate gradients. Blocks of the size of a counter are included
    where operators other than updates read them: they read the parameters of a narrow last layer, but not counters.
    """
    events = trace.columns("events", "kind", "block_id", "op_id")
    kind, block, op = events["kind"], events["block_id"], events["op_id"]
    is_long_lived = lifetimes.end - lifetimes.begin >= MIN_PARAMETER_LIFETIME_SHARE * len(kind)
    writes = np.flatnonzero((kind == KIND["write"]) & (op >= 0))
    writes = writes[is_long_lived[block[writes]]]
    if not len(writes):
        return writes
    allocates = np.zeros(int(op.max()) + 1, bool)
    allocates[op[(kind == KIND["alloc"]) & (op >= 0)]] = True
    writes = writes[~allocates[op[writes]]]
    writes = writes[op_column(trace, op[writes], "phase") != PHASE["backward"]]
    reads = np.flatnonzero((kind == KIND["read"]) & (op >= 0))
    reads = reads[is_long_lived[block[reads]]]
    num_blocks = len(lifetimes.size)
    num_reads = np.bincount(block[reads], minlength=num_blocks)
    reads = reads[~allocates[op[reads]]]
    read_by_op = op[reads].astype(np.int64) * num_blocks + block[reads]
    updates: Array = writes[np.isin(op[writes].astype(np.int64) * num_blocks + block[writes], read_by_op)]
    num_updates = np.bincount(block[updates], minlength=num_blocks)
    is_parameter = lifetimes.size > MAX_COUNTER_BYTES
    is_parameter |= num_reads - num_updates >= MIN_READS_PER_UPDATE * num_updates
    return updates[is_parameter[block[updates]]]


def _update_ends(symbol: Array, rows: Array, periodicity: Periodicity) -> Array:
    """Return the row after the last update of each cycle: the one before the longest pause.

    Where several pauses are long (two optimizers that alternate), the cycle ends before the updates that come first in
    the trace.
    """
    starts = periodicity.starts
    cycle = np.searchsorted(starts, rows, side="right") - 1
    inside = (cycle >= 0) & (cycle < len(starts) - 1)
    length = np.diff(starts)
    offset = (rows[inside] - starts[cycle[inside]]) / length[cycle[inside]]
    symbols, local = np.unique(symbol[inside], return_inverse=True)
    order = np.lexsort((offset, local))
    first = np.searchsorted(local[order], np.arange(len(symbols)))
    median_offset = offset[order][first + np.bincount(local) // 2]
    by_offset = np.argsort(median_offset, kind="stable")
    pause = np.diff(np.append(median_offset[by_offset], median_offset[by_offset][0] + 1))
    long_pauses = np.flatnonzero(pause >= MIN_PAUSE_SHARE * pause.max())
    first_row = np.full(int(symbol.max()) + 1, len(rows))
    first_row[symbol[::-1]] = rows[::-1]
    next_symbol = symbols[by_offset[(long_pauses + 1) % len(by_offset)]]
    last_symbol = symbols[by_offset[long_pauses[np.argmin(first_row[next_symbol])]]]
    ends: Array = rows[symbol == last_symbol] + 1
    return ends
