"""Object-level patterns of wasted memory: when a block is allocated although the program does not need it.

Each function takes blocks of one device and returns the intervals in which they could be absent. The patterns are
DrGPUM's (ASPLOS 2023). As in msMemScope, what counts is not the number of operators in between but what happened in
between: a late deallocation matters only if another block was allocated before the free.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from memtrace.analysis.attribution import KIND, step_rows
from memtrace.analysis.block_accesses import (
    find_initial_fills,
    group_accesses_by_block,
    last_needed_rows,
    number_operator_calls,
    operator_end_rows,
    operator_start_rows,
)
from memtrace.analysis.blocks import CATEGORY, Blocks, blocks
from memtrace.analysis.counterfactual import IdleIntervals, free_rows
from memtrace.format.arrays import Array
from memtrace.trace import Trace

MIN_IDLE_SHARE: Final = 0.1
"""A block is idle if no operator touches it for this share of the operator calls of a step (of the whole trace where
no steps are known)."""


def find_early_allocations(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the intervals from the allocation of a block to its first use in which another block was freed.

    Allocated later, the block could have used the memory of the freed block. An initial fill (zeros, random numbers)
    moves together with the allocation and is not a use.
    """
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    is_fill = find_initial_fills(trace)
    block = candidates[columns.alloc_event[candidates] >= 0]
    access, end_of_accesses = accesses.offset[block], accesses.offset[block + 1]
    # The initial fills of a block precede all its other accesses.
    while (skip := is_fill[np.minimum(access, len(is_fill) - 1)] & (access < end_of_accesses)).any():
        access = access + skip
    is_used = access < end_of_accesses
    block, access = block[is_used], access[is_used]
    allocating_op = trace.columns("events", "op_id")["op_id"][columns.alloc_event[block]]
    used_later = accesses.op[access] != allocating_op
    block, access = block[used_later], access[used_later]
    begin = columns.alloc_event[block]
    end = operator_start_rows(trace, accesses.event[access])
    num_frees = _events_before(trace, columns, block, "free")
    is_early = num_frees[np.maximum(end, 0)] > num_frees[begin + 1]
    return IdleIntervals(block[is_early], begin[is_early], end[is_early])


