"""The cost of recomputing a module, and the operators whose outputs are worth keeping (selective recomputation).

Keeping the output of an operator saves the operator's time in backward. The operators of a module with the most time
per byte of output are kept first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.attribution import op_column
from memtrace.analysis.block_accesses import number_operator_calls
from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.planning.recompute_calls import CheckpointableCalls
from memtrace.trace import Trace

MAX_KEPT_OPERATORS: Final = 2
"""Most operators of a module whose outputs are kept."""
MIN_OPERATOR_SHARE: Final = 0.1
"""Least share of a module's forward time that makes an operator worth keeping."""
DISPATCH_MODE_NS: Final = 40_000
"""Time that the dispatch modes of selective checkpointing add to an operator, in forward and again in backward."""
CHECKPOINT_CALL_NS: Final = 400_000
"""Time that a checkpointed call adds apart from its operators: saving the random state, hooks on saved tensors."""


@dataclass(frozen=True)
class OptionCost:
    """One way to recompute a module: its calls, and the operators whose outputs are kept."""

    module: int
    """Name of the module (names.id)."""
    calls: tuple[int, ...]
    saved_bytes: int
    cost_ns: int
    kept_operators: tuple[int, ...] = ()
    """Names of operators (names.id)."""
    kept_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Operator:
    """The calls of one operator while a module runs again."""

    name: int
    duration_ns: int
    output_bytes: int


def option_costs(
    trace: Trace,
    found: CheckpointableCalls,
    module: int,
    calls: list[int],
    saved_bytes: int,
    duration_ns: float | None,
    *,
    selective: bool,
) -> list[OptionCost]:
    """Return the ways to recompute a module: whole, and with the outputs of its costliest operators kept.

    Args:
        trace: A single-rank trace.
        found: The calls of the step.
        module: The module.
        calls: Its calls in the step.
        saved_bytes: Bytes that they save for backward.
        duration_ns: Time that the calls take together, the median over steps; None: the trace has no times, and the
            bytes that are computed again stand for time.
        selective: Whether to keep outputs.
    """
    operators, num_operators = _repeated_operators(trace, found, calls)
    if duration_ns is None:
        return [OptionCost(module, tuple(calls), saved_bytes, sum(each.output_bytes for each in operators))]
    repeated_ns, checkpoint_ns = duration_ns * _repeated_share(trace, found, calls), CHECKPOINT_CALL_NS * len(calls)
    whole = OptionCost(module, tuple(calls), saved_bytes, round(repeated_ns) + checkpoint_ns)
    options, kept = [whole], list[_Operator]()
    worthwhile = [each for each in operators if each.duration_ns >= MIN_OPERATOR_SHARE * duration_ns]
    worthwhile.sort(key=lambda each: -each.duration_ns / max(each.output_bytes, 1))
    for operator in worthwhile[:MAX_KEPT_OPERATORS] if selective and len(operators) > 1 else ():
        kept.append(operator)
        kept_bytes = sum(each.output_bytes for each in kept)
        remaining_ns = max(repeated_ns - sum(each.duration_ns for each in kept), 0)
        cost = round(remaining_ns) + checkpoint_ns + 2 * DISPATCH_MODE_NS * num_operators
        if kept_bytes < saved_bytes and cost < whole.cost_ns:
            names = tuple(trace.name(each.name) or "" for each in kept)
            numbers = tuple(each.name for each in kept)
            saves = saved_bytes - kept_bytes
            options.append(OptionCost(module, tuple(calls), saves, cost, numbers, names))
    return options


def _repeated_share(trace: Trace, found: CheckpointableCalls, calls: list[int]) -> float:
    """Return the share of the calls' time that passes before their repetition stops."""
    time = trace.columns("events", "time_ns")["time_ns"]
    total = repeated = 0
    for call in calls:
        start, duration = int(found.calls.start_ns[call]), int(found.calls.duration_ns[call])
        last = max(int(found.stop_row[call]) - 1, int(found.calls.first_row[call]))
        total += duration
        repeated += min(max(int(time[min(last, len(time) - 1)]) - start, 0), duration)
    return repeated / total if total else 1.0


def _repeated_operators(trace: Trace, found: CheckpointableCalls, calls: list[int]) -> tuple[list[_Operator], int]:
    """Return the operators that the calls run again and whose outputs can be kept, and the number of operator calls."""
    op_of_event = trace.columns("events", "op_id")["op_id"]
    ranges = [op_of_event[int(found.calls.first_row[call]) : int(found.stop_row[call])] for call in calls]
    op = np.unique(np.concatenate([np.zeros(0, op_of_event.dtype), *ranges]))
    op = op[op >= 0]
    name, duration = op_column(trace, op, "name"), np.maximum(op_column(trace, op, "duration_ns"), 0)
    output, is_written = _outputs(trace, op)
    # Torch refuses to keep an output that is written in place afterwards.
    unusable = set(name[is_written].tolist())
    operators = [
        _Operator(int(number), int(duration[name == number].sum()), int(output[name == number].sum()))
        for number in np.unique(name[(output > 0) & (name >= 0)]).tolist()
        if number not in unusable and _returns_new_tensors(trace.name(number) or "")
    ]
    return operators, len(op)


def _outputs(trace: Trace, op: Array) -> tuple[Array, Array]:
    """Return the bytes that each operator call allocates and that outlive it, and whether any is written again."""
    table, calls = blocks(trace), number_operator_calls(trace)
    alloc = table.alloc_event
    op_of_event = trace.columns("events", "op_id")["op_id"]
    of_block = np.where(alloc >= 0, op_of_event[np.maximum(alloc, 0)], -1)
    last = np.where(of_block >= 0, calls.last[calls.number[np.maximum(alloc, 0)]], -1)
    outlives = (of_block >= 0) & ((table.free_event < 0) | (table.free_event > last))
    place = np.searchsorted(op, of_block[outlives])
    is_known = (place < len(op)) & (op[np.minimum(place, len(op) - 1)] == of_block[outlives]) if len(op) else place < 0
    total, is_written = np.zeros(len(op), np.int64), np.zeros(len(op), bool)
    np.add.at(total, place[is_known], table.size[outlives][is_known])
    is_written[place[is_known & (table.num_writes[outlives] > 1)]] = True
    return total, is_written


def _returns_new_tensors(name: str) -> bool:
    """Return whether an operator computes new tensors: it neither works in place nor leaves them to be filled."""
    base = name.rpartition("::")[2]
    operator, _, overload = base.partition(".")
    return bool(operator) and not operator.endswith("_") and "out" not in overload and not operator.startswith("empty")
