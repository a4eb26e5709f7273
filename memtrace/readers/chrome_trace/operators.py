"""Which operator call, phase, module and line a memory event of a Chrome trace belongs to.

An event belongs to the outermost operator around it on its thread: ``aten::linear`` rather than the ``aten::empty`` in
it. Nodes of the autograd graph (``AddmmBackward0``) and ranges are not operators; an event in none but those belongs to
the outermost of them. A backward operator has the module and the stack of the forward operator that made its node.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.format.encode import Known, Text, make_table
from memtrace.format.schema import PHASES
from memtrace.readers.chrome_trace.collect import Collector, Slices
from memtrace.readers.chrome_trace.nesting import Nesting
from memtrace.readers.tables import Array, Names

if TYPE_CHECKING:
    import pyarrow as pa

_ENGINE: Final = "autograd::engine::evaluate_function: "
_AUTOGRAD: Final = ("autograd::", "torch::autograd::")
_NODE: Final = re.compile(r"^torch::autograd::|^[^:]*Backward\d*$")
_OPTIMIZER_STEP: Final = "Optimizer.step#"
_MODULE: Final = "nn.Module: "
_PYTHON_FRAME: Final = re.compile(r"(.+)\((\d{1,9})\): (.*)")
_FORWARD, _BACKWARD, _OPTIMIZER = (PHASES.index(name) for name in ("forward", "backward", "optimizer"))


@dataclass(frozen=True)
class Layer:
    """The slices of one kind, nested, with their columns in the order of the nesting."""

    nesting: Nesting
    name: Array
    sequence_nr: Array

    @classmethod
    def of(cls, slices: Slices) -> Layer:
        """Nest collected slices."""
        name, start, end, thread, number = slices.columns()
        nesting = Nesting.of(thread, start, end)
        return cls(nesting, name[nesting.order], number[nesting.order])


@dataclass(frozen=True)
class OperatorCalls:
    """The table ``ops`` and the call of each memory event, -1 for none."""

    table: pa.Table
    of_event: Array


def operator_calls(found: Collector, thread: Array, time_ns: Array, names: Names, *, t0_ns: int) -> OperatorCalls:
    """The operator calls around memory events at (thread, time)."""
    operators, functions = Layer.of(found.operators), Layer.of(found.functions)
    engine = _names_starting(found, _ENGINE)[operators.name]
    in_engine, number = _inherited(operators, engine | _is_node(found)[operators.name])
    nesting = operators.nesting
    root = _outermost(nesting, _is_operator(found)[operators.name])
    root = np.where(root >= 0, root, _outermost(nesting, ~engine))
    innermost = nesting.innermost(thread, time_ns)
    of_event = np.where(innermost >= 0, root[innermost], -1) if len(root) else innermost
    calls, place = np.unique(of_event[of_event >= 0], return_inverse=True)
    numbered = np.full(len(of_event), -1, np.int64)
    numbered[of_event >= 0] = place
    call_thread, start = nesting.thread[calls], nesting.start_ns[calls]
    forward = _forward_calls(operators, root, in_engine, number, calls)
    source = np.where(forward >= 0, forward, calls)
    around = functions.nesting.innermost(nesting.thread[source], nesting.start_ns[source])
    module = _modules(found, functions, around, names)
    phase = _phases(found, operators, calls, in_engine, inside_module=module >= 0)
    stack = _stacks(found, functions, around, names)
    number = number[calls]
    texts = found.names
    table = make_table(
        "ops",
        len(calls),
        {
            "op_id": np.arange(len(calls)),
            "name": np.array(
                [names.text("operator", texts[item]) for item in operators.name[calls].tolist()], np.int64
            ),
            "start_ns": start - t0_ns,
            "duration_ns": nesting.end_ns[calls] - start,
            "thread": call_thread,
            "module": Known(module, module >= 0),
            "phase": Text(phase, PHASES),
            "stack": Known(stack, stack >= 0),
            "sequence_nr": Known(number, number >= 0),
        },
    )
    return OperatorCalls(table, numbered)


def _names_starting(found: Collector, prefix: str) -> Array:
    """For each name id whether the name starts so."""
    return np.array([name.startswith(prefix) for name in found.names], bool)


def _is_operator(found: Collector) -> Array:
    """For each name id whether it is an operator's, ``library::name``."""
    return np.array(["::" in name and not name.startswith(_AUTOGRAD) for name in found.names], bool)


def _is_node(found: Collector) -> Array:
    """For each name id whether it is a backward node's: before 2022 nothing else told of the engine."""
    return np.array([_NODE.search(name) is not None for name in found.names], bool)


def _outermost(nesting: Nesting, counts: Array) -> Array:
    """For each slice the outermost one, of it and those around it, that ``counts``; -1 where none does."""
    found = np.where(counts, np.arange(len(counts)), -1)
    for level in range(1, int(nesting.depth.max(initial=0)) + 1):
        rows = np.flatnonzero((nesting.depth == level) & (nesting.parent >= 0))
        around = found[nesting.parent[rows]]
        found[rows] = np.where(around >= 0, around, found[rows])
    return found


