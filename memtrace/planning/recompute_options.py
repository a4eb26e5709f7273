"""What a recorded step offers to recomputation: its modules as options, and its memory as a function of them.

The semantics are those of ``torch.utils.checkpoint`` without reentrant autograd: a checkpointed call saves its inputs
and the state of the random generator; what its nodes save of its own blocks leaves memory when the program releases it.
Before backward first needs such a block, the whole call runs again until the last tensor is saved ("early stop"), and
the nodes release the recomputed blocks one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.block_accesses import operator_end_rows
from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.planning.recompute_calls import (
    CheckpointableCalls,
    estimate_program_ends,
    find_checkpointable_calls,
    median_durations,
    nested_pairs,
)
from memtrace.planning.recompute_model import RecomputeModel
from memtrace.planning.recompute_operators import OptionCost, option_costs
from memtrace.planning.recorded_step import RecordedStep
from memtrace.planning.repeated_calls import RepeatedCalls, repeat_calls
from memtrace.trace import Trace

CPU_GENERATOR_BYTES: Final = 5_056
"""Size of the state of torch's random generator, which a checkpoint copies to the host at every call."""
NEVER: Final = 1e18
"""A position after the end of every step."""
AFTER_ROW: Final = 0.25
"""Blocks are released this far after the last row that needs them; rows are 1 apart."""


@dataclass(frozen=True)
class RecomputeOption:
    """One module that can be recomputed, in one way."""

    module: str
    num_calls: int
    saved_bytes: int
    """Bytes that the module's calls save for backward and no longer keep."""
    cost_ns: int
    """Time added to the step; bytes that are computed again where the trace has no times."""
    kept_operators: tuple[str, ...]
    """Operators whose outputs are kept instead of recomputed."""


@dataclass(frozen=True)
class RecomputeOptions:
    """The options of a step, and its memory as a function of them."""

    options: tuple[RecomputeOption, ...]
    """In the numbering of ``model``."""
    model: RecomputeModel
    checkpointed_modules: tuple[str, ...]
    """Modules in which the program itself recomputes; they and the modules around them are no options."""
    found: CheckpointableCalls
    """The module calls of the step."""
    calls: tuple[tuple[int, ...], ...]
    """For each option the calls that are repeated, positions in ``found``."""
    on_device: Array
    """For each block of the trace whether it is on the device."""

    def repeated(self, trace: Trace, chosen: Array) -> RepeatedCalls:
        """Return the calls that backward repeats with a choice of options (a mask)."""
        numbers = np.flatnonzero(chosen).tolist()
        counts = [len(self.calls[number]) for number in numbers]
        call = np.array([call for number in numbers for call in self.calls[number]], np.int64)
        cost = np.repeat([self.options[number].cost_ns / len(self.calls[number]) for number in numbers], counts)
        return repeat_calls(trace, self.found, self.on_device, call, cost)


@dataclass(frozen=True)
class _Step:
    """A recorded step, as the functions of this module need it."""

    trace: Trace
    step: RecordedStep
    device: str
    found: CheckpointableCalls
    on_device: Array
    """For each block of the trace whether it is on the device."""
    size: Array
    """Bytes of each block of the trace."""


def find_options(
    trace: Trace, step: RecordedStep, device: str, *, selective: bool = True, sizes: Array | None = None
) -> RecomputeOptions:
    """Return what recomputation can do in a recorded step.

    Args:
        trace: A single-rank trace that records reads.
        step: The step.
        device: The device whose memory is planned.
        selective: Whether to offer modules with the outputs of some operators kept.
        sizes: Bytes of each block of the trace, if the program is changed so that they differ from the recorded ones.
    """
    table = blocks(trace)
    on_device = table.device == trace.devices.index(device)
    size = table.size if sizes is None else sizes
    recorded = _Step(trace, step, device, find_checkpointable_calls(trace, step), on_device, size)
    costs = _candidates(recorded, selective)
    names = [trace.name(cost.module) or "" for cost in costs]
    found = recorded.found
    return RecomputeOptions(
        options=tuple(
            RecomputeOption(name, len(cost.calls), cost.saved_bytes, cost.cost_ns, cost.kept_names)
            for name, cost in zip(names, costs, strict=True)
        ),
        model=_build_model(recorded, costs),
        checkpointed_modules=tuple(sorted(trace.name(module) or "" for module in found.checkpointed_modules)),
        found=found,
        calls=tuple(cost.calls for cost in costs),
        on_device=on_device,
    )


