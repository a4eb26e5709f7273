"""Object-level patterns of wasted memory: when a block is allocated although the program does not need it.

Each function takes blocks of one device and returns the intervals in which they could be absent. The patterns are
DrGPUM's (ASPLOS 2023). As in msMemScope, what counts is not the number of operators in between but what happened in
between: a late deallocation matters only if another block was allocated before the free.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, op_column, phase_rows, step_rows
from memtrace.analysis.block_accesses import (
    find_initial_fills,
    group_accesses_by_block,
    number_operator_calls,
    operator_end_rows,
    operator_start_rows,
)
from memtrace.analysis.block_signatures import row_codes
from memtrace.analysis.blocks import CATEGORY, Blocks, allocating_op, blocks
from memtrace.analysis.counterfactual import END_OF_TRACE, IdleIntervals, free_rows
from memtrace.analysis.held_arguments import find_release_rows
from memtrace.analysis.statements import end_of_last_statement
from memtrace.analysis.thresholds import MAX_OPS_OF_CALL, MIN_IDLE_SHARE
from memtrace.format.arrays import Array
from memtrace.trace import Trace

_OWNED: Final = tuple(CATEGORY[name] for name in ("parameter", "gradient", "optimizer_state", "input"))
"""Categories of memory that belongs to a module, an optimizer or a data loader."""


def find_early_allocations(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the intervals from the allocation of a block to its first use in which another block was freed.

    Allocated later, the block could have used the memory of the freed block. An initial fill (zeros, random numbers)
    moves together with the allocation and is not a use. Where a variable held the block of the step before until it was
    assigned this one, it would only hold that block for longer.
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
    is_early &= ~_replaces_block(trace, block, end)
    return IdleIntervals(block[is_early], begin[is_early], end[is_early])


def _replaces_block(trace: Trace, block: Array, end: Array) -> Array:
    """Return whether a block of the same stack and size is freed after each block is allocated and before ``end``."""
    columns = blocks(trace)
    freed = np.flatnonzero((columns.free_event >= 0) & (columns.alloc_event >= 0))
    group = row_codes(
        np.concatenate([columns.stack[freed], columns.stack[block]]),
        np.concatenate([columns.size[freed], columns.size[block]]),
    )
    scale = trace.num_rows("events") + 1
    frees = np.sort(group[: len(freed)] * scale + columns.free_event[freed])
    of_block = group[len(freed) :] * scale
    num_frees = np.searchsorted(frees, of_block + end) - np.searchsorted(frees, of_block + columns.alloc_event[block])
    return np.asarray(num_frees > 0)


def find_late_deallocations(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the intervals from the last use of a block to its free in which another block was allocated.

    Only references that the program can drop count: what is freed in backward or by an optimizer was held by autograd
    or by the optimizer, and the caller holds an argument of a module until the module returns.

    A block that is live at the end of the trace may be used later. It counts if all earlier blocks of its allocation
    site and size were freed late: the last step of a script holds its variables for as long as the script runs.
    """
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    block = candidates[accesses.num_accesses(candidates) > 0]
    begin, end = find_release_rows(trace, block), free_rows(columns, block)
    num_allocations = _events_before(trace, columns, block, "alloc")
    last_row = len(num_allocations) - 1
    before_free = num_allocations[np.minimum(end, last_row)]
    is_late = (end > begin) & (before_free > num_allocations[np.minimum(np.minimum(begin + 1, end), last_row)])
    is_freed = end < END_OF_TRACE
    is_late &= ~is_freed | ~_is_held_by_torch(trace, np.minimum(end, last_row))
    is_late &= is_freed | _follows_late_blocks(trace, block, is_freed, is_late)
    return IdleIntervals(block[is_late], begin[is_late], end[is_late])


def select_droppable(trace: Trace, late: IdleIntervals) -> IdleIntervals:
    """Return those late deallocations whose last use the program can tell, from the end of its statement.

    A block that is used in later steps than its own is an element of a data set or a buffer. The program knows its last
    use only if all blocks of its allocation site and size are used for equally many steps, and not in the last step of
    the trace, which may not be the last one of the program. What a graph frees after its backward has run is held by
    the graph (``retain_graph=True``), not by a variable.
    """
    late = late.select(~_is_used_unpredictably(trace, late.block) & ~_is_freed_with_graph(trace, late.block))
    begin = np.maximum(late.begin, end_of_last_statement(trace, late.block))
    return IdleIntervals(late.block, begin, late.end).select(begin < late.end)


