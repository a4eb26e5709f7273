"""Which nodes of the autograd graph hold which blocks of a step, and when backward runs and releases them.

A node is known by its autograd sequence number: of the forward operator that creates it, and of the operators that run
in it during backward. A node saves a block if it reads the block in backward although the block is older than the node.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, op_column, phase_rows
from memtrace.analysis.block_accesses import number_operator_calls
from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.planning.recorded_step import RecordedStep
from memtrace.trace import Trace


@dataclass(frozen=True)
class GraphNodes:
    """The nodes of a step that ran in backward, in the order in which forward created them. Rows of events."""

    position: Array
    """First row of the forward operator that created the node."""
    created_row: Array
    """Row after that operator: blocks that were allocated before it can be saved by the node."""
    backward_row: Array
    """First row of the node in backward."""
    release_row: Array
    """Last row of the node in backward, after which it releases what it saved."""
    saves_output: Array
    """Whether the node saves a block that its own forward operator allocated."""


@dataclass(frozen=True)
class SavedBlocks:
    """Which nodes save which blocks, one pair per element."""

    block: Array
    node: Array
    """Position in ``GraphNodes``."""
    release_row: Array
    """Last row before the node releases the block."""


@dataclass(frozen=True)
class AutogradGraph:
    """The part of the autograd graph of a step that holds memory."""

    nodes: GraphNodes
    saved: SavedBlocks
    freed_in_backward: Array
    """For each block of the trace whether backward frees it in this step."""


@dataclass(frozen=True)
class _Operators:
    """The operator of each row of a step's events; -1 or False where a row has none."""

    rows: Array
    phase: Array
    recompute: Array
    sequence: Array


def read_graph(trace: Trace, step: RecordedStep) -> AutogradGraph:
    """Return which nodes of a recorded step save which blocks."""
    operators = _read_operators(trace, step)
    table = blocks(trace)
    nodes, sequence, bound = _find_nodes(trace, operators)
    saved_block, saved_node, release = _find_reads(trace, operators, sequence)
    is_saved = table.alloc_event[saved_block] < bound[saved_node]
    saved_block, saved_node, release = saved_block[is_saved], saved_node[is_saved], release[is_saved]
    freed = _freed_in_backward(trace, step)
    saves_output = np.zeros(len(nodes.position), bool)
    saves_output[saved_node[table.alloc_event[saved_block] >= nodes.position[saved_node]]] = True
    own_block, own_node = _find_unread(trace, step, nodes, freed, saved_block)
    saves_output[own_node] = True
    saving = np.zeros(len(nodes.position), bool)
    saving[saved_node] = saving[own_node] = True
    number = np.cumsum(saving) - 1
    kept = GraphNodes(
        nodes.position[saving],
        nodes.created_row[saving],
        nodes.backward_row[saving],
        nodes.release_row[saving],
        saves_output[saving],
    )
    saved = SavedBlocks(
        np.concatenate([saved_block, own_block]),
        number[np.concatenate([saved_node, own_node])],
        np.concatenate([release, nodes.release_row[own_node]]),
    )
    return AutogradGraph(kept, _release_at_recorded_free(trace, saved, freed), freed)


def _read_operators(trace: Trace, step: RecordedStep) -> _Operators:
    rows = np.arange(step.first_row, step.end_row)
    op = trace.columns("events", "op_id")["op_id"][rows]
    return _Operators(
        rows,
        op_column(trace, op, "phase"),
        op_column(trace, op, "recompute"),
        op_column(trace, op, "sequence_nr").astype(np.int64),
    )


