"""Training steps as passes through a chain of layers: which modules are the layers, and when each of them runs."""

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
"""Largest number of steps that are measured: the last ones of the trace."""


@dataclass(frozen=True)
class MicrobatchPass:
    """The first micro-batch of one step: forward through all layers, then backward."""

    step: int | None
    names: tuple[str, ...]
    starts_ns: Array
    """Start of each layer: for the first layer the start of the model's call, for the others that of their module."""
    forward_end_ns: int
    """End of the last forward operator, including the loss."""
    backward_start_ns: int
    backward_end_ns: int
    model_end_ns: int
    """End of the model's call."""

    def layers_at(self, times_ns: Array) -> Array:
        """The layer whose forward runs at each time; the first layer before the pass, the last layer after it."""
        place = np.searchsorted(self.starts_ns, times_ns, side="right") - 1
        return np.clip(place, 0, len(self.names) - 1)


@dataclass
class _Call:
    name: str
    start_ns: int
    end_ns: int
    children: list[_Call] = field(default_factory=list)


def find_passes(trace: Trace, layers: Sequence[str] = ()) -> list[MicrobatchPass]:
    """Find the passes of the last complete steps, in order, all through the same layers.

    The first step is left out where there are others, because it warms up.

    Args:
        trace: a single-rank trace.
        layers: the modules that are layers, as ``fnmatch`` patterns of qualified names with or without the name of the
            model. Empty: the repeated blocks of the model and the modules beside them, or the children of a sequential
            model.

    Raises:
        TraceError: the trace has no step with module calls and a backward, or the patterns do not match.
    """
    candidates = [_find_pass(trace, step, begin, end, layers) for step, begin, end in _steps(trace)]
    passes = [each for each in candidates if each is not None]
    if not passes:
        raise TraceError(
            f"{trace.path or 'trace'}: no step has module calls and a backward. Record a training loop with memtrace "
            "record or memtrace.record(model=...), or give the layer costs as JSON."
        )
    same = [each for each in passes if each.names == passes[-1].names]
    return same[1:] if len(same) == len(passes) and len(same) > 2 else same


def _steps(trace: Trace) -> list[tuple[int | None, int, int]]:
    """(number, start, end) of the last steps; the whole trace where it has no steps."""
    steps = step_rows(trace)
    if not len(steps.number):
        return [(None, 0, int(trace.columns("events", "time_ns")["time_ns"].max(initial=0)) + 1)]
    chosen = slice(max(0, len(steps.number) - MAX_STEPS), None)
    ends = steps.start_ns + steps.duration_ns
    return [
        (int(number), int(start), int(end))
        for number, start, end in zip(steps.number[chosen], steps.start_ns[chosen], ends[chosen], strict=True)
    ]


def _find_pass(trace: Trace, step: int | None, begin: int, end: int, patterns: Sequence[str]) -> MicrobatchPass | None:
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
    # Another call of the model begins the next micro-batch; a call of one of its modules is recomputation.
    parts = set(_names(model))
    further = (root.start_ns for root in roots if root.start_ns > backward_start and root.name not in parts)
    next_call = min(further, default=end)
    backward = backward[start[backward] < next_call]
    forward = np.flatnonzero((phase == PHASE["forward"]) & (start >= model.start_ns) & (start < backward_start))
    ends = start + np.maximum(ops["duration_ns"], 0)
    calls = _named(model, patterns) if patterns else _layers(model)
    return MicrobatchPass(
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
    # By start, longer calls first: a caller comes before the modules that it calls.
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
    """The calls that are layers: a stage may begin with each of them."""
    if _leads_to_blocks(model):
        return _down_to_blocks(model)
    return _sequential(model) or [model]


def _has_blocks(call: _Call) -> bool:
    """Whether the call runs several numbered modules that have children: blocks.0, blocks.1, ..."""
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
    """The layers of a model without repeated blocks: its children, with sequential containers and wrappers opened."""

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
        return [call] if matches(call.name) else [match for child in call.children for match in search(child)]

    calls = search(model)
    if not calls:
        raise TraceError(f"no module called in a step matches {', '.join(patterns)}")
    if any(later.start_ns < earlier.end_ns for earlier, later in pairwise(calls)):
        raise TraceError(f"the modules that match {', '.join(patterns)} do not run one after another")
    return calls
