"""Gradients that no optimizer uses, and the work of backward and the saved activations that serve only them.

A teacher that is trained by accident, a backbone whose parameters the optimizer does not have, or a discriminator whose
gradients are dropped after the generator's step: if the parameters were frozen, neither their gradients nor what leads
to them would be allocated. What that is follows from the data flow: an operator of backward is unneeded if everything
that it writes is read by unneeded operators alone.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import PHASE, op_column
from memtrace.analysis.block_accesses import group_accesses_by_block
from memtrace.analysis.block_groups import find_owning_modules, module_pattern
from memtrace.analysis.block_signatures import row_codes
from memtrace.analysis.blocks import CATEGORY, allocating_op, blocks
from memtrace.analysis.components import connected_components
from memtrace.analysis.counterfactual import END_OF_TRACE, IdleIntervals, free_rows
from memtrace.analysis.dead_graphs import lines_of, sites_of_groups, until_variables_drop
from memtrace.analysis.held_arguments import find_release_rows
from memtrace.format.arrays import Array
from memtrace.trace import Trace


def find_unused_gradients(trace: Trace, candidates: Array) -> IdleIntervals:
    """Return the intervals in which blocks are allocated only because gradients are computed that nobody uses.

    These are the lifetimes of the gradients and of the temporary results that lead to them, and for what forward saved
    for these computations, the time from its last other use to its free.
    """
    unneeded = trace.cached(_find_unneeded)
    if not len(unneeded.gradients):
        return IdleIntervals.concatenate([])
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    is_candidate = np.zeros(len(columns), bool)
    is_candidate[candidates] = True
    removed = np.flatnonzero(unneeded.block & is_candidate)
    whole = IdleIntervals(removed, columns.alloc_event[removed], free_rows(columns, removed))
    saved = np.flatnonzero(is_candidate & ~unneeded.block & (accesses.num_accesses(np.arange(len(columns))) > 0))
    saved = saved[unneeded.access[accesses.offset[saved + 1] - 1]]
    needed = np.flatnonzero(~unneeded.access)
    last_access = np.full(len(columns), -1, np.int64)
    last_access[accesses.block[needed]] = needed
    saved = saved[last_access[saved] >= 0]
    begin = find_release_rows(trace, saved, last_access[saved])
    held = IdleIntervals(saved, begin, free_rows(columns, saved)).select(begin < free_rows(columns, saved))
    return IdleIntervals.concatenate([whole, until_variables_drop(trace, held, last_access[held.block])])


@dataclass(frozen=True)
class _Unneeded:
    """What backward would not compute without the unused gradients."""

    gradients: Array
    """The unused gradients."""
    block: Array
    """Whether each block would not be allocated; indexed by block."""
    access: Array
    """Whether each of ``group_accesses_by_block`` would not happen."""
    op: Array
    """The operator calls of backward that would not run."""


def _find_unneeded(trace: Trace) -> _Unneeded:
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    in_backward = _is_backward(trace, accesses.op)
    made_in_backward = _is_backward(trace, allocating_op(trace, np.arange(len(columns))))
    is_used = np.zeros(len(columns), bool)
    is_used[accesses.block[accesses.is_read & ~in_backward]] = True
    gradients = _gradients_without_optimizer(trace, np.flatnonzero(made_in_backward & ~is_used))
    nothing = np.zeros(0, np.int64)
    if not len(gradients):
        return _Unneeded(nothing, np.zeros(len(columns), bool), np.zeros(len(accesses.block), bool), nothing)
    is_gradient = np.zeros(len(columns), bool)
    is_gradient[gradients] = True
    flow = np.flatnonzero(in_backward & (columns.category[accesses.block] != CATEGORY["workspace"]))
    ops, op = np.unique(accesses.op[flow], return_inverse=True)
    block, is_read = accesses.block[flow], accesses.is_read[flow]
    writes = np.bincount(op[~is_read], minlength=len(ops)) > 0
    is_removable = made_in_backward & ~is_used & (is_gradient | _is_temporary(trace, is_read, block))
    # What is read by an operator without a result is used in a way that the trace does not show.
    is_removable[block[is_read & ~writes[op]]] = False
    is_live = _reaches_needed(block, op, is_read, is_removable, len(ops))
    live_block, live_op = is_live[: len(columns)], is_live[len(columns) :]
    is_dead_op = ~live_op & writes
    is_dead_block = is_removable & ~live_block
    is_dead_access = in_backward & (np.isin(accesses.op, ops[is_dead_op]) | is_dead_block[accesses.block])
    return _Unneeded(np.flatnonzero(is_gradient & is_dead_block), is_dead_block, is_dead_access, ops[is_dead_op])


def _is_backward(trace: Trace, op: Array) -> Array:
    in_backward = op_column(trace, op, "phase") == PHASE["backward"]
    return np.asarray(in_backward | op_column(trace, op, "recompute"))


def _gradients_without_optimizer(trace: Trace, block: Array) -> Array:
    """Return those of ``block`` that are gradients of parameters and live through an optimizer step.

    Args:
        trace: the trace of one rank.
        block: blocks that backward allocates and that no operator outside of backward reads.
    """
    columns, accesses = blocks(trace), group_accesses_by_block(trace)
    in_step = op_column(trace, accesses.op, "phase") == PHASE["optimizer"]
    is_gradient = columns.category == CATEGORY["gradient"]
    if not (accesses.is_read & in_step & is_gradient[accesses.block]).any():
        return np.zeros(0, np.int64)  # the trace does not show which gradients optimizers use
    step_event = np.append(np.sort(accesses.event[in_step]), END_OF_TRACE)
    next_step = step_event[np.searchsorted(step_event, columns.alloc_event[block])]
    block = block[(next_step < free_rows(columns, block)) & (next_step < END_OF_TRACE)]
    # A gradient that no optimizer has is labeled only if it lives until the recording ends.
    unlabeled = (columns.category[block] == CATEGORY["unknown"]) & _is_like_gradient(trace, block)
    chosen: Array = block[(is_gradient[block] | unlabeled) & ~_has_optimizer_state(trace, block)]
    return chosen


def _is_like_gradient(trace: Trace, block: Array) -> Array:
    """Return whether each block can be the gradient of a parameter of the module whose backward allocates it.

    A parameter of the module has its size, and no gradient of the module has its size while it lives: a parameter has
    one gradient at a time. (The gradient of an input can have the size of a weight.)
    """
    columns = blocks(trace)
    parameters, gradients = (np.flatnonzero(columns.category == CATEGORY[name]) for name in ("parameter", "gradient"))
    owners, owner = find_owning_modules(trace, parameters)
    known = zip(owner.tolist(), columns.size[parameters].tolist(), strict=True)
    sizes = {(owners[index], size) for index, size in known}
    pairs, pair = np.unique(np.stack([columns.module[block], columns.size[block]]), axis=1, return_inverse=True)
    has_parameter = np.array([(trace.name(module), size) in sizes for module, size in pairs.T.tolist()], bool)
    key = row_codes(
        np.concatenate([columns.module[gradients], columns.module[block]]),
        np.concatenate([columns.size[gradients], columns.size[block]]),
    )
    result = has_parameter[pair.reshape(-1)]
    if len(gradients):
        of_gradient, of_block = key[: len(gradients)], key[len(gradients) :]
        begin = of_gradient * (4 * END_OF_TRACE) + columns.alloc_event[gradients]
        order = np.argsort(begin)
        end = of_block * (4 * END_OF_TRACE) + free_rows(columns, block)
        last = order[np.maximum(np.searchsorted(begin[order], end) - 1, 0)]
        begins_before = (of_gradient[last] == of_block) & (begin[last] < end)
        result &= ~(begins_before & (free_rows(columns, gradients[last]) > columns.alloc_event[block]))
    return np.asarray(result)


def _has_optimizer_state(trace: Trace, block: Array) -> Array:
    """Return whether an optimizer keeps state for the parameter of each gradient; it may read it with a kernel of its
    own, which the recording does not see."""
    columns = blocks(trace)
    state = np.unique(columns.name[columns.category == CATEGORY["optimizer_state"]]).tolist()
    names = {(trace.name(name) or "").rpartition(".")[0] for name in state}
    own, index = np.unique(columns.name[block], return_inverse=True)
    return np.array([name >= 0 and trace.name(name) in names for name in own.tolist()], bool)[index]


def _is_temporary(trace: Trace, is_read: Array, block: Array) -> Array:
    """Return whether each block of the trace is read and freed before any operator runs outside of backward.

    Args:
        trace: the trace of one rank.
        is_read: for each access of an operator of backward, whether it reads.
        block: the block of each of these accesses.
    """
    columns, op = blocks(trace), trace.columns("events", "op_id")["op_id"]
    rows = np.flatnonzero(op >= 0)
    outside = np.append(rows[~_is_backward(trace, op[rows])], END_OF_TRACE)
    allocated = np.maximum(columns.alloc_event, 0)
    ends_in_time = (columns.free_event >= 0) & (columns.free_event <= outside[np.searchsorted(outside, allocated)])
    has_reader = np.zeros(len(columns), bool)
    has_reader[block[is_read]] = True
    return np.asarray(ends_in_time & has_reader)


def _reaches_needed(block: Array, op: Array, is_read: Array, is_removable: Array, num_ops: int) -> Array:
    """Return which blocks, and then which operators, are needed for a block that is not removable."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import breadth_first_order

    num_blocks, root = len(is_removable), len(is_removable) + num_ops
    needed = np.flatnonzero(~is_removable)
    # A block needs the operators that write it; an operator needs the removable blocks that it reads.
    reads = is_read & is_removable[block]
    begin = np.concatenate([np.full(len(needed), root), block[~is_read], num_blocks + op[reads]])
    end = np.concatenate([needed, num_blocks + op[~is_read], block[reads]])
    edges = csr_array((np.ones(len(begin), np.int8), (begin, end)), shape=(root + 1, root + 1))
    reached = np.zeros(root + 1, bool)
    reached[breadth_first_order(edges, root, return_predecessors=False)] = True
    return reached[:root]


