"""Steps of optimizers told by the stacks of what they allocate: where each ends, without marks or ranges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.event_codes import KIND, PHASE
from memtrace.analysis.operators import op_column
from memtrace.analysis.sites import is_internal
from memtrace.format.arrays import Array
from memtrace.trace import Frame, Trace

_OTHER, _UNKNOWN, _OPTIMIZER = 0, -1, 1
_BEAT = 1.25
_NOT_STEPS = ("lr_scheduler.py", "swa_utils.py")


@dataclass(frozen=True)
class Bursts:
    """What an optimizer allocates in one call of ``step``: rows [first[k], end[k]) of events.

    ``caller`` numbers the line that calls it: by it several optimizers are told apart. ``inside``: a
    backward goes on behind it, whose hooks step parameter by parameter. ``has_beat``: they repeat what
    they do for parameter after parameter, which tells the end of those whose last operators have no stack.
    """

    first: Array
    end: Array
    caller: Array
    inside: Array
    has_beat: bool

    def __len__(self) -> int:
        return len(self.first)


def bursts(trace: Trace) -> Bursts:
    """The calls of optimizers' steps, worked out once; empty without stacks, and where they allocate nothing."""
    return trace.cached(_bursts)


def ends_of_rounds(found: Bursts) -> Array:
    """The rows at which steps end: where an optimizer begins that has stepped since the last end, the one before it
    ended a step, so that several optimizers that take turns make one. No step ends inside a backward."""
    ends, seen = [], set[int]()
    for place, caller in enumerate(found.caller.tolist()):
        if caller in seen and not found.inside[place - 1]:
            ends.append(int(found.end[place - 1]))
            seen.clear()
        seen.add(caller)
    if len(found):
        ends.append(int(found.end[-1]))
    return np.array(ends, np.int64)


def _bursts(trace: Trace) -> Bursts:
    events = trace.columns("events", "kind", "op_id")
    acts = np.isin(events["kind"], [KIND["alloc"], KIND["read"], KIND["write"]]) & (events["op_id"] >= 0)
    rows = np.flatnonzero(acts)
    op = events["op_id"][rows]
    begins = np.flatnonzero(np.append(True, op[1:] != op[:-1])) if len(op) else np.empty(0, np.int64)
    first, last, op = rows[begins], rows[np.append(begins[1:], len(rows))[: len(begins)] - 1], op[begins]
    kind, caller, entry = _of_calls(trace, op)
    told = np.flatnonzero(kind != _UNKNOWN)
    starts = _starts(kind[told], entry[told])
    ends = np.append(starts[1:], len(told))
    mine = kind[told[starts]] == _OPTIMIZER if len(starts) else np.empty(0, bool)
    burst_first, burst_last = told[starts[mine]], told[ends[mine] - 1]
    # The steps of small parameters have no stacks: what comes in the middle of the others' may come behind the last.
    limit = np.append(told, len(op))[ends[mine]]
    since = np.append(0, told + 1)[starts[mine]]
    name, at_once = _operators(trace, op)
    by_parameter = 2 * int(at_once[kind == _OPTIMIZER].sum()) <= int((kind == _OPTIMIZER).sum())
    burst_last, has_beat = _extended(name, since, burst_last, limit, None if by_parameter else at_once)
    backward = np.append(op_column(trace, op, "phase") == PHASE["backward"], False)
    inside = backward[np.append(told, -1)[ends[mine]]]
    return Bursts(first[burst_first], last[burst_last] + 1, caller[told[ends[mine] - 1]], inside, has_beat)


def _operators(trace: Trace, op: Array) -> tuple[Array, Array]:
    """Of each operator call a number for its name without the overload (-1: unknown), and whether it is one of many
    parameters at once, which comes as often as an optimizer needs it and not for every parameter."""
    ids, place = np.unique(op_column(trace, op, "name"), return_inverse=True)
    texts = [(trace.name(identity) or "").partition(".")[0] for identity in ids.tolist()]
    numbers: dict[str, int] = {"": -1}
    code = np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int64)
    at_once = np.array([text.startswith("aten::_foreach_") for text in texts], bool)
    return code[place], at_once[place]


def _starts(kind: Array, entry: Array) -> Array:
    """Where a run of calls begins: of another kind, or of an optimizer with a closure that is entered anew."""
    if not len(kind):
        return np.empty(0, np.int64)
    again = (entry[1:] == 1) & (entry[:-1] == 0)
    return np.flatnonzero(np.append(True, (kind[1:] != kind[:-1]) | again))


def _extended(name: Array, first: Array, last: Array, limit: Array, at_once: Array | None) -> tuple[Array, bool]:
    """The last call of each burst (and ``has_beat``), with those behind it that go on as in the middle of bursts: each
    operator has the same two before it, or where bursts have no beat of their own, it comes in them.

    ``at_once``: of optimizers that work on many parameters at once the calls that do: they have no beat and are theirs.
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
    usual = number[2 * number >= len(first)]  # the first step makes the state as well
    has_beat = at_once is None and bool(usual.sum() >= _BEAT * len(first) * max(len(usual), 1))
    if not has_beat:
        triple, kinds = code, np.setdiff1d(code[inner if at_once is None else inner | at_once], [0])
    odd = np.append(np.flatnonzero(~np.isin(triple, kinds[kinds >= 0])), len(name))
    extended: Array = np.minimum(odd[np.searchsorted(odd, last + 1)], limit) - 1
    return extended, has_beat


def _of_calls(trace: Trace, op: Array) -> tuple[Array, Array, Array]:
    """Of each operator call whether an optimizer's step made it, from which line (numbered), and for one that runs a
    closure whether it is at its entry (1), further on (0), or has none (-1)."""
    stack = op_column(trace, op, "stack")
    ids, place = np.unique(stack, return_inverse=True)
    callers: dict[tuple[Frame, ...], int] = {}
    lines: dict[tuple[int, str], set[int]] = {}
    told = []
    for identity in ids.tolist():
        frames = trace.frames(identity) if identity >= 0 else []
        outer = next((n for n in range(len(frames) - 1, -1, -1) if _is_step(frames[n])), None)
        if outer is None:
            told.append((_OTHER if frames else _UNKNOWN, -1, "", 0))
            continue
        caller = callers.setdefault(tuple(frames[outer + 1 :]), len(callers))
        step = next(n for n in range(outer, -1, -1) if _is_own_step(frames[n]) or n == 0)
        closure = any(not is_internal(frame) for frame in frames[:step])
        if closure:
            lines.setdefault((caller, frames[step].file), set()).add(frames[step].line)
        told.append((_OPTIMIZER, caller, frames[step].file, frames[step].line))
    entry = [
        -1 if (where := lines.get((caller, file))) is None else int(line == min(where))
        for _, caller, file, line in told
    ]
    kind = np.array([row[0] for row in told], np.int8)[place]
    if not lines:  # a closure's forward and backward are part of the step
        elsewhere = (op_column(trace, op, "module") >= 0) | (op_column(trace, op, "phase") == PHASE["backward"])
        kind = np.where((kind == _UNKNOWN) & elsewhere, np.int8(_OTHER), kind)
    return kind, np.array([row[1] for row in told], np.int64)[place], np.array(entry, np.int8)[place]


def _is_step(frame: Frame) -> bool:
    file = frame.file.replace("\\", "/")
    return "torch/optim/" in file and not file.endswith(_NOT_STEPS)


def _is_own_step(frame: Frame) -> bool:
    return _is_step(frame) and not frame.file.replace("\\", "/").endswith("torch/optim/optimizer.py")
