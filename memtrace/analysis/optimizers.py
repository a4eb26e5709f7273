"""Finds the steps of optimizers by the call stacks of the operators that they run.

The results show where training steps end in traces without step marks and without ranges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.event_codes import KIND, PHASE
from memtrace.analysis.operators import op_column
from memtrace.analysis.thresholds import MIN_REPEATS_PER_STEP
from memtrace.format.arrays import Array
from memtrace.frames import Frame, is_optimizer_base_frame, is_optimizer_frame
from memtrace.trace import Trace

_OTHER, _UNKNOWN, _OPTIMIZER = 0, -1, 1


@dataclass(frozen=True)
class OptimizerBursts:
    """The calls of ``Optimizer.step``, in the order of the trace; each array has one element per call."""

    first: Array
    """Row of the first event of the call."""
    end: Array
    """Row after the last event of the call."""
    caller: Array
    """Number of the call stack that calls ``step``, which distinguishes several optimizers."""
    in_backward: Array
    """Whether a backward pass continues after the call: hooks of the backward pass step parameter by parameter."""
    is_periodic: bool
    """Whether the optimizers repeat the same operators for one parameter after another. Then the end of a call can be
    found even if its last operators have no call stack."""

    def __len__(self) -> int:
        return len(self.first)


def find_optimizer_bursts(trace: Trace) -> OptimizerBursts:
    """Find the calls of ``Optimizer.step``; none without call stacks, and none where optimizers allocate nothing."""
    return trace.cached(_find_bursts)


def find_step_ends(bursts: OptimizerBursts) -> Array:
    """Return the rows of events at which training steps end.

    A step contains one call of each optimizer: it ends before an optimizer that has already stepped in it steps again.
    No step ends within a backward pass.
    """
    ends, callers_in_step = [], set[int]()
    for index, caller in enumerate(bursts.caller.tolist()):
        if caller in callers_in_step and not bursts.in_backward[index - 1]:
            ends.append(int(bursts.end[index - 1]))
            callers_in_step.clear()
        callers_in_step.add(caller)
    if len(bursts):
        ends.append(int(bursts.end[-1]))
    return np.array(ends, np.int64)


def _find_bursts(trace: Trace) -> OptimizerBursts:
    events = trace.columns("events", "kind", "op_id")
    of_operator = np.isin(events["kind"], [KIND["alloc"], KIND["read"], KIND["write"]]) & (events["op_id"] >= 0)
    rows = np.flatnonzero(of_operator)
    op = events["op_id"][rows]
    begins = np.flatnonzero(np.append(True, op[1:] != op[:-1])) if len(op) else np.empty(0, np.int64)
    first, last, op = rows[begins], rows[np.append(begins[1:], len(rows))[: len(begins)] - 1], op[begins]
    origin = _classify_calls(trace, op)
    known = np.flatnonzero(origin.kind != _UNKNOWN)
    starts = _run_starts(origin.kind[known], origin.entry[known])
    ends = np.append(starts[1:], len(known))
    is_optimizer = origin.kind[known[starts]] == _OPTIMIZER if len(starts) else np.empty(0, bool)
    burst_first, burst_last = known[starts[is_optimizer]], known[ends[is_optimizer] - 1]
    # Operators on small parameters have no call stacks. What occurs within bursts can also occur after the last call.
    limit = np.append(known, len(op))[ends[is_optimizer]]
    previous_end = np.append(0, known + 1)[starts[is_optimizer]]
    name, is_foreach = _operator_names(trace, op)
    of_optimizer = origin.kind == _OPTIMIZER
    by_parameter = 2 * int(is_foreach[of_optimizer].sum()) <= int(of_optimizer.sum())
    burst_last, is_periodic = _extend(name, previous_end, burst_last, limit, None if by_parameter else is_foreach)
    backward = np.append(op_column(trace, op, "phase") == PHASE["backward"], False)
    in_backward = backward[np.append(known, -1)[ends[is_optimizer]]]
    caller = origin.caller[known[ends[is_optimizer] - 1]]
    return OptimizerBursts(first[burst_first], last[burst_last] + 1, caller, in_backward, is_periodic)


def _operator_names(trace: Trace, op: Array) -> tuple[Array, Array]:
    """Return for each operator call a number for its name without the overload, and whether it is a foreach operator.

    The number is -1 for an unknown name. A foreach operator updates many parameters, so it does not run once per
    parameter.
    """
    ids, index = np.unique(op_column(trace, op, "name"), return_inverse=True)
    texts = [(trace.name(identity) or "").partition(".")[0] for identity in ids.tolist()]
    numbers: dict[str, int] = {"": -1}
    code = np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int64)
    is_foreach = np.array([text.startswith("aten::_foreach_") for text in texts], bool)
    return code[index], is_foreach[index]


def _run_starts(kind: Array, entry: Array) -> Array:
    """Return where runs of calls begin: at a change of kind, and where an optimizer with a closure is entered again."""
    if not len(kind):
        return np.empty(0, np.int64)
    again = (entry[1:] == 1) & (entry[:-1] == 0)
    return np.flatnonzero(np.append(True, (kind[1:] != kind[:-1]) | again))


def _extend(name: Array, first: Array, last: Array, limit: Array, is_foreach: Array | None) -> tuple[Array, bool]:
    """Extend each burst by the calls after it that continue it, although they have no call stack.

    In periodic bursts, a call continues the burst if the sequence of its name and the two names before it occurs within
    bursts. In other bursts, it continues the burst if its name occurs within bursts.

    Args:
        name: number of the operator name of each call, -1 where it is unknown.
        first: index of the first call that can belong to each burst.
        last: index of the last call of each burst that has a call stack.
        limit: index of the call at which each burst must end.
        is_foreach: whether each call is a foreach operator, for optimizers that update many parameters with one call;
            None for the others.

    Returns:
        The index of the last call of each burst, and ``OptimizerBursts.is_periodic``.
    """
    if not len(first) or len(name) < 3:
        return last, False
    code = name + 1
    triple = (code * (code.max() + 1) + np.append(0, code[:-1])) * (code.max() + 1) + np.append([0, 0], code[:-2])
    triple = np.where(name >= 0, triple, -1)
    inside = np.zeros(len(name) + 1, np.int64)
    np.add.at(inside, first, 1)
    np.add.at(inside, last + 1, -1)
    inner = np.cumsum(inside)[:-1] > 0
    kinds, number = np.unique(triple[inner], return_counts=True)
    # The first step also allocates the state of the optimizer; what occurs in fewer than half of the steps is ignored.
    frequent = number[2 * number >= len(first)]
    min_repeats = MIN_REPEATS_PER_STEP * len(first) * max(len(frequent), 1)
    is_periodic = is_foreach is None and bool(frequent.sum() >= min_repeats)
    if not is_periodic:
        triple, kinds = code, np.setdiff1d(code[inner if is_foreach is None else inner | is_foreach], [0])
    unrelated = np.append(np.flatnonzero(~np.isin(triple, kinds[kinds >= 0])), len(name))
    extended: Array = np.minimum(unrelated[np.searchsorted(unrelated, last + 1)], limit) - 1
    return extended, is_periodic


@dataclass(frozen=True)
class _CallOrigin:
    """Where each operator call comes from."""

    kind: Array
    """_OPTIMIZER, _OTHER, or _UNKNOWN without a call stack."""
    caller: Array
    """Number of the call stack that calls ``Optimizer.step``, -1 for other calls."""
    entry: Array
    """For an optimizer with a closure 1 at the entry of ``step`` and 0 after it; -1 for other calls."""


def _classify_calls(trace: Trace, op: Array) -> _CallOrigin:
    stack = op_column(trace, op, "stack")
    ids, index = np.unique(stack, return_inverse=True)
    callers: dict[tuple[Frame, ...], int] = {}
    closure_lines: dict[tuple[int, str], set[int]] = {}
    rows = []
    for identity in ids.tolist():
        frames = trace.frames(identity) if identity >= 0 else []
        outer = next((n for n in range(len(frames) - 1, -1, -1) if is_optimizer_frame(frames[n])), None)
        if outer is None:
            rows.append((_OTHER if frames else _UNKNOWN, -1, "", 0))
            continue
        caller = callers.setdefault(tuple(frames[outer + 1 :]), len(callers))
        step = next(n for n in range(outer, -1, -1) if _is_subclass_frame(frames[n]) or n == 0)
        runs_closure = any(not trace.code_owner.is_library(frame) for frame in frames[:step])
        if runs_closure:
            closure_lines.setdefault((caller, frames[step].file), set()).add(frames[step].line)
        rows.append((_OPTIMIZER, caller, frames[step].file, frames[step].line))
    entry = [
        -1 if (lines := closure_lines.get((caller, file))) is None else int(line == min(lines))
        for _, caller, file, line in rows
    ]
    kind = np.array([row[0] for row in rows], np.int8)[index]
    if not closure_lines:  # the forward and backward passes of a closure are part of the step
        elsewhere = (op_column(trace, op, "module") >= 0) | (op_column(trace, op, "phase") == PHASE["backward"])
        kind = np.where((kind == _UNKNOWN) & elsewhere, np.int8(_OTHER), kind)
    return _CallOrigin(kind, np.array([row[1] for row in rows], np.int64)[index], np.array(entry, np.int8)[index])


def _is_subclass_frame(frame: Frame) -> bool:
    return is_optimizer_frame(frame) and not is_optimizer_base_frame(frame)
