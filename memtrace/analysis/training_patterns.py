"""Patterns of wasted memory in training loops: leaked blocks, idle gradients, retained graphs and double copies.

These are the causes that users recognise. Each is a special case of an object-level pattern (see ``patterns``) for
which the trace holds additional evidence: steps, phases, or the sequence numbers of autograd.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.attribution import PHASE, op_column, step_rows
from memtrace.analysis.block_accesses import (
    find_initial_fills,
    group_accesses_by_block,
    last_needed_rows,
    operator_end_rows,
    operator_start_rows,
)
from memtrace.analysis.block_signatures import row_codes
from memtrace.analysis.blocks import CATEGORY, PERSISTENT, allocating_op, blocks
from memtrace.analysis.counterfactual import END_OF_TRACE, IdleIntervals, free_rows
from memtrace.analysis.dead_graphs import is_held_by_graph
from memtrace.analysis.leaks import keeps_growing
from memtrace.analysis.patterns import block_mask
from memtrace.analysis.retained_memory import kept_bytes_at_step_ends, live_bytes_at_step_ends, step_end_lifetimes
from memtrace.analysis.statements import is_in_variable
from memtrace.analysis.thresholds import MIN_STEPS_FOR_LEAKS, WARM_UP_STEPS
from memtrace.format.arrays import Array
from memtrace.trace import Trace

_COPY_OPERATORS: Final = ("aten::_to_copy", "aten::clone", "aten::contiguous", "aten::copy_", "aten::to.")


def find_leaked_blocks(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the intervals from the last use of leaked blocks to their free, or to the end of the trace.

    A block is leaked if its call stack and operator leave blocks behind in step after step, if it is not used after the
    step that follows its own, and if it is live when the last step ends. (It may be freed later: a list dies with its
    function.)
    Blocks of the warm-up steps are left out, because these allocate optimizer state and workspaces.
    """
    columns, accesses, steps = blocks(trace), group_accesses_by_block(trace), step_rows(trace)
    if len(steps.number) < MIN_STEPS_FOR_LEAKS:
        return IdleIntervals.concatenate([])
    alloc_step = columns.step[candidates]
    is_live_at_end = (alloc_step >= 0) & (free_rows(columns, candidates) >= steps.end_row[-1])
    # Gradients of the last step, and its blocks that are freed after it, are still in use.
    is_freed_or_gradient = (columns.free_event[candidates] >= 0) | (
        columns.category[candidates] == CATEGORY["gradient"]
    )
    is_in_use = is_freed_or_gradient & (alloc_step == steps.number[-1])
    block = candidates[is_live_at_end & ~is_in_use & ~np.isin(columns.category[candidates], PERSISTENT)]
    last_use = columns.alloc_event[block]
    is_accessed = accesses.num_accesses(block) > 0
    last_use[is_accessed] = last_needed_rows(trace, block[is_accessed])
    # Blocks that a later step uses, or that are used after the last step, are kept for a reason.
    is_done = (steps.of_rows(last_use) <= columns.step[block] + 1) & (last_use < steps.end_row[-1])
    is_leaked = is_done & _is_of_growing_origin(trace, candidates, block) & ~_awaits_use(trace, block)
    leaked, begin = block[is_leaked], last_use[is_leaked]
    begin = np.maximum(begin, _reassignment_rows(trace, leaked))
    return IdleIntervals(leaked, begin, free_rows(columns, leaked)).select(begin < free_rows(columns, leaked))


def _awaits_use(trace: Trace, block: Array) -> Array:
    """Return whether no operator has used each block yet although others of its call stack and size are used."""
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    is_used = block_mask(trace, accesses.block[~find_initial_fills(trace)])
    like = row_codes(columns.stack, columns.size)
    return np.asarray(~is_used[block] & np.isin(like[block], like[is_used]))