def find_graphs_kept_after_backward(trace: Trace, late: IdleIntervals) -> IdleIntervals:
    """Return those late deallocations that a graph causes which is still alive after its backward (retain_graph=True).

    Args:
        trace: the trace of one rank.
        late: late deallocations.
    """
    return late.select(_is_freed_with_graph(trace, late.block))


def _is_used_unpredictably(trace: Trace, block: Array) -> Array:
    """Return whether the number of steps for which blocks of each block's stack and size are used varies."""
    columns, accesses, steps = blocks(trace), group_accesses_by_block(trace), step_rows(trace)
    if not len(steps.number):
        return np.zeros(len(block), bool)
    used = np.flatnonzero(accesses.num_accesses(np.arange(len(columns))) > 0)
    last_step = steps.of_rows(accesses.event[accesses.offset[used + 1] - 1])
    num_steps = last_step - columns.step[used]
    group = row_codes(columns.stack[used], columns.size[used])
    lowest, highest = np.full(int(group.max(initial=0)) + 1, END_OF_TRACE), np.full(int(group.max(initial=0)) + 1, -1)
    np.minimum.at(lowest, group, num_steps)
    np.maximum.at(highest, group, num_steps)
    is_unpredictable = np.zeros(len(columns), bool)
    is_unpredictable[used] = (num_steps > 0) & ((lowest < highest)[group] | (last_step >= steps.number[-1]))
    return np.asarray(is_unpredictable[block])


def _is_freed_with_graph(trace: Trace, block: Array) -> Array:
    """Return whether a graph holds each block longer than its backward needs it.

    Backward uses the block last, and it is freed later together with memory that no variable can hold: results that
    one operator of a call passes on to the next (those of ``log_softmax`` in ``cross_entropy``).
    """
    columns, accesses, kind = blocks(trace), group_accesses_by_block(trace), trace.columns("events", "kind")["kind"]
    freed = np.flatnonzero((columns.free_event >= 0) & (accesses.num_accesses(np.arange(len(columns))) > 0))
    last_op = accesses.op[accesses.offset[freed + 1] - 1]
    freed = freed[op_column(trace, last_op, "phase") == PHASE["backward"]]
    burst = np.cumsum(kind != KIND["free"])[columns.free_event[freed]]
    of_graph = np.zeros(len(columns), bool)
    of_graph[freed] = np.isin(burst, burst[_is_passed_on(trace)[freed]])
    return np.asarray((of_graph & ~_is_held_by_torch(trace, np.maximum(columns.free_event, 0)))[block])


def _is_passed_on(trace: Trace) -> Array:
    """Return whether an operator that a line calls passes each block on to another one that the same call runs."""
    accesses = group_accesses_by_block(trace)
    made_by = allocating_op(trace, np.arange(len(blocks(trace))))[accesses.block]
    is_next = (made_by >= 0) & accesses.is_read & (accesses.op > made_by) & (accesses.op <= made_by + MAX_OPS_OF_CALL)
    read = np.flatnonzero(is_next)
    stacks, names = (op_column(trace, accesses.op[read], column) for column in ("stack", "name"))
    maker_stacks, maker_names = (op_column(trace, made_by[read], column) for column in ("stack", "name"))
    is_passed = (stacks >= 0) & (stacks == maker_stacks) & (names != maker_names)
    return block_mask(trace, accesses.block[read[is_passed]])


def _is_held_by_torch(trace: Trace, free_row: Array) -> Array:
    """Return whether blocks that are freed at these rows were held by autograd or an optimizer until then."""
    phases = phase_rows(trace)
    if phases is None:
        return np.zeros(len(free_row), bool)
    return np.isin(phases.phase[phases.pieces(free_row)], (PHASE["backward"], PHASE["optimizer"]))