def _find_nodes(trace: Trace, operators: _Operators) -> tuple[GraphNodes, Array, Array]:
    """Return the nodes that ran in backward, their sequence numbers, and the row before which each was created."""
    known = operators.sequence >= 0
    forward = known & (operators.phase == PHASE["forward"]) & ~operators.recompute
    backward = known & (operators.phase == PHASE["backward"]) & ~operators.recompute
    sequence, first = np.unique(operators.sequence[backward], return_index=True)
    rows = operators.rows[backward]
    last = np.full(len(sequence), -1, np.int64)
    np.maximum.at(last, np.searchsorted(sequence, operators.sequence[backward]), rows)
    made, made_first = np.unique(operators.sequence[forward], return_index=True)
    made_rows = operators.rows[forward][made_first]
    calls = number_operator_calls(trace)
    made_end = calls.last[calls.number[made_rows]] + 1 if len(made) else made_rows
    if not len(made):
        empty = np.zeros(0, np.int64)
        return GraphNodes(empty, empty, empty, empty, empty.astype(bool)), empty, empty
    # Views and custom functions create nodes without an operator of this number that touches memory: these belong to
    # the gap after the operator of the next lower number.
    place = np.searchsorted(made, sequence, side="right") - 1
    is_known = (place >= 0) & (made[np.maximum(place, 0)] == sequence)
    place = np.maximum(place, 0)
    following = np.minimum(place + 1, len(made) - 1)
    gap_end = np.where(place + 1 < len(made), made_rows[following], rows[first])
    created = np.where(is_known, made_end[place], gap_end)
    position = np.where(is_known, made_rows[place], np.maximum(made_rows[place], gap_end - 1))
    nodes = GraphNodes(position, created, rows[first], last, np.zeros(len(sequence), bool))
    return nodes, sequence, created


def _find_reads(trace: Trace, operators: _Operators, sequence: Array) -> tuple[Array, Array, Array]:
    """Return the pairs of a block and a node that reads it in backward, with the end of its last read."""
    events = trace.columns("events", "kind", "block_id")
    is_read = (events["kind"][operators.rows] == KIND["read"]) & (events["block_id"][operators.rows] >= 0)
    in_node = (operators.phase == PHASE["backward"]) & ~operators.recompute & (operators.sequence >= 0)
    rows = operators.rows[is_read & in_node]
    node = np.searchsorted(sequence, operators.sequence[is_read & in_node])
    count = max(len(sequence), 1)
    pair, place = np.unique(events["block_id"][rows].astype(np.int64) * count + node, return_inverse=True)
    release = np.full(len(pair), -1, np.int64)
    if len(rows):
        calls = number_operator_calls(trace)
        np.maximum.at(release, place, calls.last[calls.number[rows]])
    return pair // count, pair % count, release


def _freed_in_backward(trace: Trace, step: RecordedStep) -> Array:
    table, phases = blocks(trace), phase_rows(trace)
    freed = (table.free_event >= step.first_row) & (table.free_event < step.end_row)
    freed &= table.alloc_event < table.free_event
    if phases is None:
        return np.zeros(len(table), bool)
    phase = phases.phase[phases.pieces(np.maximum(table.free_event, 0))]
    in_forward = (table.phase == PHASE["forward"]) | (table.alloc_event < 0)
    result: Array = freed & (phase == PHASE["backward"]) & in_forward
    return result


def _find_unread(
    trace: Trace, step: RecordedStep, nodes: GraphNodes, freed: Array, saved_block: Array
) -> tuple[Array, Array]:
    """Return the blocks that backward frees without a recorded read, and the node that was created with each.

    Kernels of torch.compile, for example, read memory without being recorded.
    """
    table = blocks(trace)
    unread = freed.copy()
    unread[saved_block] = False
    block = np.flatnonzero(unread & (table.alloc_event >= step.first_row))
    order = np.argsort(nodes.created_row, kind="stable")
    place = np.searchsorted(nodes.created_row[order], table.alloc_event[block], side="right")
    # Only the node of the operator that allocated the block can have saved it unseen.
    found = place < len(order)
    block, node = block[found], order[place[found]]
    own = nodes.position[node] <= table.alloc_event[block]
    return block[own], node[own]


def _release_at_recorded_free(trace: Trace, saved: SavedBlocks, freed: Array) -> SavedBlocks:
    """Let the last node that saves a block release it where the block was freed, a little after the node's last row."""
    table, release = blocks(trace), saved.release_row.copy()
    last = np.full(len(table), -1, np.int64)
    np.maximum.at(last, saved.block, release)
    is_last = freed[saved.block] & (release == last[saved.block])
    release[is_last] = np.maximum(release[is_last], table.free_event[saved.block[is_last]] - 1)
    return SavedBlocks(saved.block, saved.node, release)