def _reassignment_rows(trace: Trace, block: Array) -> Array:
    """Return from which row of events the variables of the program no longer hold each block; -1: no variable does.

    A variable holds a batch until it is assigned the next one of the same call stack and size, which is used then.
    """
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    result = np.full(len(block), -1, np.int64)
    known = np.flatnonzero(accesses.num_accesses(block) > 0)
    held = known[is_in_variable(trace, block[known]) & ~is_held_by_graph(trace, block[known])]
    every_block = np.arange(len(columns))
    used_by_another = np.flatnonzero(accesses.op != allocating_op(trace, every_block)[accesses.block])
    first_use = np.full(len(columns), END_OF_TRACE)
    first_use[accesses.block[used_by_another[::-1]]] = accesses.event[used_by_another[::-1]]
    order = np.lexsort((columns.alloc_event, columns.size, columns.stack))
    is_followed = (columns.stack[order][1:] == columns.stack[order][:-1]) & (
        columns.size[order][1:] == columns.size[order][:-1]
    )
    next_use = np.full(len(columns), END_OF_TRACE)
    next_use[order[:-1][is_followed]] = first_use[order[1:][is_followed]]
    result[held] = next_use[block[held]]
    return result


def find_graphs_across_steps(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the intervals from the last use of a graph's blocks in their own step to their free, if the graph grows.

    Backward of later steps uses them again, because the graph of each step is connected with those of all earlier ones.
    """
    block, later = _growing_blocks_used_later(trace, candidates)
    accesses = group_accesses_by_block(trace)
    is_forward = op_column(trace, accesses.op[later.access], "phase") != PHASE["backward"]
    in_forward = block_mask(trace, accesses.block[later.access[is_forward]])[block]
    made = op_column(trace, allocating_op(trace, block), "sequence_nr") >= 0
    chosen = made & ~in_forward
    begin, end = later.last_use[chosen], free_rows(blocks(trace), block[chosen])
    return IdleIntervals(block[chosen], begin, end)


def find_accumulated_results(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the intervals from the last use of a result in its own step to its free, if it is used after all steps.

    Blocks of one call stack are left behind in step after step, and no step uses them later: the loop collects results.
    """
    block, later = _growing_blocks_used_later(trace, candidates)
    if not len(block):
        return IdleIntervals.concatenate([])
    accesses = group_accesses_by_block(trace)
    is_in_loop = accesses.event[later.access] < step_rows(trace).end_row[-1]
    in_loop = block_mask(trace, accesses.block[later.access[is_in_loop]])[block]
    return IdleIntervals(block, later.last_use, free_rows(blocks(trace), block)).select(~in_loop)


@dataclass(frozen=True)
class _LaterUses:
    """The uses of blocks in later steps than their own."""

    access: Array
    """All of these accesses (rows of ``group_accesses_by_block``)."""
    last_use: Array
    """The last row that needs each block before the first of these accesses."""


def _growing_blocks_used_later(trace: Trace, candidates: Array) -> tuple[Array, _LaterUses]:
    """Return the blocks of growing call stacks that are live when the last step ends and used in later steps."""
    columns, accesses, steps = blocks(trace), group_accesses_by_block(trace), step_rows(trace)
    none = np.zeros(0, np.int64)
    if len(steps.number) < MIN_STEPS_FOR_LEAKS:
        return none, _LaterUses(none, none)
    is_kept = (columns.step[candidates] >= 0) & (free_rows(columns, candidates) >= steps.end_row[-1])
    block = candidates[is_kept & ~np.isin(columns.category[candidates], PERSISTENT)]
    block = block[_is_of_growing_origin(trace, candidates, block)]
    mine = np.flatnonzero(block_mask(trace, block)[accesses.block])
    step = steps.of_rows(accesses.event[mine])
    step[accesses.event[mine] >= steps.end_row[-1]] = steps.number[-1] + 1
    later = mine[step > columns.step[accesses.block[mine]]]
    block, index = np.unique(accesses.block[later], return_index=True)
    first = later[index]
    has_earlier = first > accesses.offset[block]
    block, first = block[has_earlier], first[has_earlier]
    later = later[block_mask(trace, block)[accesses.block[later]]]
    return block, _LaterUses(later, operator_end_rows(trace, accesses.event[first - 1]))


def _is_of_growing_origin(trace: Trace, candidates: Array, block: Array) -> Array:
    """Return whether live bytes of each block's origin grow from step to step by the definition of ``keeps_growing``.

    An origin is a call stack and an operator. The bytes are those of ``candidates``, which include ``block``.
    """
    columns, step_ends = blocks(trace), step_rows(trace).end_row[WARM_UP_STEPS:]
    lifetimes = step_end_lifetimes(trace, step_ends)
    origin = row_codes(columns.stack, columns.op_name)
    first, end = lifetimes.first[candidates], lifetimes.end[candidates]
    outlives_step = end > first
    kept_block, first, end = candidates[outlives_step], first[outlives_step], end[outlives_step]
    origins, group = np.unique(origin[kept_block], return_inverse=True)
    shape = (len(origins), len(step_ends))
    live = live_bytes_at_step_ends(group, columns.size[kept_block], first, end, shape)
    kept = kept_bytes_at_step_ends(group, columns.size[kept_block], first, end, shape)
    growing = origins[[keeps_growing(live[row]) or keeps_growing(kept[row]) for row in range(len(origins))]]
    return np.isin(origin[block], growing)


def find_idle_gradients(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the intervals in which gradients outlive the optimizer step and stay allocated through the next forward.

    An interval runs from the last use of a gradient by the optimizer to the backward that adds to it, or to its free:
    gradients that are set to zero instead of freed, or freed too late. Where backward adds a new gradient of the same
    size, the interval runs to the free of the new one, because autograd would keep that as the gradient.
    """
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    gradients = candidates[columns.category[candidates] == CATEGORY["gradient"]]
    access = np.flatnonzero(block_mask(trace, gradients)[accesses.block])
    if not len(access):
        return IdleIntervals.concatenate([])
    phase = op_column(trace, accesses.op[access], "phase")
    # Other accesses only set gradients to zero.
    is_relevant = (phase == PHASE["optimizer"]) | (phase == PHASE["backward"])
    access, by_optimizer = access[is_relevant], phase[is_relevant] == PHASE["optimizer"]
    block = accesses.block[access]
    has_next = np.append(block[1:] == block[:-1], False)
    is_last_by_optimizer = by_optimizer & ~(has_next & np.append(by_optimizer[1:], False))
    last = np.flatnonzero(is_last_by_optimizer)
    following = np.minimum(last + 1, len(access) - 1)
    begin = operator_end_rows(trace, accesses.event[access[last]])
    free = free_rows(columns, block[last])
    next_use = _accumulation_rows(trace, block[last], accesses.event[access[following]])
    end = np.where(has_next[last], next_use, free)
    is_kept = (end > begin) & (free < END_OF_TRACE) | has_next[last]
    num_forward = _forward_rows_before(trace)
    spans_forward = num_forward[np.minimum(end, len(num_forward) - 1)] > num_forward[np.minimum(begin + 1, end)]
    is_idle = is_kept & spans_forward
    return IdleIntervals(block[last][is_idle], begin[is_idle], end[is_idle])


def find_replaced_state(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the intervals from the last use of optimizer state to its free, if another optimizer has replaced it.

    A state of the same name and size is allocated after the last use: a second optimizer updates the same parameters.
    """
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    block = candidates[
        (columns.category[candidates] == CATEGORY["optimizer_state"]) & (accesses.num_accesses(candidates) > 0)
    ]
    block = block[columns.name[block] >= 0]
    if not len(block):
        return IdleIntervals.concatenate([])
    group = row_codes(columns.name[block], columns.size[block])
    newest = np.full(int(group.max()) + 1, -1, np.int64)
    np.maximum.at(newest, group, columns.alloc_event[block])
    begin, end = last_needed_rows(trace, block), free_rows(columns, block)
    is_replaced = (newest[group] > begin) & (newest[group] < end)
    return IdleIntervals(block, begin, end).select(is_replaced)


def is_applied_gradient(trace: Trace, block: Array) -> Array:
    """Return whether each block is a gradient that an optimizer uses last; every block must have an access."""
    accesses = group_accesses_by_block(trace)
    last_op = accesses.op[accesses.offset[block + 1] - 1]
    by_optimizer = op_column(trace, last_op, "phase") == PHASE["optimizer"]
    return np.asarray(by_optimizer & (blocks(trace).category[block] == CATEGORY["gradient"]))


def find_optimizer_in_backward(trace: Trace, gradients: Array, candidates: Array) -> IdleIntervals:
    """Return the intervals that an optimizer which runs in backward would save.

    Each gradient would be applied and freed as soon as backward has made it, and the optimizer would hold temporary
    results of one parameter at a time: all but those of the largest one are saved. Gradients that backward accumulates
    or that the program reads as well (to clip their norm) cannot be applied one after the other.

    Args:
        trace: the trace of one rank.
        gradients: gradients that live beyond the optimizer step which uses them last.
        candidates: all blocks of the device.
    """
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    phase = op_column(trace, accesses.op, "phase")
    by_program = accesses.is_read & (phase != PHASE["optimizer"])
    gradients = gradients[~block_mask(trace, accesses.block[by_program])[gradients]]
    made = np.full(len(columns), -1, np.int64)
    in_backward = np.flatnonzero(phase == PHASE["backward"])
    made[accesses.block[in_backward]] = accesses.event[in_backward]
    gradients = gradients[made[gradients] >= 0]
    if not len(gradients):
        return IdleIntervals.concatenate([])
    largest = np.zeros(int(columns.step.max(initial=0)) + 2, np.int64)
    np.maximum.at(largest, columns.step[gradients], columns.size[gradients])
    order = np.lexsort((-columns.size[gradients], columns.step[gradients]))
    is_first = np.append(True, np.diff(columns.step[gradients[order]]) != 0)
    gradients = gradients[order[~is_first]]
    is_temporary = (columns.phase[candidates] == PHASE["optimizer"]) & np.isin(
        columns.category[candidates], (CATEGORY["temporary"], CATEGORY["workspace"])
    )
    temporary = candidates[is_temporary & (columns.size[candidates] < largest[columns.step[candidates]])]
    return IdleIntervals.concatenate([
        IdleIntervals(gradients, operator_end_rows(trace, made[gradients]), free_rows(columns, gradients)),
        IdleIntervals(temporary, columns.alloc_event[temporary], free_rows(columns, temporary)),
    ])  # fmt: skip


def _accumulation_rows(trace: Trace, gradient: Array, event: Array) -> Array:
    """Return from which row of events each gradient is needed again, given the first access of the next backward."""
    accesses, columns = group_accesses_by_block(trace), blocks(trace)
    needed = operator_start_rows(trace, event)
    read = np.flatnonzero(accesses.is_read & (accesses.op >= 0))
    read = read[np.argsort(accesses.op[read], kind="stable")]
    if not len(read):
        return needed
    op = trace.columns("events", "op_id")["op_id"][event]
    first = np.searchsorted(accesses.op[read], op)
    for offset in range(2):  # an addition reads the gradient and the new one, in either order
        other = read[np.minimum(first + offset, len(read) - 1)]
        block = accesses.block[other]
        is_new = (accesses.op[other] == op) & (block != gradient) & (columns.size[block] == columns.size[gradient])
        is_new &= (columns.phase[block] == PHASE["backward"]) & (columns.free_event[block] > event)
        needed = np.where(is_new, columns.free_event[block], needed)
    return needed


def _forward_rows_before(trace: Trace) -> Array:
    """Return for each row of events how many rows of forward operators precede it."""
    op = trace.columns("events", "op_id")["op_id"]
    return np.concatenate([[0], np.cumsum(op_column(trace, op, "phase") == PHASE["forward"])])


def is_copy_of_donor(trace: Trace, taker: Array, donor: Array) -> Array:
    """Return whether each of ``taker`` is a copy, made by the operator that reads the matching ``donor`` last."""
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    names, index = np.unique(columns.op_name[taker], return_inverse=True)
    is_copy = np.array([(trace.name(int(name)) or "").startswith(_COPY_OPERATORS) for name in names], bool)
    last_reader = accesses.op[accesses.offset[donor + 1] - 1]
    return np.asarray(is_copy[index] & (last_reader == allocating_op(trace, taker)))
