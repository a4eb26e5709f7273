"""Gradient synchronization of a recorded pipeline: when each rank all-reduces gradients, and how long it waits.

An asynchronous all-reduce ends without an operator that could be recorded. What bounds its end is the first operator
that uses a reduced gradient afterwards, usually the optimizer: a correct program has waited by then. A synchronization
is therefore shown from its first launch to this use; the all-reduce itself may have ended earlier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.attribution import KIND, op_column
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.format.arrays import Array
from memtrace.pipeline.recorded import RankActions, action_of_rows
from memtrace.trace import Trace

REDUCTIONS: Final = ("c10d::allreduce", "c10d::_allreduce", "c10d::reduce_scatter", "c10d::_reduce_scatter",
                     "_c10d_functional::all_reduce", "_c10d_functional::reduce_scatter")  # fmt: skip
"""Prefixes of the operators that reduce tensors over ranks."""


@dataclass(frozen=True)
class GradientSync:
    """The reductions of the gradients of one stage by one rank in one step of the pipeline."""

    stage: int | None
    """None where the gradients belong to no action of the rank."""
    step: int
    num_reductions: int
    start_ns: int
    """First launch, on the clock of the reference rank, as ``end_ns``."""
    end_ns: int
    """First use of a reduced gradient; where none was recorded, the end of the last launch."""
    is_end_known: bool
    """Whether a use of a reduced gradient was recorded."""


def gradient_syncs(trace: Trace, rank: RankActions) -> list[GradientSync]:
    """The gradient synchronizations of a single-rank trace, by start; empty without accesses or reductions.

    Source: events (reads and writes of reduction operators), blocks of category gradient.
    """
    events = trace.columns("events", "kind", "block_id", "op_id", "time_ns")
    accesses = np.flatnonzero(
        ((events["kind"] == KIND["read"]) | (events["kind"] == KIND["write"]))
        & (events["block_id"] >= 0)
        & (events["op_id"] >= 0)
    )
    block, operator = events["block_id"][accesses], events["op_id"][accesses]
    names = op_column(trace, operator, "name")
    reductions = [
        name for name in map(int, np.unique(names)) if (trace.name(name) or "").startswith(REDUCTIONS) and name >= 0
    ]
    of_rank = blocks(trace)
    is_gradient = of_rank.category[block] == CATEGORY["gradient"]
    is_reduction = np.isin(names, reductions)
    reduced = np.flatnonzero(is_reduction & is_gradient)
    if not len(reduced):
        return []
    # The last backward of the stage precedes its reductions.
    place = np.maximum(np.searchsorted(rank.start_row, accesses[reduced], side="right") - 1, 0)
    action = action_of_rows(rank, of_rank.alloc_event[block[reduced]])
    stages = np.array([each.stage for each in rank.actions])
    stage = np.where(action >= 0, stages[np.maximum(action, 0)], stages[place[0]] if len(set(stages)) == 1 else -1)
    used = _next_uses(block, ~is_reduction, reduced)
    syncs = []
    for step, number in np.unique(np.stack([rank.step[place], stage], axis=1), axis=0).tolist():
        chosen = (rank.step[place] == step) & (stage == number)
        times = events["time_ns"][accesses[reduced[chosen]]]
        uses = used[chosen][used[chosen] >= 0]
        last = int(times.max())
        end = max(last, int(events["time_ns"][accesses[uses]].min())) if len(uses) else last
        num_reductions = len(np.unique(operator[reduced[chosen]]))
        begin = int(times.min()) + rank.clock_shift_ns
        stage_or_none = number if number >= 0 else None
        syncs.append(
            GradientSync(stage_or_none, step, num_reductions, begin, end + rank.clock_shift_ns, bool(len(uses)))
        )
    return sorted(syncs, key=lambda sync: sync.start_ns)


def _next_uses(block: Array, is_use: Array, reduced: Array) -> Array:
    """For each entry of ``reduced`` the next access of the same block for which ``is_use`` holds; -1 without one."""
    uses = np.flatnonzero(is_use & np.isin(block, block[reduced]))
    order = np.lexsort((uses, block[uses]))
    keys = np.stack([block[uses][order], uses[order]], axis=1)
    found = np.full(len(reduced), -1, dtype=np.int64)
    if len(keys):
        # Blocks and places as one number, so that one search finds the next place of the same block.
        span = len(block) + 1
        flat = keys[:, 0].astype(np.int64) * span + keys[:, 1]
        place = np.searchsorted(flat, block[reduced].astype(np.int64) * span + reduced)
        inside = np.minimum(place, len(flat) - 1)
        same = (place < len(flat)) & (keys[inside, 0] == block[reduced])
        found = np.where(same, keys[inside, 1], -1)
    return found


def sync_time_ns(syncs: list[GradientSync], step: int, busy_until_ns: int) -> tuple[int, int] | None:
    """Time that a rank synchronizes in a step, and the part of it after ``busy_until_ns``; None without syncs.

    Overlapping synchronizations count once.
    """
    chosen = sorted((sync.start_ns, sync.end_ns) for sync in syncs if sync.step == step)
    if not chosen:
        return None
    total, exposed, reached = 0, 0, chosen[0][0]
    for start, end in chosen:
        begin = max(start, reached)
        total += max(0, end - begin)
        exposed += max(0, end - max(begin, busy_until_ns))
        reached = max(end, reached)
    return total, exposed
