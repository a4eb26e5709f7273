"""Statements of the program: until when the line that uses a block last is running, by the call stacks of operators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import PHASE, op_column
from memtrace.analysis.block_accesses import group_accesses_by_block, last_accesses, number_operator_calls
from memtrace.analysis.blocks import allocating_op, blocks
from memtrace.analysis.counterfactual import END_OF_TRACE
from memtrace.format.arrays import Array
from memtrace.frames import Frame, PhaseHint, phase_hint
from memtrace.trace import Trace


def call_path(trace: Trace, stack: int) -> tuple[Frame, ...]:
    """Return the frames of a call stack, outermost first."""
    return trace.cached(_call_path, stack)


def _call_path(trace: Trace, stack: int) -> tuple[Frame, ...]:
    return tuple(reversed(trace.frames(stack)))


def num_common_frames(path: tuple[Frame, ...], other: tuple[Frame, ...]) -> int:
    """Return how many outermost frames two call paths share; frames with different lines differ."""
    for depth, (frame, other_frame) in enumerate(zip(path, other, strict=False)):
        if frame != other_frame:
            return depth
    return min(len(path), len(other))


def is_same_function(frame: Frame, other: Frame) -> bool:
    """Return whether two frames run the same function, possibly at different lines."""
    return (frame.file, frame.function) == (other.file, other.function)


def end_of_last_statement(trace: Trace, block: Array) -> Array:
    """Return the last row of the statement that uses each block last, if another statement of its function made it.

    The block was then in a variable while the statement ran, which could be deleted only after it: an argument of a
    function is held by the caller's variable until the function returns. -1 where the call stacks do not show two
    statements of one function, for a last use that no function called by the statement makes (such a statement can be
    split after it), and for blocks that backward or no operator uses last.
    """
    uses = _find_uses(trace, block, None)
    use_stack = op_column(trace, uses.op, "stack").astype(np.int64)
    stacks, index = np.unique(use_stack, return_inverse=True)
    num_frames = np.array([len(trace.frames(stack)) for stack in stacks.tolist()], np.int64)[index]
    in_backward = op_column(trace, uses.op, "phase") == PHASE["backward"]
    return _end_of_run(trace, uses.op, np.where(in_backward | (num_frames == uses.depth), 0, uses.depth))


def is_in_variable(trace: Trace, block: Array, last_access: Array | None = None) -> Array:
    """Return whether a variable of the program, outside of all modules, holds each block after its last forward use.

    Two statements of one function make and use it, and the function is not called by a module, whose variables are
    usually assigned again (``x = layer(x)``) or die when it returns.

    Args:
        trace: the trace of one rank.
        block: the blocks; every one must have an access.
        last_access: the access of each block that counts as its last; see ``last_accesses``.
    """
    uses = _find_uses(trace, block, last_access)
    return np.asarray((uses.depth > 0) & ~uses.in_module)


def end_of_variables(trace: Trace, block: Array, last_access: Array | None = None) -> Array:
    """Return the row until which a variable holds each block (``is_in_variable``); -1: none does.

    It drops the block when the statement that made it has run again; ``END_OF_TRACE``: that does not happen.
    """
    uses, following = _find_uses(trace, block, last_access), _next_of_same_stack(trace, block)
    is_followed = following >= 0
    successor = np.where(is_followed, following, block)
    run_again = _end_of_run(trace, allocating_op(trace, successor), uses.depth)
    replaced = np.maximum(run_again, blocks(trace).alloc_event[successor])
    is_held = (uses.depth > 0) & ~uses.in_module
    return np.where(is_held, np.where(is_followed, replaced, END_OF_TRACE), -1)


def _next_of_same_stack(trace: Trace, block: Array) -> Array:
    """Return the block that the same call stack allocates next after each block; -1: none."""
    columns = blocks(trace)
    order = np.lexsort((columns.alloc_event, columns.stack))
    is_followed = columns.stack[order][1:] == columns.stack[order][:-1]
    following = np.full(len(columns), -1, np.int64)
    following[order[:-1][is_followed]] = order[1:][is_followed]
    return following[block]


def _end_of_run(trace: Trace, op: Array, depth: Array) -> Array:
    """Return the last row of the run of operator calls around each call that share ``depth`` outermost frames with it.

    -1: for depth 0, and for calls without a place in the order of statements.
    """
    order = trace.cached(_statement_order)
    result = np.full(len(op), -1, np.int64)
    if not len(order.op):
        return result
    place = np.minimum(np.searchsorted(order.op, op), len(order.op) - 1)
    level_of = np.where(order.op[place] == op, depth, 0)
    for level in np.unique(level_of[level_of > 0]).tolist():
        chosen = np.flatnonzero(level_of == level)
        starts = np.append(np.flatnonzero(order.num_shared < level), len(order.op))
        result[chosen] = order.last_row[starts[np.searchsorted(starts, place[chosen], side="right")] - 1]
    return result


@dataclass(frozen=True)
class _Uses:
    """The last use of each block."""

    op: Array
    """The operator call that uses it."""
    depth: Array
    """How many outermost frames of its call stack identify the statement; 0: unknown."""
    in_module: Array
    """Whether a module calls the function of the statement."""


def _find_uses(trace: Trace, block: Array, last_access: Array | None) -> _Uses:
    access = last_accesses(trace, block) if last_access is None else last_access
    op = group_accesses_by_block(trace).op[access]
    use_stack = op_column(trace, op, "stack").astype(np.int64)
    depth = _depths_of_use(trace, blocks(trace).stack[block], use_stack)
    keys, index = np.unique(np.stack([use_stack, depth]), axis=1, return_inverse=True)
    in_module = [
        any(phase_hint(frame) is PhaseHint.MODULE_CALL for frame in call_path(trace, stack)[:level])
        for stack, level in keys.T.tolist()
    ]
    return _Uses(op, depth, np.array(in_module, bool)[index.reshape(-1)])


def _depths_of_use(trace: Trace, alloc_stack: Array, use_stack: Array) -> Array:
    """Return how many outermost frames of ``use_stack`` identify the statement that uses a block; 0: unknown."""
    pairs, index = np.unique(np.stack([alloc_stack, use_stack]), axis=1, return_inverse=True)
    depth = [_depth_of_use(call_path(trace, alloc), call_path(trace, use)) for alloc, use in pairs.T.tolist()]
    return np.array(depth, np.int64)[index.reshape(-1)]


def _depth_of_use(alloc: tuple[Frame, ...], use: tuple[Frame, ...]) -> int:
    common = num_common_frames(alloc, use)
    if common >= min(len(alloc), len(use)) or not is_same_function(alloc[common], use[common]):
        return 0
    return common + 1


@dataclass(frozen=True)
class _StatementOrder:
    """Operator calls with call stacks on the thread that makes most of them, in order."""

    op: Array
    in_backward: Array
    num_shared: Array
    """How many outermost frames the call shares with the one before; 0 for backward, which ends every statement: the
    program can delete a variable before it calls backward."""
    last_row: Array
    """The last row of events of the call."""


def _statement_order(trace: Trace) -> _StatementOrder:
    ops, calls = trace.columns("ops", "op_id", "stack", "phase", "thread"), number_operator_calls(trace)
    known = calls.first[calls.first >= 0]
    call_op, last_row = trace.columns("events", "op_id")["op_id"][known], calls.last[calls.first >= 0]
    in_backward = ops["phase"] == PHASE["backward"]
    chosen = np.flatnonzero(((ops["stack"] >= 0) | in_backward) & np.isin(ops["op_id"], call_op))
    if len(chosen):
        threads, counts = np.unique(ops["thread"][chosen], return_counts=True)
        chosen = chosen[ops["thread"][chosen] == threads[counts.argmax()]]
    chosen = chosen[np.argsort(ops["op_id"][chosen], kind="stable")]
    op, in_backward = ops["op_id"][chosen], in_backward[chosen]
    stack = np.where(in_backward, -1, ops["stack"][chosen]).astype(np.int64)
    pairs, index = np.unique(np.stack([np.append(-1, stack)[:-1], stack]), axis=1, return_inverse=True)
    num_shared = [num_common_frames(call_path(trace, a), call_path(trace, b)) for a, b in pairs.T.tolist()]
    shared = np.array(num_shared, np.int64)[index.reshape(-1)]
    return _StatementOrder(op, in_backward, shared, last_row[np.searchsorted(call_op, op)])
