"""The module calls that can be checkpointed: what they save, when backward repeats them, and where that stops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, op_column, step_rows
from memtrace.analysis.block_accesses import operator_end_rows
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.warm_up import steps_after_warm_up
from memtrace.format.arrays import Array
from memtrace.planning.module_calls import ModuleCalls, find_module_calls
from memtrace.planning.recompute_graph import AutogradGraph, read_graph
from memtrace.planning.recorded_step import RecordedStep
from memtrace.trace import Trace

_NONE: Final = 1 << 60


@dataclass(frozen=True)
class CheckpointableCalls:
    """The module calls of a step, with what checkpointing each of them means. Rows of events, one element per call."""

    calls: ModuleCalls
    graph: AutogradGraph
    inputs: tuple[Array, Array]
    """Pairs of a block and a call that reads it although the block is older than the call."""
    repeat_row: Array
    """Row of backward before which the call would be repeated: that of the first node that needs what it saved."""
    release_row: Array
    """Row of backward after which the call's last node has released what it saved."""
    stop_row: Array
    """Row of forward at which the repeated call stops, because the last tensor has been saved."""
    is_candidate: Array
    """Whether the call can be checkpointed: backward runs its nodes, the program does not already checkpoint in it, and
    its inputs are not written before backward."""
    checkpointed_modules: frozenset[int]
    """Modules in which the program itself recomputes."""


def find_checkpointable_calls(trace: Trace, step: RecordedStep) -> CheckpointableCalls:
    """Return the module calls of a recorded step and what checkpointing each of them means."""
    calls = find_module_calls(trace, step.start_ns, step.start_ns + step.duration_ns)
    graph = read_graph(trace, step)
    node, call = nested_pairs(calls, graph.nodes.position)
    repeat, release, stop = (np.full(len(calls), value, np.int64) for value in (_NONE, -1, -1))
    np.minimum.at(repeat, call, graph.nodes.backward_row[node])
    np.maximum.at(release, call, graph.nodes.release_row[node])
    stop_of_node = np.where(graph.nodes.saves_output, graph.nodes.created_row, graph.nodes.position)
    np.maximum.at(stop, call, stop_of_node[node])
    checkpointed = _checkpointed_modules(trace, step)
    blocked = np.zeros(len(calls), bool)
    for number in np.flatnonzero(np.isin(calls.module, list(checkpointed))).tolist():
        blocked[calls.chain(number)] = True
        blocked |= (calls.first_row >= calls.first_row[number]) & (calls.end_row <= calls.end_row[number])
    inputs = _find_inputs(trace, step, calls)
    blocked[inputs[1][_is_written(trace, step, calls, *inputs)]] = True
    return CheckpointableCalls(
        calls=calls,
        graph=graph,
        inputs=inputs,
        repeat_row=repeat,
        release_row=release,
        stop_row=np.minimum(stop, calls.end_row),
        is_candidate=(release >= 0) & ~blocked & ~_is_recursive(calls),
        checkpointed_modules=frozenset(checkpointed),
    )


def nested_pairs(calls: ModuleCalls, rows: Array) -> tuple[Array, Array]:
    """Return the pairs of a position in ``rows`` and a call that contains the row, inner calls first."""
    element, call = np.arange(len(rows)), calls.innermost_at(rows)
    pairs = []
    while (inside := call >= 0).any():
        element, call = element[inside], call[inside]
        pairs.append((element, call))
        call = calls.parent[call]
    if not pairs:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.concatenate([first for first, _ in pairs]), np.concatenate([second for _, second in pairs])


def _find_inputs(trace: Trace, step: RecordedStep, calls: ModuleCalls) -> tuple[Array, Array]:
    """Return the pairs of a block and a call that reads it in forward although the block is older than the call."""
    rows, block = _forward_accesses(trace, step, "read")
    element, call = nested_pairs(calls, rows)
    block = block[element]
    is_input = blocks(trace).alloc_event[block] < calls.first_row[call]
    pair = np.unique(block[is_input] * len(calls) + call[is_input]) if len(calls) else np.zeros(0, np.int64)
    return pair // max(len(calls), 1), pair % max(len(calls), 1)