def _candidates(recorded: _Step, selective: bool) -> list[OptionCost]:
    """Return the options, in the order in which the modules are called first."""
    found, trace = recorded.found, recorded.trace
    saved = _saved_bytes(recorded)
    of_module: dict[int, list[int]] = {}
    for call in np.flatnonzero(found.is_candidate).tolist():
        of_module.setdefault(int(found.calls.module[call]), []).append(call)
    durations = median_durations(trace) if trace.has_times else None
    costs: list[OptionCost] = []
    for module, calls in of_module.items():
        if saved[calls].sum() > 0 and trace.name(module) is not None:
            duration = None if durations is None else durations.get(module, 0.0)
            costs += option_costs(trace, found, module, calls, int(saved[calls].sum()), duration, selective=selective)
    return costs


def _saved_bytes(recorded: _Step) -> Array:
    """Return for each call the bytes of its own blocks that its nodes save and that are freed with the nodes."""
    found, table = recorded.found, blocks(recorded.trace)
    block, call = _saved_in_call(found, table.alloc_event)
    counts = found.graph.freed_in_backward[block] & recorded.on_device[block]
    total = np.zeros(len(found.calls), np.int64)
    np.add.at(total, call[counts], recorded.size[block[counts]])
    return total


def _saved_in_call(found: CheckpointableCalls, alloc_event: Array) -> tuple[Array, Array]:
    """Return the pairs of a block and a call that allocates the block and creates a node that saves it."""
    saved = found.graph.saved
    pair, call = nested_pairs(found.calls, found.graph.nodes.position[saved.node])
    block = saved.block[pair]
    own = alloc_event[block] >= found.calls.first_row[call]
    key = np.unique(block[own] * max(len(found.calls), 1) + call[own])
    return key // max(len(found.calls), 1), key % max(len(found.calls), 1)


class _Columns:
    """Rows of a table that grows."""

    def __init__(self, *dtypes: type) -> None:
        self._dtypes = dtypes
        self._parts: list[tuple[Array, ...]] = []

    def add(self, *columns: Array | float) -> None:
        self._parts.append(tuple(np.broadcast_arrays(*columns)))

    def columns(self) -> list[Array]:
        return [
            np.concatenate([np.zeros(0, dtype), *(part[number].ravel() for part in self._parts)]).astype(dtype)
            for number, dtype in enumerate(self._dtypes)
        ]


