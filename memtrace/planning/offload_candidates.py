"""The saved tensors of a recorded step that could wait in host memory, and the moments at which a plan can act."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.block_accesses import operator_end_rows
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.operators import op_column
from memtrace.format.arrays import Array
from memtrace.planning.module_calls import ModuleCalls, find_module_calls
from memtrace.planning.offload_saves import (
    PassAccesses,
    Saves,
    find_first_saves,
    find_releasable_blocks,
    find_saves,
    pass_accesses,
)
from memtrace.planning.recorded_step import RecordedStep
from memtrace.trace import Trace

_CANDIDATE_CATEGORIES = ("activation", "temporary", "workspace", "input", "unknown")


@dataclass(frozen=True)
class SavedName:
    """How a plan names a saved tensor (``OffloadedTensor``)."""

    module: str
    index: int
    bytes: int


@dataclass(frozen=True)
class Candidates:
    """Saved tensors that could be offloaded, in the order in which forward saves them. Rows are rows of events."""

    block: Array
    group: Array
    """Tensors of the same group are offloaded together: their names are the same, or too alike to distinguish."""
    name: Array
    """Position in ``names``."""
    names: tuple[SavedName, ...]
    node: Array
    """The autograd node that saves the tensor first."""
    row: Array
    """Last row of the operator call that saves it first."""
    held_row: Array
    """First row from which no call of forward uses the tensor."""
    variable_row: Array
    """First row from which no variable of the function that passes the tensor between calls can hold it."""
    read_node: Array
    """The node that reads the tensor first in backward."""
    read_row: Array
    """First row of the operator call that reads it first."""


@dataclass(frozen=True)
class SaveMoments:
    """When autograd saves and reads tensors in a step: the moments at which a plan can wait or start a copy."""

    node: Array
    row: Array
    """First row of events after the moment."""
    is_read: Array
    """Whether backward reads (otherwise forward saves)."""


@dataclass(frozen=True)
class StepSaves:
    """What autograd saves in a recorded step."""

    candidates: Candidates
    moments: SaveMoments


def find_step_saves(trace: Trace, device: str, step: RecordedStep, *, min_bytes: int) -> StepSaves:
    """Return the saved tensors of a step that could be offloaded from a device.

    Args:
        trace: A single-rank trace with accesses.
        device: One of ``trace.devices``.
        step: The step.
        min_bytes: Smallest tensor to offload.
    """
    accesses = pass_accesses(trace, step)
    saves = find_saves(trace, accesses)
    calls = find_module_calls(trace, step.start_ns, step.start_ns + step.duration_ns, include_repeated=True)
    releasable = find_releasable_blocks(trace, step, accesses, saves)
    table = blocks(trace)
    allowed = np.isin(table.category, [CATEGORY[name] for name in _CANDIDATE_CATEGORIES])
    releasable &= allowed & table.size_is_requested & (table.size >= min_bytes)
    on_device = table.device[saves.block] == trace.devices.index(device)
    is_state = table.category[saves.block] == CATEGORY["parameter"]
    counted = saves.select(on_device & ~is_state)
    first = counted.select(find_first_saves(counted))
    candidates = _name_candidates(trace, accesses, counted, first, calls, releasable)
    return StepSaves(candidates, _find_moments(saves))


def _find_moments(saves: Saves) -> SaveMoments:
    """Return the moments of the nodes that save and read anything, parameters included."""
    saved_node, first_save = np.unique(saves.node, return_index=True)
    # A node reads all that it saved when it begins.
    order = np.lexsort((saves.read_row, saves.node))
    read_node, first_read = np.unique(saves.node[order], return_index=True)
    row = np.concatenate([saves.row[first_save] + 1, saves.read_row[order][first_read]])
    node = np.concatenate([saved_node, read_node])
    is_read = np.repeat([False, True], [len(saved_node), len(read_node)])
    by_row = np.lexsort((is_read, row))
    return SaveMoments(node[by_row], row[by_row], is_read[by_row])


def _name_candidates(
    trace: Trace, accesses: PassAccesses, saves: Saves, first: Saves, calls: ModuleCalls, releasable: Array
) -> Candidates:
    size = blocks(trace).size[first.block]
    call = calls.innermost_during(op_column(trace, first.op, "start_ns"))
    family = _main_family(trace, calls, call, size * releasable[first.block])
    call = _outside_as_negative(trace, calls, call, family, op_column(trace, first.op, "start_ns"))
    index = _count_within(call, size)
    module = np.where(call >= 0, calls.module[call] if len(calls) else -1, -1)
    keys, name = np.unique(np.stack([module, size, index]), axis=1, return_inverse=True)
    group = _merge_indistinct(name.reshape(-1), call, size, first.row, keys.shape[1])
    usable = np.ones(keys.shape[1], bool)
    usable[group[~releasable[first.block]]] = False
    chosen = np.flatnonzero(usable[group])
    names = tuple(
        SavedName((trace.name(key[0]) or "") if key[0] >= 0 else "", key[2], key[1]) for key in keys.T.tolist()
    )
    block = first.block[chosen]
    read_node, read_row = _first_reads(saves, block)
    held_row, variable_row = _held_rows(trace, accesses, calls, block, read_row)
    return Candidates(
        block=block,
        group=group[chosen],
        name=name.reshape(-1)[chosen],
        names=names,
        node=first.node[chosen],
        row=first.row[chosen],
        held_row=held_row,
        variable_row=variable_row,
        read_node=read_node,
        read_row=read_row,
    )


def _main_family(trace: Trace, calls: ModuleCalls, call: Array, weight: Array) -> Array:
    """Return for each call whether it belongs to the model that saves the most: the plan is applied to one model.

    Models are distinguished by the first part of the name of their outermost module.
    """
    if not len(calls):
        return np.zeros(0, bool)
    roots = {int(name): (trace.name(int(name)) or "").split(".")[0] for name in np.unique(calls.module[calls.root])}
    families, family = np.unique([roots[int(name)] for name in calls.module[calls.root]], return_inverse=True)
    inside = call >= 0
    totals = np.bincount(family[call[inside]], weight[inside], minlength=len(families))
    return np.asarray(family == int(totals.argmax()))


def _outside_as_negative(trace: Trace, calls: ModuleCalls, call: Array, in_model: Array, time_ns: Array) -> Array:
    """Replace calls of other models by a negative number that counts the outermost calls of the model before."""
    if not len(calls):
        return np.full(len(call), -1)
    is_root = in_model & (calls.parent < 0)
    num_before = np.searchsorted(np.sort(calls.end_ns[is_root]), time_ns, side="right")
    return np.where((call >= 0) & in_model[call], call, -1 - num_before)


def _count_within(call: Array, size: Array) -> Array:
    """Return the position of each element among those of the same call and size."""
    order = np.lexsort((np.arange(len(call)), size, call))
    new = np.ones(len(order), bool)
    new[1:] = (call[order][1:] != call[order][:-1]) | (size[order][1:] != size[order][:-1])
    start = np.flatnonzero(new)
    position = np.arange(len(order)) - np.repeat(start, np.diff(np.concatenate([start, [len(order)]])))
    result = np.empty(len(order), np.int64)
    result[order] = position
    return result


def _merge_indistinct(name: Array, call: Array, size: Array, row: Array, num_names: int) -> Array:
    """Return a group for each tensor: names that one operator call saves at the same time share a group.

    The trace does not have the order in which autograd saves the tensors of one operator.
    """
    merged = np.arange(num_names)
    order = np.lexsort((row, size, call))
    together = (np.diff(call[order]) == 0) & (np.diff(size[order]) == 0) & (np.diff(row[order]) == 0)
    for position in np.flatnonzero(together).tolist():
        one, other = merged[name[order[position]]], merged[name[order[position + 1]]]
        merged[merged == other] = one
    return np.asarray(merged[name])


def _first_reads(saves: Saves, block: Array) -> tuple[Array, Array]:
    """Return the node that first reads each block in backward, and the first row of that read."""
    order = np.lexsort((saves.read_row, saves.block))
    position = order[np.searchsorted(saves.block[order], block)]
    return saves.node[position], saves.read_row[position]


def _held_rows(
    trace: Trace, accesses: PassAccesses, calls: ModuleCalls, block: Array, read_row: Array
) -> tuple[Array, Array]:
    """Return the row from which no forward call uses each block, and the row from which no variable can hold it.

    A call holds its arguments until it returns, so that the first is the end of the call that used the block last. The
    call is the outermost one that does not contain the operator that allocated the block: the function around it has
    the block as a temporary value or in a variable, which it holds until it returns at the latest.
    """
    order = np.lexsort((accesses.row, accesses.block))
    of_block, row = accesses.block[order], accesses.row[order]
    key = of_block.astype(np.int64) << 41
    last = order[np.searchsorted(key + row, (block.astype(np.int64) << 41) + read_row) - 1]
    events = trace.columns("events", "op_id")
    allocated_by = events["op_id"][blocks(trace).alloc_event[block]]
    from_call = calls.innermost_during(op_column(trace, allocated_by, "start_ns"))
    last_call = calls.innermost_during(op_column(trace, accesses.op[last], "start_ns"))
    child = calls.child_towards(from_call, last_call)
    op_end = operator_end_rows(trace, accesses.row[last]) + 1
    if not len(calls):
        return op_end, op_end
    held = np.where(child >= 0, np.maximum(calls.end_row[child], op_end), op_end)
    around = np.where(child >= 0, calls.parent[child], -1)
    return held, np.where(around >= 0, np.maximum(calls.end_row[around], held), held)