def _is_written(trace: Trace, step: RecordedStep, calls: ModuleCalls, block: Array, call: Array) -> Array:
    """Return for each input of a call whether forward writes it during the call or later: it would not be repeatable.

    Buffers of modules are excepted, because they are restored before the repetition.
    """
    table = blocks(trace)
    rows, written = _forward_accesses(trace, step, "write")
    last = np.full(len(table), -1, np.int64)
    np.maximum.at(last, written, rows)
    is_state = table.category[block] == CATEGORY["parameter"]
    result: Array = ~is_state & (last[block] >= calls.first_row[call])
    return result


def estimate_program_ends(trace: Trace, step: RecordedStep, calls: ModuleCalls) -> Array:
    """Return for each block the row of forward after which the program no longer holds it, if only autograd does then.

    An output that a later call reads is held until that call returns, because the caller passes it as an argument.
    """
    rows, block = _forward_accesses(trace, step, "read")
    table = blocks(trace)
    begin = np.maximum(table.alloc_event, 0)
    last = np.full(len(table), -1, np.int64)
    np.maximum.at(last, block, rows)
    last = np.maximum(last, begin)
    end = operator_end_rows(trace, last)
    if not len(calls):
        return end
    reader = calls.outermost_without(last, begin)
    return np.where(reader >= 0, np.maximum(calls.end_row[reader] - 1, end), end)


def median_durations(trace: Trace) -> dict[int, float]:
    """Return for each module the median over the steps after warm-up of the time in its forward calls, ns."""
    steps = step_rows(trace)
    chosen = np.isin(steps.number, steps_after_warm_up(trace))
    totals: list[dict[int, int]] = []
    for start, duration in zip(steps.start_ns[chosen].tolist(), steps.duration_ns[chosen].tolist(), strict=True):
        calls = find_module_calls(trace, start, start + duration)
        outer = ~_is_recursive(calls)
        of_step: dict[int, int] = {}
        for module, time in zip(calls.module[outer].tolist(), calls.duration_ns[outer].tolist(), strict=True):
            of_step[module] = of_step.get(module, 0) + time
        totals.append(of_step)
    modules = {module for of_step in totals for module in of_step}
    return {
        module: float(np.median([of_step[module] for of_step in totals if module in of_step])) for module in modules
    }


def _forward_accesses(trace: Trace, step: RecordedStep, kind: Literal["read", "write"]) -> tuple[Array, Array]:
    """Return the rows at which forward operators of a step read or write a block, and the blocks."""
    events = trace.columns("events", "kind", "block_id", "op_id")
    rows = np.arange(step.first_row, step.end_row)
    rows = rows[(events["kind"][rows] == KIND[kind]) & (events["block_id"][rows] >= 0)]
    op = events["op_id"][rows]
    rows = rows[(op_column(trace, op, "phase") == PHASE["forward"]) & ~op_column(trace, op, "recompute")]
    return rows, events["block_id"][rows].astype(np.int64)


def _checkpointed_modules(trace: Trace, step: RecordedStep) -> set[int]:
    """Return the modules of the operators that run again in backward."""
    op = trace.columns("events", "op_id")["op_id"][step.first_row : step.end_row]
    op = np.unique(op[op >= 0])
    return set(op_column(trace, op[op_column(trace, op, "recompute")], "module").tolist()) - {-1}


def _is_recursive(calls: ModuleCalls) -> Array:
    """Return for each call whether it runs inside another call of the same module."""
    result, outer = np.zeros(len(calls), bool), calls.parent
    while (outer >= 0).any():
        result |= (outer >= 0) & (calls.module[outer] == calls.module)
        outer = np.where(outer >= 0, calls.parent[outer], -1)
    return result