def _inherited(operators: Layer, backward: Array) -> tuple[Array, Array]:
    """For each operator whether a slice of the backward is around it, and its sequence number: there that of the node
    around it where it has none."""
    nesting = operators.nesting
    inside, number = backward.copy(), operators.sequence_nr.copy()
    for level in range(1, int(nesting.depth.max(initial=0)) + 1):
        rows = np.flatnonzero((nesting.depth == level) & (nesting.parent >= 0))
        parent = nesting.parent[rows]
        inside[rows] |= inside[parent]
        takes = inside[rows] & (number[rows] < 0)
        number[rows[takes]] = number[parent[takes]]
    return inside, number


def _forward_calls(operators: Layer, root: Array, in_engine: Array, number: Array, calls: Array) -> Array:
    """For each call within the engine the forward call that made its node, by the sequence number; -1 where none is."""
    forward = np.flatnonzero(~in_engine & (operators.sequence_nr >= 0))
    start = operators.nesting.start_ns
    forward = forward[np.lexsort((start[forward], operators.sequence_nr[forward]))]
    numbers, wanted = operators.sequence_nr[forward], number[calls]
    # The last with the number: operators before the one that made the node carry the same number.
    place = np.searchsorted(numbers, wanted, side="right") - 1
    hit = np.flatnonzero(in_engine[calls] & (wanted >= 0) & (place >= 0))
    hit = hit[numbers[place[hit]] == wanted[hit]]
    found = np.full(len(calls), -1, np.int64)
    found[hit] = root[forward[place[hit]]]
    return found


def _phases(found: Collector, operators: Layer, calls: Array, in_engine: Array, *, inside_module: Array) -> Array:
    """The phase of each call, as a code; -1 where nothing tells it."""
    annotations = Layer.of(found.annotations)
    stepping = _names_starting(found, _OPTIMIZER_STEP)
    nesting = operators.nesting
    around = annotations.nesting.innermost(nesting.thread[calls], nesting.start_ns[calls])
    optimizer = np.zeros(len(calls), bool)
    while (around >= 0).any():
        optimizer |= (around >= 0) & stepping[annotations.name[around]]
        around = np.where(around >= 0, annotations.nesting.parent[around], -1)
    phase = np.full(len(calls), -1, np.int8)
    # An operator that made a node of the autograd graph has a sequence number.
    phase[inside_module | (operators.sequence_nr[calls] >= 0)] = _FORWARD
    phase[optimizer] = _OPTIMIZER
    phase[in_engine[calls]] = _BACKWARD
    return phase


def _modules(found: Collector, functions: Layer, around: Array, names: Names) -> Array:
    """The innermost module call around each place, as an id of names; -1 for none."""
    is_module = _names_starting(found, _MODULE)
    texts = found.names
    around = around.copy()
    module = np.full(len(around), -1, np.int64)
    while (around >= 0).any():
        hit = (around >= 0) & (module < 0) & is_module[functions.name[around]]
        for place in np.flatnonzero(hit).tolist():
            module[place] = names.text("module", texts[functions.name[around[place]]][len(_MODULE) :])
        around = np.where((around >= 0) & (module < 0), functions.nesting.parent[around], -1)
    return module


def _stacks(found: Collector, functions: Layer, around: Array, names: Names) -> Array:
    """The Python stack at each place, as an id of names; -1 for none."""
    texts = found.names
    frame_of: dict[int, int] = {}
    frames_of: dict[int, tuple[int, ...]] = {-1: ()}
    stacks = np.full(len(around), -1, np.int64)
    for place, row in enumerate(around.tolist()):
        path = []
        while row not in frames_of:
            path.append(row)
            row = int(functions.nesting.parent[row])
        for inner in reversed(path):
            outer = int(functions.nesting.parent[inner])
            name = int(functions.name[inner])
            if name not in frame_of:
                match = _PYTHON_FRAME.fullmatch(texts[name])
                frame_of[name] = names.frame(match[1], int(match[2]), match[3]) if match else -1
            own = (frame_of[name],) if frame_of[name] >= 0 else ()
            frames_of[inner] = own + frames_of[outer]
        stacks[place] = names.stack(frames_of[int(around[place])])
    return stacks


def module_spans(found: Collector) -> list[tuple[str, int, int, int]]:
    """Name, start, end and thread of each module call."""
    is_module = _names_starting(found, _MODULE)
    texts = found.names
    name, start, end, thread, _ = found.functions.columns()
    return [
        (texts[name[row]][len(_MODULE) :], int(start[row]), int(end[row]), int(thread[row]))
        for row in np.flatnonzero(is_module[name] if len(name) else np.zeros(0, bool)).tolist()
    ]