def find_late_deallocations(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the intervals from the last use of a block to its free in which another block was allocated.

    Blocks that are live at the end of the trace are left out: whether they are used later is unknown.
    """
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    block = candidates[(columns.free_event[candidates] >= 0) & (accesses.num_accesses(candidates) > 0)]
    begin, end = last_needed_rows(trace, block), columns.free_event[block]
    num_allocations = _events_before(trace, columns, block, "alloc")
    is_late = (end > begin) & (num_allocations[end] > num_allocations[np.minimum(begin + 1, end)])
    return IdleIntervals(block[is_late], begin[is_late], end[is_late])


def find_temporary_idleness(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the intervals between two uses of a block in which many operators run and none touches it."""
    accesses = group_accesses_by_block(trace)
    of_candidates = block_mask(trace, candidates)[accesses.block]
    same_block = of_candidates[1:] & (accesses.block[1:] == accesses.block[:-1])
    access = np.flatnonzero(same_block & ~find_initial_fills(trace)[:-1])
    num_calls = np.concatenate([[0], np.cumsum(_is_first_row_of_call(trace))])
    begin = operator_end_rows(trace, accesses.event[access])
    end = operator_start_rows(trace, accesses.event[access + 1])
    steps = step_rows(trace)
    has_steps = len(steps.number) > 0
    calls_per_step = (
        int(np.median(num_calls[steps.end_row] - num_calls[steps.first_row])) if has_steps else int(num_calls[-1])
    )
    idle_calls = num_calls[np.maximum(end, begin)] - num_calls[begin + 1]
    is_idle = (end > begin) & (idle_calls >= max(MIN_IDLE_SHARE * calls_per_step, 1))
    return IdleIntervals(accesses.block[access][is_idle], begin[is_idle], end[is_idle])


def find_unused_allocations(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the lifetimes of blocks that no operator reads and only the allocating operator writes.

    Only blocks whose use is known are checked: those allocated in the recording, and in a window of a trace those freed
    in it too. The workspace of an operator is left out, because its kernels use it through pointers that no
    observer sees.
    """
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    is_known = (columns.alloc_event[candidates] >= 0) & (columns.category[candidates] != CATEGORY["workspace"])
    if trace.surroundings is not None:
        is_known &= columns.free_event[candidates] >= 0
    candidates = candidates[is_known]
    op = trace.columns("events", "op_id")["op_id"]
    allocating_op = op[columns.alloc_event]
    is_used = np.zeros(len(columns), bool)
    is_used[accesses.block[accesses.is_read | (accesses.op != allocating_op[accesses.block])]] = True
    block = candidates[~is_used[candidates]]
    return IdleIntervals(block, columns.alloc_event[block], free_rows(columns, block))


def find_redundant_allocations(trace: Trace, candidates: Array) -> tuple[IdleIntervals, Array]:
    """Return the intervals in which a block could have used the memory of a block of the same size.

    That block, the donor, is already used for the last time when the other block is allocated, but it is freed later.
    A donor serves one block only.

    Returns:
        The intervals, and the donor of each.
    """
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    is_accessed = accesses.num_accesses(candidates) > 0
    donors = candidates[(columns.free_event[candidates] >= 0) & is_accessed]
    takers = candidates[(columns.alloc_event[candidates] >= 0) & is_accessed]
    # Sorted by size and then by time, a donor comes right before the taker that it serves.
    size = np.concatenate([columns.size[donors], columns.size[takers]])
    available = last_needed_rows(trace, donors, allow_in_place=True)
    row = np.concatenate([available, columns.alloc_event[takers]])
    order = np.lexsort((row, size))
    is_taker = order >= len(donors)
    follows_donor = np.zeros(len(order), bool)
    follows_donor[1:] = is_taker[1:] & ~is_taker[:-1] & (size[order][1:] == size[order][:-1])
    position = np.flatnonzero(follows_donor)
    taker, donor = takers[order[position] - len(donors)], donors[order[position - 1]]
    begin, end = columns.alloc_event[taker], np.minimum(columns.free_event[donor], free_rows(columns, taker))
    overlaps = (end > begin) & (taker != donor)
    return IdleIntervals(taker[overlaps], begin[overlaps], end[overlaps]), donor[overlaps]


def find_dead_writes(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return an empty interval at each write that overwrites data which was never read.

    The block itself is needed, so a dead write wastes time and bandwidth but lowers no peak.
    """
    accesses = group_accesses_by_block(trace)
    of_candidates = block_mask(trace, candidates)[accesses.block]
    same_block = of_candidates[1:] & (accesses.block[1:] == accesses.block[:-1])
    by_another_op = accesses.op[1:] != accesses.op[:-1]
    first_write = np.flatnonzero(same_block & by_another_op & ~accesses.is_read[:-1] & ~accesses.is_read[1:])
    second_write_row = accesses.event[first_write + 1]
    return IdleIntervals(accesses.block[first_write], second_write_row, second_write_row)


def block_mask(trace: Trace, chosen: Array) -> Array:
    """Return for each block of the trace whether it is one of ``chosen``."""
    mask = np.zeros(len(blocks(trace)), bool)
    mask[chosen] = True
    return mask


def _events_before(trace: Trace, columns: Blocks, block: Array, kind: str) -> Array:
    """Return for each row how many events of a kind precede it on the device of ``block``."""
    device = int(columns.device[block[0]]) if len(block) else -1
    return trace.cached(_count_events_before, kind, device)


def _count_events_before(trace: Trace, kind: str, device: int) -> Array:
    events = trace.columns("events", "kind", "device")
    return np.concatenate([[0], np.cumsum((events["kind"] == KIND[kind]) & (events["device"] == device))])


def _is_first_row_of_call(trace: Trace) -> Array:
    is_first = np.zeros(trace.num_rows("events"), bool)
    rows = number_operator_calls(trace).first
    is_first[rows[rows >= 0]] = True
    return is_first