def _build_model(recorded: _Step, costs: list[OptionCost]) -> RecomputeModel:
    trace, step, found = recorded.trace, recorded.step, recorded.found
    table, calls, graph = blocks(trace), found.calls, found.graph
    kept, added = _Columns(np.int64, np.int64, np.float64), _Columns(np.int64, np.float64, np.float64, np.int64)
    input_block, input_call = found.inputs
    by_call = np.argsort(input_call, kind="stable")
    edges = np.searchsorted(input_call[by_call], np.arange(len(calls) + 1))
    inner_release = _inner_releases(found)
    for option, cost in enumerate(costs):
        for call in cost.calls:
            inputs = input_block[by_call[edges[call] : edges[call + 1]]]
            kept.add(inputs[recorded.on_device[inputs]], option, float(found.release_row[call]) + AFTER_ROW)
            _add_repetition(recorded, option, cost, call, inner_release[call], kept, added)
    kept_block, kept_option, kept_end = kept.columns()
    free = np.where((table.free_event >= 0) & (table.free_event < step.end_row), table.free_event, NEVER)
    extended = (kept_end > free[kept_block]) | graph.freed_in_backward[kept_block]
    kept_block, kept_option, kept_end = kept_block[extended], kept_option[extended], kept_end[extended]
    is_affected = recorded.on_device & graph.freed_in_backward
    is_affected[kept_block] = True
    in_step = (table.alloc_event < step.end_row) & (
        (table.free_event < 0) | (table.free_event >= step.first_row) | (table.alloc_event >= step.first_row)
    )
    is_affected &= in_step
    affected = np.flatnonzero(is_affected)
    number = np.full(len(table), -1, np.int64)
    number[affected] = np.arange(len(affected))
    holds = np.flatnonzero(is_affected[graph.saved.block] & graph.freed_in_backward[graph.saved.block])
    program_end = free.astype(np.float64)
    held = np.unique(graph.saved.block[holds])
    program_end[held] = np.minimum(program_end[held], (estimate_program_ends(trace, step, calls) + AFTER_ROW)[held])
    release_node, release_option = _releases(recorded, costs, holds)
    fixed = np.flatnonzero(recorded.on_device & in_step & ~is_affected)
    positions, changes = _fixed_changes(recorded, fixed, free)
    added_option, added_begin, added_end, added_bytes = added.columns()
    return RecomputeModel(
        fixed_positions=positions,
        fixed_changes=changes,
        begin=np.maximum(table.alloc_event[affected], step.first_row - 1).astype(np.float64),
        size=recorded.size[affected].astype(np.int64),
        program_end=program_end[affected],
        node_block=number[graph.saved.block[holds]],
        # A node may drop what it saved before its last operator, as that of a fused LSTM cell on CUDA does.
        node_end=np.minimum(graph.saved.release_row[holds] + AFTER_ROW, free[graph.saved.block[holds]]),
        release_node=release_node,
        release_option=release_option,
        kept_block=number[kept_block],
        kept_option=kept_option,
        kept_end=kept_end,
        added_option=added_option,
        added_begin=added_begin,
        added_end=added_end,
        added_bytes=added_bytes,
        cost_ns=np.array([cost.cost_ns for cost in costs], np.int64),
        groups=_groups(found, costs),
    )


def _inner_releases(found: CheckpointableCalls) -> dict[int, tuple[Array, Array]]:
    """Return for each call the blocks that its nodes save, and the row after which the last of these releases each."""
    saved = found.graph.saved
    pair, call = nested_pairs(found.calls, found.graph.nodes.position[saved.node])
    order = np.lexsort((saved.release_row[pair], saved.block[pair], call))
    pair, call = pair[order], call[order]
    block, release = saved.block[pair], saved.release_row[pair]
    is_last = np.ones(len(pair), bool)
    is_last[:-1] = (block[1:] != block[:-1]) | (call[1:] != call[:-1])
    block, release, call = block[is_last], release[is_last], call[is_last]
    edges = np.searchsorted(call, np.arange(len(found.calls) + 1))
    return {
        number: (block[edges[number] : edges[number + 1]], release[edges[number] : edges[number + 1]])
        for number in range(len(found.calls))
    }


def _add_repetition(
    recorded: _Step,
    option: int,
    cost: OptionCost,
    call: int,
    inner: tuple[Array, Array],
    kept: _Columns,
    added: _Columns,
) -> None:
    """Add what a call allocates when it runs again, and the outputs that it keeps instead."""
    found, table = recorded.found, blocks(recorded.trace)
    first, stop = int(found.calls.first_row[call]), int(found.stop_row[call])
    repeat, length = float(found.repeat_row[call]), max(int(found.calls.end_row[call]) - first, 1)
    block = _allocated_between(recorded, first, int(found.calls.end_row[call]))
    saved_block, saved_release = inner
    release = np.full(len(block), -1.0)
    place = np.searchsorted(saved_block, block)
    is_saved = (place < len(saved_block)) & (saved_block[np.minimum(place, len(saved_block) - 1)] == block)
    release[is_saved] = saved_release[place[is_saved]]
    alloc, free = table.alloc_event[block], table.free_event[block]
    free = np.where(free < 0, np.iinfo(np.int64).max, free)
    is_output = np.isin(table.op_name[block], cost.kept_operators) & (free > operator_end_rows(recorded.trace, alloc))
    is_repeated = (alloc < stop) & ~np.isin(table.op_name[block], cost.kept_operators)
    end_of_run = repeat - 0.05
    end = np.where(free < stop, repeat - 0.5 + 0.4 * (np.minimum(free, stop) - first) / length, end_of_run)
    end = np.where(release >= 0, release + AFTER_ROW, end)
    begin = repeat - 0.5 + 0.4 * (alloc - first) / length
    added.add(option, begin[is_repeated], end[is_repeated], recorded.size[block[is_repeated]])
    after = np.where(alloc < stop, end_of_run, float(found.release_row[call]) + AFTER_ROW)
    kept.add(block[is_output], option, np.where(release >= 0, release + AFTER_ROW, after)[is_output])
    if recorded.device == "cpu":
        added.add(option, float(first), float(found.release_row[call]) + AFTER_ROW, CPU_GENERATOR_BYTES)
        added.add(option, repeat - 0.5, end_of_run, CPU_GENERATOR_BYTES)


