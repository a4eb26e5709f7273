"""Builds the tables ``events``, ``labels`` and ``segments`` of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memtrace.format.arrays import distinct
from memtrace.format.encode import Known, Text, make_table
from memtrace.format.schema import CATEGORIES, EVENT_KINDS
from memtrace.readers.cuda_snapshot.blocks import Snapshot
from memtrace.readers.cuda_snapshot.entries import ADDRESSLESS, KIND
from memtrace.readers.cuda_snapshot.ops import SnapshotOps
from memtrace.readers.cuda_snapshot.segments import SnapshotSegments
from memtrace.readers.cuda_snapshot.sizes import allocated_sizes
from memtrace.readers.cuda_snapshot.stacks import StackTable
from memtrace.readers.lifetimes import is_one_of
from memtrace.readers.tables import Array

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class _BlockColumns:
    """The properties of the blocks; each column has one element per block."""

    device: Array
    address: Array
    requested: Array
    """Requested bytes."""
    stream: Array
    pool: Array
    """Number of the memory pool as in the schema, -1 where it is unknown."""
    allocated: Known
    """Bytes including rounding."""


def events_table(snapshot: Snapshot, ops: SnapshotOps, times: Array) -> pa.Table:
    """Build the table ``events``: the blocks that are older than the history, then the entries in their order.

    Args:
        snapshot: the snapshot.
        ops: its operator calls.
        times: the time of each entry in nanoseconds since the first one.
    """
    entries, blocks = snapshot.entries, snapshot.blocks
    columns = _block_columns(snapshot)
    older = blocks.num_baseline
    # Of an entry without a block, whose number is -1, the element behind those of the blocks.
    allocated = np.append(columns.allocated.values, 0)
    is_known = np.append(columns.allocated.known, False)
    live = blocks.live[:older]
    baseline_op = np.where(live >= 0, ops.of_live[live], -1) if len(ops.of_live) else np.full(older, -1, np.int64)
    has_address = np.ones(older + len(entries), bool)
    has_address[older:] = ~is_one_of(entries.kind, ADDRESSLESS)
    number = np.concatenate([np.arange(older), blocks.of_row])
    op = np.concatenate([baseline_op, _entry_ops(snapshot, ops)])
    pool = np.concatenate([columns.pool[:older], entries.pool])
    device = np.concatenate([columns.device[:older], entries.device])
    has_free = np.concatenate([np.zeros(older, bool), entries.device_free >= 0])
    more = {}
    if has_free.any():  # a column that is not given takes no memory
        more["device_free"] = Known(np.concatenate([np.zeros(older, np.int64), entries.device_free]), has_free)
    return make_table(
        "events",
        older + len(entries),
        {
            "time_ns": np.concatenate([np.full(older, times.min(initial=0)), times]),
            "kind": Text(np.concatenate([np.full(older, KIND["baseline"]), entries.kind]), EVENT_KINDS),
            "device": device_text(device),
            "block_id": Known(number, number >= 0),
            "size": np.concatenate([columns.requested[:older], entries.size]),
            "allocated_size": Known(allocated[number], is_known[number]),
            "address": Known(np.concatenate([columns.address[:older], entries.address]), has_address),
            "op_id": Known(op, op >= 0),
            "stream": np.concatenate([columns.stream[:older], entries.stream]),
            "pool": Known(pool, pool >= 0),
            **more,
        },
    )


def _entry_ops(snapshot: Snapshot, ops: SnapshotOps) -> Array:
    """Return the operator call of each entry.

    In a recording with ``context="state"`` only live blocks keep their stacks: an allocation without a stack gets that
    of its block in ``segments``.
    """
    op: Array = ops.of_entry.copy()
    without_op = np.flatnonzero((snapshot.entries.kind == KIND["alloc"]) & (op < 0))
    live = snapshot.blocks.live[snapshot.blocks.of_row[without_op]]
    op[without_op[live >= 0]] = ops.of_live[live[live >= 0]]
    return op


def _block_columns(snapshot: Snapshot) -> _BlockColumns:
    """Return the properties of each block in its first entry, or in ``segments`` if the block has no entry."""
    entries, live, blocks = snapshot.entries, snapshot.live, snapshot.blocks
    in_history = blocks.lifetime >= 0
    rows = snapshot.lives.first_row[blocks.lifetime[in_history]]
    live_rows = blocks.live[~in_history]

    def joined(history: Array, state: Array) -> Array:
        column = np.zeros(len(in_history), history.dtype)
        column[in_history] = history[rows]
        column[~in_history] = state[live_rows]
        return column

    device = joined(entries.device, live.device)
    address = joined(entries.address, live.address)
    requested = joined(entries.size, live.requested)
    pool = joined(entries.pool, live.pool)
    in_state = blocks.live >= 0
    pool[in_state] = live.pool[blocks.live[in_state]]
    stream = joined(entries.stream, live.stream)
    return _BlockColumns(
        device, address, requested, stream, pool, allocated_sizes(snapshot, requested, device, address)
    )


def device_text(device: Array) -> Text:
    """Convert device numbers to a column of names: cuda:0, cuda:1 and so on."""
    numbers = distinct(device)
    if len(numbers) == 1:
        return Text(np.zeros(len(device), np.int8), [f"cuda:{numbers[0]}"])
    code_of = np.zeros(int(numbers.max(initial=0)) + 1, np.int8)
    code_of[numbers] = np.arange(len(numbers))
    return Text(code_of[device], [f"cuda:{number}" for number in numbers.tolist()])


def labels_table(snapshot: Snapshot, ops: SnapshotOps) -> pa.Table:
    """Build the table ``labels``: the blocks whose call stack reveals their category."""
    blocks = snapshot.blocks
    category = np.full(len(blocks.lifetime), -1, np.int8)
    in_history = blocks.lifetime >= 0
    category[in_history] = ops.category[snapshot.lives.first_row[blocks.lifetime[in_history]]]
    only_live = (blocks.live >= 0) & (category < 0)
    category[only_live] = ops.live_category[blocks.live[only_live]]
    block = np.flatnonzero(category >= 0)
    return make_table("labels", len(block), {"block_id": block, "category": Text(category[block], CATEGORIES)})


def segment_stacks(segments: SnapshotSegments, stacks: StackTable) -> Array:
    """Return the call stack that allocated each segment as an id in the table ``names``; -1 for none."""
    return np.array([stacks.distinct[index].stack for index in stacks.intern(segments.frames).tolist()], np.int64)


def segments_table(segments: SnapshotSegments, stack: Array) -> pa.Table:
    """Build the table ``segments``; ``stack`` is the result of ``segment_stacks``."""
    return make_table(
        "segments",
        len(segments),
        {
            "device": device_text(segments.device),
            "address": segments.address,
            "size": segments.size,
            "allocated_size": segments.allocated,
            "active_size": segments.active,
            "requested_size": Known(segments.requested, segments.requested >= 0),
            "stream": segments.stream,
            "pool": Known(segments.pool, segments.pool >= 0),
            "small": segments.small,
            "expandable": Known(segments.expandable == 1, segments.expandable >= 0),
            "stack": Known(stack, stack >= 0),
        },
    )
