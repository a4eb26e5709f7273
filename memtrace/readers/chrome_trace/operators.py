"""Finds the operator call, phase, module and call stack of each memory event in a Chrome trace.

An event belongs to the outermost operator around it on its thread: to ``aten::linear`` rather than to the
``aten::empty`` in it. Nodes of the autograd graph (``AddmmBackward0``) and ranges are not operators; an event that is
in no operator belongs to the outermost node or range around it. A backward operator has the module and the call stack
of the forward operator that created its node.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from memtrace.format.encode import Known, Text, make_table
from memtrace.format.schema import PHASES
from memtrace.frames import BACKWARD, FORWARD, OPTIMIZER, parse_profiler_function
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


class ModuleCall(NamedTuple):
    """One forward call of a module; times are nanoseconds on the clock of the file."""

    module: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class NestedSlices:
    """The slices of one kind, nested; the arrays have the order of the nesting."""

    nesting: Nesting
    name: Array
    """Indices into ``Collector.names``."""
    sequence_nr: Array
    """Sequence numbers of autograd, -1 for none."""

    @classmethod
    def of(cls, slices: Slices) -> NestedSlices:
        """Nest collected slices."""
        name, start, end, thread, number = slices.columns()
        nesting = Nesting.of(thread, start, end)
        return cls(nesting, name[nesting.order], number[nesting.order])


@dataclass(frozen=True)
class OperatorCalls:
    """The operator calls around memory events."""

    table: pa.Table
    """The table ``ops``."""
    of_event: Array
    """For each memory event its ``op_id``, -1 for none."""


def find_operator_calls(
    collector: Collector, thread: Array, time_ns: Array, names: Names, *, t0_ns: int
) -> OperatorCalls:
    """Find the operator calls around memory events.

    Args:
        collector: the trace events.
        thread: the thread of each memory event.
        time_ns: the time of each memory event on the clock of the file.
        names: the table that receives the names of operators and modules and the call stacks.
        t0_ns: time at which the trace begins.
    """
    operators, functions = NestedSlices.of(collector.operators), NestedSlices.of(collector.functions)
    engine = _names_starting(collector, _ENGINE)[operators.name]
    in_engine, number = _in_backward_pass(operators, engine | _is_node(collector)[operators.name])
    nesting = operators.nesting
    root = _outermost(nesting, _is_operator(collector)[operators.name])
    root = np.where(root >= 0, root, _outermost(nesting, ~engine))
    innermost = nesting.innermost(thread, time_ns)
    of_event = np.where(innermost >= 0, root[innermost], -1) if len(root) else innermost
    calls, op_id = np.unique(of_event[of_event >= 0], return_inverse=True)
    op_of_event = np.full(len(of_event), -1, np.int64)
    op_of_event[of_event >= 0] = op_id
    call_thread, start = nesting.thread[calls], nesting.start_ns[calls]
    forward = _forward_calls(operators, root, in_engine, number, calls)
    source = np.where(forward >= 0, forward, calls)
    around = functions.nesting.innermost(nesting.thread[source], nesting.start_ns[source])
    module = _modules(collector, functions, around, names)
    phase = _phases(collector, operators, calls, in_engine, inside_module=module >= 0)
    stack = _stacks(collector, functions, around, names)
    number = number[calls]
    texts = collector.names
    table = make_table(
        "ops",
        len(calls),
        {
            "op_id": np.arange(len(calls)),
            "name": np.array(
                [names.text("operator", texts[name]) for name in operators.name[calls].tolist()], np.int64
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
    return OperatorCalls(table, op_of_event)


def _names_starting(collector: Collector, prefix: str) -> Array:
    """Return for each name of a slice whether it starts with ``prefix``."""
    return np.array([name.startswith(prefix) for name in collector.names], bool)


def _is_operator(collector: Collector) -> Array:
    """Return for each name of a slice whether it is the name of an operator, ``library::name``."""
    return np.array(["::" in name and not name.startswith(_AUTOGRAD) for name in collector.names], bool)


def _is_node(collector: Collector) -> Array:
    """Return for each name of a slice whether it is the name of a backward node.

    Before 2022, the nodes were the only sign of autograd's engine in a trace.
    """
    return np.array([_NODE.search(name) is not None for name in collector.names], bool)


def _outermost(nesting: Nesting, candidate: Array) -> Array:
    """Return for each slice the outermost candidate among the slice and those around it; -1 for none."""
    result = np.where(candidate, np.arange(len(candidate)), -1)
    for level in range(1, int(nesting.depth.max(initial=0)) + 1):
        rows = np.flatnonzero((nesting.depth == level) & (nesting.parent >= 0))
        around = result[nesting.parent[rows]]
        result[rows] = np.where(around >= 0, around, result[rows])
    return result


def _in_backward_pass(operators: NestedSlices, backward: Array) -> tuple[Array, Array]:
    """Return for each operator whether it is in a slice of the backward pass, and its sequence number.

    In the backward pass, an operator without a sequence number has that of the node around it.
    """
    nesting = operators.nesting
    inside, number = backward.copy(), operators.sequence_nr.copy()
    for level in range(1, int(nesting.depth.max(initial=0)) + 1):
        rows = np.flatnonzero((nesting.depth == level) & (nesting.parent >= 0))
        parent = nesting.parent[rows]
        inside[rows] |= inside[parent]
        inherits = inside[rows] & (number[rows] < 0)
        number[rows[inherits]] = number[parent[inherits]]
    return inside, number


def _forward_calls(operators: NestedSlices, root: Array, in_engine: Array, number: Array, calls: Array) -> Array:
    """Return for each call in the backward pass the forward call that created its node; -1 for none.

    The two calls have the same sequence number.
    """
    forward = np.flatnonzero(~in_engine & (operators.sequence_nr >= 0))
    start = operators.nesting.start_ns
    forward = forward[np.lexsort((start[forward], operators.sequence_nr[forward]))]
    forward_numbers, call_numbers = operators.sequence_nr[forward], number[calls]
    # Operators before the one that created the node have the same number, so the last forward operator is taken.
    index = np.searchsorted(forward_numbers, call_numbers, side="right") - 1
    matched = np.flatnonzero(in_engine[calls] & (call_numbers >= 0) & (index >= 0))
    matched = matched[forward_numbers[index[matched]] == call_numbers[matched]]
    result = np.full(len(calls), -1, np.int64)
    result[matched] = root[forward[index[matched]]]
    return result


def _phases(
    collector: Collector, operators: NestedSlices, calls: Array, in_engine: Array, *, inside_module: Array
) -> Array:
    """Return the phase of each call as an index into PHASES; -1 where it is unknown."""
    annotations = NestedSlices.of(collector.annotations)
    stepping = _names_starting(collector, _OPTIMIZER_STEP)
    nesting = operators.nesting
    around = annotations.nesting.innermost(nesting.thread[calls], nesting.start_ns[calls])
    optimizer = np.zeros(len(calls), bool)
    while (around >= 0).any():
        optimizer |= (around >= 0) & stepping[annotations.name[around]]
        around = np.where(around >= 0, annotations.nesting.parent[around], -1)
    phase = np.full(len(calls), -1, np.int8)
    # An operator that creates a node of the autograd graph has a sequence number.
    phase[inside_module | (operators.sequence_nr[calls] >= 0)] = FORWARD
    phase[optimizer] = OPTIMIZER
    phase[in_engine[calls]] = BACKWARD
    return phase


def _modules(collector: Collector, functions: NestedSlices, around: Array, names: Names) -> Array:
    """Return the innermost module call around each call as an id in the table ``names``; -1 for none.

    ``around`` is the innermost function around each call, a row of ``functions``.
    """
    is_module = _names_starting(collector, _MODULE)
    texts = collector.names
    around = around.copy()
    module = np.full(len(around), -1, np.int64)
    while (around >= 0).any():
        reached = (around >= 0) & (module < 0) & is_module[functions.name[around]]
        for call in np.flatnonzero(reached).tolist():
            module[call] = names.text("module", texts[functions.name[around[call]]][len(_MODULE) :])
        around = np.where((around >= 0) & (module < 0), functions.nesting.parent[around], -1)
    return module


def _stacks(collector: Collector, functions: NestedSlices, around: Array, names: Names) -> Array:
    """Return the Python call stack of each call as an id in the table ``names``; -1 for none.

    ``around`` is the innermost function around each call, a row of ``functions``.
    """
    texts = collector.names
    frame_of: dict[int, int] = {}
    frames_of: dict[int, tuple[int, ...]] = {-1: ()}
    stacks = np.full(len(around), -1, np.int64)
    for call, row in enumerate(around.tolist()):
        path = []
        while row not in frames_of:
            path.append(row)
            row = int(functions.nesting.parent[row])
        for inner in reversed(path):
            outer = int(functions.nesting.parent[inner])
            name = int(functions.name[inner])
            if name not in frame_of:
                frame = parse_profiler_function(texts[name])
                frame_of[name] = names.frame(frame.file, frame.line, frame.function) if frame else -1
            inner_frame = (frame_of[name],) if frame_of[name] >= 0 else ()
            frames_of[inner] = inner_frame + frames_of[outer]
        stacks[call] = names.stack(frames_of[int(around[call])])
    return stacks


def module_calls(collector: Collector) -> list[ModuleCall]:
    """Return the forward calls of modules."""
    is_module = _names_starting(collector, _MODULE)
    texts = collector.names
    name, start, end, _, _ = collector.functions.columns()
    return [
        ModuleCall(texts[name[row]][len(_MODULE) :], int(start[row]), int(end[row]))
        for row in np.flatnonzero(is_module[name] if len(name) else np.zeros(0, bool)).tolist()
    ]