def _allocated_between(recorded: _Step, first: int, end: int) -> Array:
    """Return the blocks of the device that are allocated in a range of rows."""
    order, rows = recorded.trace.cached(_blocks_by_allocation)
    low, high = np.searchsorted(rows, [first, end])
    chosen = order[low:high]
    inside: Array = np.sort(chosen[recorded.on_device[chosen]])
    return inside


def _blocks_by_allocation(trace: Trace) -> tuple[Array, Array]:
    rows = blocks(trace).alloc_event
    order = np.argsort(rows, kind="stable")
    return order, rows[order]


def _releases(recorded: _Step, costs: list[OptionCost], holds: Array) -> tuple[Array, Array]:
    """Return the pairs of a hold of a node and an option with which the node does not hold the block."""
    found, table = recorded.found, blocks(recorded.trace)
    of_call: dict[int, list[int]] = {}
    for option, cost in enumerate(costs):
        for call in cost.calls:
            of_call.setdefault(call, []).append(option)
    saved = found.graph.saved
    hold, hold_call = nested_pairs(found.calls, found.graph.nodes.position[saved.node[holds]])
    block = saved.block[holds][hold]
    own = table.alloc_event[block] >= found.calls.first_row[hold_call]
    pairs = _Columns(np.int64, np.int64)
    order = np.argsort(hold_call, kind="stable")
    edges = np.searchsorted(hold_call[order], np.arange(len(found.calls) + 1))
    for number, options in of_call.items():
        inside = order[edges[number] : edges[number + 1]]
        for each in options:
            is_kept = own[inside] & np.isin(table.op_name[block[inside]], costs[each].kept_operators)
            pairs.add(hold[inside[~is_kept]], each)
    release_node, release_option = pairs.columns()
    return release_node, release_option


def _fixed_changes(recorded: _Step, fixed: Array, free: Array) -> tuple[Array, Array]:
    """Return when the level of the blocks changes that no option affects; the first position is before the step."""
    step, table = recorded.step, blocks(recorded.trace)
    begin = np.maximum(table.alloc_event[fixed], step.first_row - 1)
    ends = free[fixed] < NEVER
    positions = np.concatenate([[step.first_row - 1.0], begin, free[fixed][ends]])
    changes = np.concatenate([[0], recorded.size[fixed], -recorded.size[fixed][ends]]).astype(np.int64)
    order = np.lexsort((changes, positions))
    return positions[order].astype(np.float64), changes[order]


def _groups(found: CheckpointableCalls, costs: list[OptionCost]) -> tuple[tuple[int, ...], ...]:
    """Return the options of the modules on each chain of nested calls: at most one of them can be chosen."""
    of_call: dict[int, list[int]] = {}
    for option, cost in enumerate(costs):
        for call in cost.calls:
            of_call.setdefault(call, []).append(option)
    inner = set(range(len(found.calls))) - set(found.calls.parent.tolist())
    chains = {
        tuple(sorted({option for call in found.calls.chain(leaf) for option in of_call.get(call, ())}))
        for leaf in inner
    }
    return tuple(sorted(chain for chain in chains if len(chain) > 1))
