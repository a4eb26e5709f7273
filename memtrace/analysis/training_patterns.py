"""Patterns of wasted memory in training loops: leaked blocks, idle gradients, retained graphs and double copies.

These are the causes that users recognise. Each is a special case of an object-level pattern (see ``patterns``) for
which the trace holds additional evidence: steps, phases, or the sequence numbers of autograd.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, op_column, step_rows
from memtrace.analysis.block_accesses import (
    group_accesses_by_block,
    last_needed_rows,
    operator_end_rows,
    operator_start_rows,
)
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.counterfactual import END_OF_TRACE, IdleIntervals, free_rows
from memtrace.analysis.leaks import (
    keeps_growing,
    kept_bytes_at_step_ends,
    live_bytes_at_step_ends,
    step_end_lifetimes,
)
from memtrace.analysis.patterns import block_mask
from memtrace.analysis.thresholds import MIN_STEPS_AFTER_WARM_UP, WARM_UP_STEPS
from memtrace.format.arrays import Array
from memtrace.trace import Trace

MIN_STEPS_FOR_LEAKS: Final = WARM_UP_STEPS + MIN_STEPS_AFTER_WARM_UP
"""Minimum number of steps for finding leaks: with fewer, they look like memory that is allocated once."""
PERSISTENT: Final = (CATEGORY["parameter"], CATEGORY["optimizer_state"])
"""Categories of memory that stays allocated throughout training."""
_MAX_SILENT_NODES: Final = 16
"""Most consecutive nodes of a graph that may run in backward without an operator of their own."""
_COPY_OPERATORS: Final = ("aten::_to_copy", "aten::clone", "aten::contiguous", "aten::copy_", "aten::to.")


def find_leaked_blocks(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the intervals from the last use of leaked blocks to their free, or to the end of the trace.

    A block is leaked if its call stack leaves blocks behind in step after step, if it is not used after the step that
    follows its own, and if it is live when the last step ends. (It may be freed later: a list dies with its function.)
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
    is_leaked = is_done & np.isin(columns.stack[block], _growing_stacks(trace, candidates))
    return IdleIntervals(block[is_leaked], last_use[is_leaked], free_rows(columns, block[is_leaked]))


def _growing_stacks(trace: Trace, candidates: Array) -> Array:
    """Return the call stacks whose live bytes grow from step to step by the definition of ``keeps_growing``."""
    columns, step_ends = blocks(trace), step_rows(trace).end_row[WARM_UP_STEPS:]
    lifetimes = step_end_lifetimes(trace, step_ends)
    first, end = lifetimes.first[candidates], lifetimes.end[candidates]
    outlives_step = end > first
    block, first, end = candidates[outlives_step], first[outlives_step], end[outlives_step]
    stacks, group = np.unique(columns.stack[block], return_inverse=True)
    live = live_bytes_at_step_ends(group, columns.size[block], first, end, (len(stacks), len(step_ends)))
    kept = kept_bytes_at_step_ends(group, columns.size[block], first, end, (len(stacks), len(step_ends)))
    growing: Array = stacks[[keeps_growing(live[row]) or keeps_growing(kept[row]) for row in range(len(stacks))]]
    return growing


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


def is_held_by_graph(trace: Trace, block: Array) -> Array:
    """Return whether an autograd graph may hold each block: it belongs to a forward through which no backward ran.

    The block was made or read by an operator that autograd recorded. Once backward has run, the graph has released its
    blocks, and what is still allocated is held by the program.
    """
    return _ran_only_forward(trace, _allocating_op(trace, block)) | _is_read_without_backward(trace, block)


def _is_read_without_backward(trace: Trace, block: Array) -> Array:
    """Return whether an operator that autograd recorded reads each block, and no backward ran through its node."""
    accesses = group_accesses_by_block(trace)
    mine = np.flatnonzero(accesses.is_read & block_mask(trace, block)[accesses.block])
    readers = mine[_ran_only_forward(trace, accesses.op[mine])]
    return block_mask(trace, accesses.block[readers])[block]


def is_freed_with(trace: Trace, block: Array, others: Array) -> Array:
    """Return whether each block is freed together with one of ``others``, without any event but frees in between.

    An input that a graph saves is freed with the graph, unless a variable holds it.
    """
    columns, kind = blocks(trace), trace.columns("events", "kind")["kind"]
    burst = np.cumsum(kind != KIND["free"])
    free, other_free = columns.free_event[block], columns.free_event[others]
    bursts = burst[other_free[other_free >= 0]]
    return np.asarray((free >= 0) & np.isin(burst[np.maximum(free, 0)], bursts)) if len(burst) else free >= 0


def is_made_without_backward(trace: Trace, block: Array) -> Array:
    """Return whether autograd recorded the operator that made each block, and no backward ran through its node."""
    return _ran_only_forward(trace, _allocating_op(trace, block))


def is_held_by_dead_graph(trace: Trace, block: Array) -> Array:
    """Return whether a graph through which no backward runs is all that holds each block.

    These are its own blocks, except those that a backward reads (they were detached and saved by another graph), and
    inputs that it saves, if they are freed together with its blocks.
    """
    accesses = group_accesses_by_block(trace)
    mine = np.flatnonzero(accesses.is_read & block_mask(trace, block)[accesses.block])
    in_backward = op_column(trace, accesses.op[mine], "phase") == PHASE["backward"]
    is_read_by_backward = block_mask(trace, accesses.block[mine[in_backward]])[block]
    is_own = is_made_without_backward(trace, block) & ~is_read_by_backward
    is_input = _is_read_without_backward(trace, block) & ~is_read_by_backward & ~is_own
    is_input &= ~np.isin(blocks(trace).category[block], PERSISTENT)
    return np.asarray(is_own | (is_input & is_freed_with(trace, block, block[is_own])))


def _ran_only_forward(trace: Trace, op: Array) -> Array:
    """Return whether autograd recorded each operator call, and no backward ran through its node.

    A node can run without an operator of its own (that of a sum, for example). It counts as run if the nearest nodes on
    both sides were run by the same backward, which runs the later node first. If two backwards ran them, the later node
    ran second.
    """
    node = op_column(trace, op, "sequence_nr").astype(np.int64)
    ops = trace.columns("ops", "op_id", "phase", "sequence_nr")
    backward = np.flatnonzero((ops["phase"] == PHASE["backward"]) & (ops["sequence_nr"] >= 0))
    backward = backward[np.argsort(ops["op_id"][backward], kind="stable")]
    run_nodes, first = np.unique(ops["sequence_nr"][backward], return_index=True)
    # Sentinels on both sides: nodes that no backward encloses.
    nodes = np.concatenate([[-END_OF_TRACE], run_nodes, [END_OF_TRACE]])
    run_by = np.concatenate([[-1], ops["op_id"][backward[first]], [END_OF_TRACE]])
    next_node = np.clip(np.searchsorted(nodes, node, side="right"), 1, len(nodes) - 1)
    in_one_backward = run_by[next_node] < run_by[next_node - 1]
    ran_silently = in_one_backward & (nodes[next_node] - nodes[next_node - 1] <= _MAX_SILENT_NODES)
    has_backward = (nodes[next_node - 1] == node) | ran_silently
    return np.asarray(_is_recorded_forward(trace, op) & ~has_backward)


def is_copy_of_donor(trace: Trace, taker: Array, donor: Array) -> Array:
    """Return whether each of ``taker`` is a copy, made by the operator that reads the matching ``donor`` last."""
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    names, index = np.unique(columns.op_name[taker], return_inverse=True)
    is_copy = np.array([(trace.name(int(name)) or "").startswith(_COPY_OPERATORS) for name in names], bool)
    last_reader = accesses.op[accesses.offset[donor + 1] - 1]
    return np.asarray(is_copy[index] & (last_reader == _allocating_op(trace, taker)))


def _allocating_op(trace: Trace, block: Array) -> Array:
    """Return the operator call that allocated each block, -1 if it is unknown."""
    alloc_event = blocks(trace).alloc_event[block]
    return np.where(alloc_event >= 0, trace.columns("events", "op_id")["op_id"][alloc_event], -1)


def _is_recorded_forward(trace: Trace, op: Array) -> Array:
    """Return whether autograd recorded each operator call, outside of backward."""
    is_recorded = op_column(trace, op, "sequence_nr") >= 0
    return np.asarray(is_recorded & (op_column(trace, op, "phase") != PHASE["backward"]))