def module_of_unused_gradients(trace: Trace, block: Array) -> str | None:
    """Return the innermost module that contains the parameters of all unused gradients among some blocks."""
    gradients = np.intersect1d(block, trace.cached(_find_unneeded).gradients)
    names, _ = find_owning_modules(trace, gradients)
    parts = zip(*(name.split(".") for name in names if name is not None), strict=False)
    common = [levels[0] for levels in itertools.takewhile(lambda levels: len(set(levels)) == 1, parts)]
    return module_pattern(".".join(common)) if common else None


def sites_of_unused_gradients(trace: Trace, block: Array) -> list[str | None]:
    """Return for each block of ``find_unused_gradients`` the line that runs what its unused gradients belong to.

    Blocks belong together if an operator of backward that would not run without the gradients uses them both.
    """
    columns, accesses, unneeded = blocks(trace), group_accesses_by_block(trace), trace.cached(_find_unneeded)
    mine = np.flatnonzero(np.isin(accesses.op, unneeded.op))
    _, op = np.unique(accesses.op[mine], return_inverse=True)
    num_nodes = len(columns) + int(op.max(initial=-1)) + 1
    belongs = np.zeros(len(columns), bool)
    belongs[block] = True
    # Inputs that models share, such as a batch, do not connect them.
    links = belongs[accesses.block[mine]]
    group = connected_components(accesses.block[mine][links], len(columns) + op[links], num_nodes)[block]
    # The line that made an input of the graph does not run the graph.
    is_own = (op_column(trace, allocating_op(trace, block), "sequence_nr") >= 0) | unneeded.block[block]
    return sites_of_groups(trace, block, group, is_own, trace.cached(_live_lines))


def _live_lines(trace: Trace) -> frozenset[tuple[str, int]]:
    """Return the lines of all call paths through which autograd records nodes whose backward is needed."""
    ops = trace.columns("ops", "op_id", "sequence_nr")
    is_node, in_backward = ops["sequence_nr"] >= 0, _is_backward(trace, ops["op_id"])
    is_live = in_backward & ~np.isin(ops["op_id"], trace.cached(_find_unneeded).op)
    live_nodes = ops["sequence_nr"][is_node & is_live]
    return lines_of(trace, ops["op_id"][is_node & ~in_backward & np.isin(ops["sequence_nr"], live_nodes)])
