"""A training step of a trace as one pass through a chain of layers: which modules, and when each one runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Final

import numpy as np

from memtrace.analysis.attribution import PHASE, SPAN, step_rows
from memtrace.errors import TraceError
from memtrace.format.arrays import Array
from memtrace.trace import Trace

MAX_STEPS: Final = 20
"""Most steps, the last ones, whose times are looked at."""


@dataclass(frozen=True)
class Pass:
    """The first micro-batch of one step: forward through all layers, then backward. Times in ns."""

    step: int | None
    names: tuple[str, ...]
    starts_ns: Array
    """When each layer begins: the model's own start for the first, the call of its module for the others."""
    forward_end_ns: int
    """The end of the last forward operator, the loss included."""
    backward_start_ns: int
    backward_end_ns: int
    model_end_ns: int
    """When the model's own call returned."""

    def layers_at(self, times_ns: Array) -> Array:
        """The layer whose forward runs at each time; the first one before, the last one after."""
        place = np.searchsorted(self.starts_ns, times_ns, side="right") - 1
        return np.clip(place, 0, len(self.names) - 1)


@dataclass
class _Call:
    name: str
    start_ns: int
    end_ns: int
    children: list[_Call] = field(default_factory=list)


def passes(trace: Trace, layers: Sequence[str] = ()) -> list[Pass]:
    """The passes of the last complete steps, in order, all through the same layers.

    ``layers``: the modules to take as layers, as patterns of ``fnmatch`` on qualified names, with or without
    the name of the model; without it they are the repeated blocks of the model with what stands beside them,
    or the parts of a sequential model. The first step is left out where there are others: it warms up.

    Raises TraceError where the trace has no module calls, or no backward in a step.
    """
    found = []
    for step, begin, end in _steps(trace):
        one = _pass(trace, step, begin, end, layers)
        if one is not None:
            found.append(one)
    if not found:
        raise TraceError(
            f"{trace.path or 'the trace'} has no step with module calls and a backward: a pipeline is planned from "
            "a recording of a training loop (memtrace record), or from --costs"
        )
    last = found[-1]
    same = [one for one in found if one.names == last.names]
    return same[1:] if len(same) == len(found) and len(same) > 2 else same


def _steps(trace: Trace) -> list[tuple[int | None, int, int]]:
    """(number, start, end) of the last steps; the whole trace where it has none."""
    steps = step_rows(trace)
    if not len(steps.number):
        return [(None, 0, int(trace.columns("events", "time_ns")["time_ns"].max(initial=0)) + 1)]
    chosen = slice(max(0, len(steps.number) - MAX_STEPS), None)
    ends = steps.start_ns + steps.duration_ns
    return [
        (int(number), int(start), int(end))
        for number, start, end in zip(steps.number[chosen], steps.start_ns[chosen], ends[chosen], strict=True)
    ]


def _pass(trace: Trace, step: int | None, begin: int, end: int, patterns: Sequence[str]) -> Pass | None:
    roots = _calls(trace, begin, end)
    model = max(roots, key=_size, default=None)
    if model is None:
        return None
    ops = trace.columns("ops", "start_ns", "duration_ns", "phase")
    start, phase = ops["start_ns"], ops["phase"]
    backward = np.flatnonzero((phase == PHASE["backward"]) & (start >= model.end_ns) & (start < end))
    if not len(backward):
        return None
    backward_start = int(start[backward].min())
    # A further call of the model, or of another, begins the next micro-batch; one of its parts is recomputed.
    parts = set(_names(model))
    further = (root.start_ns for root in roots if root.start_ns > backward_start and root.name not in parts)
    next_call = min(further, default=end)
    backward = backward[start[backward] < next_call]
    forward = np.flatnonzero((phase == PHASE["forward"]) & (start >= model.start_ns) & (start < backward_start))
    ends = start + np.maximum(ops["duration_ns"], 0)
    calls = _named(model, patterns) if patterns else _layers(model)
    return Pass(
        step,
        tuple(call.name for call in calls),
        np.array([model.start_ns, *(call.start_ns for call in calls[1:])], dtype=np.int64),
        int(ends[forward].max(initial=model.end_ns)),
        backward_start,
        int(ends[backward].max()),
        model.end_ns,
    )


def _calls(trace: Trace, begin: int, end: int) -> list[_Call]:
    """The outermost module calls between two times, each with the calls inside it."""
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    start, duration = spans["start_ns"], spans["duration_ns"]
    chosen = np.flatnonzero((spans["kind"] == SPAN["module"]) & (start >= begin) & (start < end))
    # By start, the longer first: a caller comes before what it calls.
    chosen = chosen[np.lexsort((-duration[chosen], start[chosen]))]
    roots: list[_Call] = []
    open_calls: list[_Call] = []
    for row in chosen:
        name = trace.name(int(spans["name"][row])) or ""
        call = _Call(name, int(start[row]), int(start[row] + duration[row]))
        while open_calls and open_calls[-1].end_ns < call.end_ns:
            open_calls.pop()
        (open_calls[-1].children if open_calls else roots).append(call)
        open_calls.append(call)
    return roots


def _size(call: _Call) -> int:
    return 1 + sum(map(_size, call.children))


def _names(call: _Call) -> Iterator[str]:
    """The modules that ran inside a call."""
    for child in call.children:
        yield child.name
        yield from _names(child)


def _layers(model: _Call) -> list[_Call]:
    """The calls between which a model can be cut."""
    if _leads_to_blocks(model):
        return _down_to_blocks(model)
    return _sequential(model) or [model]


def _has_blocks(call: _Call) -> bool:
    """Whether the call runs several numbered modules that have modules of their own: blocks.0, blocks.1,
    ..."""
    families: dict[str, set[str]] = {}
    for child in call.children:
        family, _, number = child.name.rpartition(".")
        if number.isdecimal() and child.children:
            families.setdefault(family, set()).add(number)
    return any(len(numbers) > 1 for numbers in families.values())


def _leads_to_blocks(call: _Call) -> bool:
    return _has_blocks(call) or any(map(_leads_to_blocks, call.children))


def _down_to_blocks(call: _Call) -> list[_Call]:
    if _has_blocks(call):
        return call.children
    return [
        layer for child in call.children for layer in (_down_to_blocks(child) if _leads_to_blocks(child) else [child])
    ]


def _sequential(call: _Call) -> list[_Call]:
    """The parts of a model without repeated blocks: its children, sequential ones and wrappers opened."""

    def opens(child: _Call) -> bool:
        numbered = all(
            part.name.rpartition(".")[0] == child.name and part.name.rpartition(".")[2].isdecimal()
            for part in child.children
        )
        return bool(child.children) and numbered

    if len(call.children) == 1 and call.children[0].children:
        return _sequential(call.children[0])
    return [layer for child in call.children for layer in (_sequential(child) if opens(child) else [child])]


def _named(model: _Call, patterns: Sequence[str]) -> list[_Call]:
    def matches(name: str) -> bool:
        short = name.partition(".")[2]
        return any(fnmatchcase(name, pattern) or fnmatchcase(short, pattern) for pattern in patterns)

    def search(call: _Call) -> list[_Call]:
        return [call] if matches(call.name) else [found for child in call.children for found in search(child)]

    found = search(model)
    if not found:
        raise TraceError(f"no module called in a step matches {', '.join(patterns)}")
    if any(later.start_ns < earlier.end_ns for earlier, later in pairwise(found)):
        raise TraceError(f"the modules matching {', '.join(patterns)} do not run one after another")
    return found