def _follows_late_blocks(trace: Trace, block: Array, is_freed: Array, is_late: Array) -> Array:
    """Return for each block whether all earlier blocks of its stack and size were freed late, and some were."""
    columns = blocks(trace)
    group = row_codes(columns.stack[block], columns.size[block], columns.category[block] == CATEGORY["parameter"])
    num_groups = int(group.max(initial=-1)) + 1
    num_freed = np.bincount(group[is_freed], minlength=num_groups)
    num_late = np.bincount(group[is_freed & is_late], minlength=num_groups)
    # Several blocks of one line and step can be in use at the same time.
    return np.asarray((num_late > 0) & (num_late == num_freed))[group]


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
    """Return the lifetimes of blocks that are filled when they are allocated (zeros, random numbers) and never used.

    Only these are known to be unused, and only if no block of the same call stack and size is used: a batch that is
    loaded ahead when the program ends is not. Memory that is allocated empty, the results and the scratch memory of
    operators may be used through pointers that no observer sees (NumPy, an extension, a kernel). Parameters, gradients,
    optimizer state and inputs are in the hands of a module, an optimizer or a data loader. In a window of a trace, the
    block must be freed in the window too.
    """
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    is_filled, is_used = (np.zeros(len(columns), bool) for _ in range(2))
    is_fill = find_initial_fills(trace)
    is_filled[accesses.block[is_fill]] = True
    is_used[accesses.block[~is_fill]] = True
    like = row_codes(columns.stack, columns.size)
    is_unused = is_filled & ~np.isin(like, like[is_used]) & ~np.isin(columns.category, _OWNED)
    if trace.surroundings is not None:
        is_unused &= columns.free_event >= 0
    block = candidates[is_unused[candidates]]
    return IdleIntervals(block, columns.alloc_event[block], free_rows(columns, block))


def find_redundant_allocations(trace: Trace, candidates: Array) -> tuple[IdleIntervals, Array]:
    """Return the intervals in which a block could have used the memory of a block of the same size.

    That block, the donor, is read for the last time by the operator that allocates the other block, and freed later.
    Operators of backward and of optimizers are left out, because the program does not choose them; so are donors that
    autograd or the optimizer frees, and memory of the model and the optimizer. A donor serves one block only.

    Returns:
        The intervals, and the donor of each.
    """
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    is_accessed = accesses.num_accesses(candidates) > 0
    donors = candidates[is_accessed & ~np.isin(columns.category[candidates], _OWNED)]
    takers = candidates[(columns.alloc_event[candidates] >= 0) & is_accessed]
    takers = takers[~np.isin(columns.phase[takers], (PHASE["backward"], PHASE["optimizer"]))]
    op = trace.columns("events", "op_id")["op_id"]
    allocating_op = op[columns.alloc_event[takers]]
    takers, allocating_op = takers[allocating_op >= 0], allocating_op[allocating_op >= 0]
    last_reader = accesses.op[accesses.offset[donors + 1] - 1]
    donors, last_reader = donors[last_reader >= 0], last_reader[last_reader >= 0]
    # Sorted by size and operator call, a donor comes right before the taker that it serves.
    size = np.concatenate([columns.size[donors], columns.size[takers]])
    call = np.concatenate([last_reader, allocating_op])
    is_taker = np.arange(len(size)) >= len(donors)
    order = np.lexsort((is_taker, call, size))
    follows_donor = np.zeros(len(order), bool)
    follows_donor[1:] = is_taker[order][1:] & ~is_taker[order][:-1]
    follows_donor[1:] &= (size[order][1:] == size[order][:-1]) & (call[order][1:] == call[order][:-1])
    position = np.flatnonzero(follows_donor)
    taker, donor = takers[order[position] - len(donors)], donors[order[position - 1]]
    begin, end = columns.alloc_event[taker], np.minimum(free_rows(columns, donor), free_rows(columns, taker))
    last_row = trace.num_rows("events") - 1
    overlaps = (end > begin) & (taker != donor) & ~_is_held_by_torch(trace, np.minimum(end, last_row))
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


def blocks_that_are_read(trace: Trace, candidates: Array) -> Array:
    """Return those of the blocks that an operator reads; what the others are for, the trace does not show."""
    accesses = group_accesses_by_block(trace)
    chosen: Array = candidates[block_mask(trace, accesses.block[accesses.is_read])[candidates]]
    return chosen


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
