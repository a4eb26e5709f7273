"""What autograd saves in a recorded step.

A trace does not record what autograd saves. It follows from the accesses: an operator of backward runs in the autograd
node (``ops.sequence_nr``) of its forward operator, and reads what that operator saved.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from memtrace.analysis.attribution import PHASE, op_column
from memtrace.analysis.block_accesses import operator_end_rows, operator_start_rows
from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.planning.recorded_step import RecordedStep
from memtrace.planning.step_accesses import step_accesses
from memtrace.trace import Trace

_NEVER: Final = 1 << 60


@dataclass(frozen=True)
class PassAccesses:
    """Reads and writes of a step with the pass of each, one element each, in the order of events."""

    row: Array
    block: Array
    op: Array
    node: Array
    """Autograd node of the operator call; -1: none."""
    is_read: Array
    in_forward: Array
    """Whether the call is one of forward that created a node."""
    in_backward: Array
    """Whether the call belongs to backward, recomputed forward operators included."""
    is_recomputed: Array


@dataclass(frozen=True)
class Saves:
    """One element for each block and autograd node that saves it, in the order in which forward saved them."""

    block: Array
    node: Array
    op: Array
    """The forward operator call that saves the block."""
    row: Array
    """Last row of events of that call."""
    read_row: Array
    """First row of the first operator call of this node in backward that reads the block."""
    last_read_row: Array
    """The row of the last read by this node."""

    def select(self, index: Array) -> Saves:
        """Return the saves at ``index``, positions or a mask."""
        return Saves(*(getattr(self, field.name)[index] for field in fields(self)))


def pass_accesses(trace: Trace, step: RecordedStep) -> PassAccesses:
    """Return the reads and writes of a step."""
    accesses = step_accesses(trace, step)
    used = ~accesses.is_alloc
    op = accesses.op[used]
    phase, node = op_column(trace, op, "phase"), op_column(trace, op, "sequence_nr")
    return PassAccesses(
        row=accesses.row[used],
        block=accesses.block[used],
        op=op,
        node=node,
        is_read=accesses.is_read[used],
        in_forward=(phase == PHASE["forward"]) & (node >= 0),
        in_backward=phase == PHASE["backward"],
        is_recomputed=op_column(trace, op, "recompute"),
    )


def find_saves(trace: Trace, accesses: PassAccesses) -> Saves:
    """Return what the operators of a step saved: what they accessed and their nodes read in backward."""
    reads = np.flatnonzero(accesses.in_backward & accesses.is_read & ~accesses.is_recomputed & (accesses.node >= 0))
    forward = np.flatnonzero(accesses.in_forward)
    key = _pair_keys(accesses.block, accesses.node)
    saved_key, first_access = np.unique(key[forward], return_index=True)
    read_key, first_read = np.unique(key[reads], return_index=True)
    last_read = len(reads) - 1 - np.unique(key[reads][::-1], return_index=True)[1]
    common, of_saved, of_read = np.intersect1d(saved_key, read_key, assume_unique=True, return_indices=True)
    access = forward[first_access[of_saved]]
    saves = Saves(
        block=accesses.block[access],
        node=accesses.node[access],
        op=accesses.op[access],
        row=operator_end_rows(trace, accesses.row[access]),
        read_row=operator_start_rows(trace, accesses.row[reads[first_read[of_read]]]),
        last_read_row=accesses.row[reads[last_read[of_read]]],
    )
    return saves.select(np.lexsort((np.arange(len(common)), saves.row)))


def _pair_keys(block: Array, node: Array) -> Array:
    """Return a number for each pair of a block and a node; different pairs have different numbers."""
    lowest = int(node.min(initial=0))
    width = int(node.max(initial=0)) - lowest + 1
    keys: Array = block.astype(np.int64) * width + (node - lowest)
    return keys


def find_first_saves(saves: Saves) -> Array:
    """Return for each save whether no graph holds the block at that time: it is the first of its graph.

    A mask that several micro-batches use is saved first by each of them, once backward has freed the graph before.
    """
    order = np.lexsort((saves.row, saves.block))
    block, row, last_read = saves.block[order], saves.row[order], saves.last_read_row[order]
    offset = np.unique(block, return_inverse=True)[1].astype(np.int64) << 41
    read_until = np.maximum.accumulate(last_read + offset) if len(order) else offset
    is_first = np.ones(len(order), bool)
    is_first[1:] = (block[1:] != block[:-1]) | (row[1:] + offset[1:] > read_until[:-1])
    result = np.empty(len(order), bool)
    result[order] = is_first
    return result


def find_releasable_blocks(trace: Trace, step: RecordedStep, accesses: PassAccesses, saves: Saves) -> Array:
    """Return for each block of the trace whether only saved tensors keep it in memory in backward.

    Forward allocates such a block. Backward reads it through saved tensors alone, and it is freed as soon as the last
    node that saves it has run. A block that something else holds (a variable of the training loop, an attribute of a
    module, the context of a custom function) is freed later.
    """
    table = blocks(trace)
    is_saved = np.isin(_pair_keys(accesses.block, accesses.node), _pair_keys_of(accesses, saves))
    first_read, last_read = np.full(len(table), _NEVER), np.full(len(table), -1)
    np.minimum.at(first_read, saves.block, saves.read_row)
    np.maximum.at(last_read, saves.block, saves.last_read_row)
    is_late = accesses.row >= first_read[accesses.block]
    through_save = accesses.in_backward & accesses.is_read & ~accesses.is_recomputed & is_saved
    other_use = (is_late & ~through_save) | (~is_late & accesses.in_backward)
    releasable = (last_read >= 0) & (table.alloc_event >= step.first_row) & (table.alloc_event < step.end_row)
    releasable[accesses.block[other_use]] = False
    releasable &= (table.free_event >= 0) & (table.free_event < _end_of_node_runs(trace, step, last_read))
    return releasable


def _pair_keys_of(accesses: PassAccesses, saves: Saves) -> Array:
    lowest = int(accesses.node.min(initial=0))
    width = int(accesses.node.max(initial=0)) - lowest + 1
    keys: Array = saves.block.astype(np.int64) * width + (saves.node - lowest)
    return keys


def _end_of_node_runs(trace: Trace, step: RecordedStep, row: Array) -> Array:
    """Return for each row the first later row of an operator call in another autograd node."""
    op = trace.columns("events", "op_id")["op_id"][step.first_row : step.end_row]
    with_op = np.flatnonzero(op >= 0)
    node = op_column(trace, op[with_op], "sequence_nr")
    starts = np.flatnonzero(np.concatenate([[True], node[1:] != node[:-1]])) if len(node) else np.zeros(0, np.int64)
    start_row = with_op[starts] + step.first_row
    next_run = np.searchsorted(start_row, row, side="right")
    return np.concatenate([start_row, [step.end_row]])[next_run]
