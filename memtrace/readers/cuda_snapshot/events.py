"""The tables ``events`` and ``segments`` of a snapshot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memtrace.format.encode import Known, Text, make_table
from memtrace.format.schema import CATEGORIES, EVENT_KINDS
from memtrace.readers.cuda_snapshot.blocks import Snapshot
from memtrace.readers.cuda_snapshot.entries import KIND
from memtrace.readers.cuda_snapshot.ops import Ops
from memtrace.readers.cuda_snapshot.segments import Segments
from memtrace.readers.cuda_snapshot.sizes import allocated_sizes
from memtrace.readers.cuda_snapshot.stacks import Stacks
from memtrace.readers.tables import Array

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class _BlockColumns:
    """One row a block. The pool is -1 where it is not told."""

    device: Array
    address: Array
    requested: Array
    stream: Array
    pool: Array
    allocated: Known


def events_table(found: Snapshot, ops: Ops, times: Array) -> pa.Table:
    """The table ``events``: first the blocks older than the history, then its entries in their order."""
    entries, blocks = found.entries, found.blocks
    columns = _block_columns(found)
    older = blocks.num_baseline
    about_block = blocks.of_row >= 0
    block = np.where(about_block, blocks.of_row, 0)
    has_size = np.zeros(older + len(entries), bool)
    has_size[:older] = columns.allocated.known[:older]
    allocated = np.zeros(older + len(entries), np.int64)
    allocated[:older] = columns.allocated.values[:older]
    if len(columns.address):
        has_size[older:] = about_block & columns.allocated.known[block]
        allocated[older:] = columns.allocated.values[block]
    live = blocks.live[:older]
    baseline_op = np.where(live >= 0, ops.of_live[live], -1) if len(ops.of_live) else np.full(older, -1, np.int64)
    address = np.concatenate([columns.address[:older], entries.address])
    with_address = np.ones(len(address), bool)
    with_address[older:] = ~np.isin(entries.kind, [KIND["oom"], KIND["snapshot"]])
    number = np.concatenate([np.arange(older), blocks.of_row])
    op = np.concatenate([baseline_op, _entry_ops(found, ops)])
    pool = np.concatenate([columns.pool[:older], entries.pool])
    device_free = np.concatenate([np.full(older, -1, np.int64), entries.device_free])
    device = np.concatenate([columns.device[:older], entries.device])
    return make_table(
        "events",
        older + len(entries),
        {
            "time_ns": np.concatenate([np.full(older, times.min(initial=0)), times]),
            "kind": Text(np.concatenate([np.full(older, KIND["baseline"]), entries.kind]), EVENT_KINDS),
            "device": device_text(device),
            "block_id": Known(number, number >= 0),
            "size": np.concatenate([columns.requested[:older], entries.size]),
            "allocated_size": Known(allocated, has_size),
            "address": Known(address, with_address),
            "op_id": Known(op, op >= 0),
            "stream": np.concatenate([columns.stream[:older], entries.stream]),
            "pool": Known(pool, pool >= 0),
            "device_free": Known(device_free, device_free >= 0),
        },
    )


def _entry_ops(found: Snapshot, ops: Ops) -> Array:
    """The operator call of each entry. Where only live blocks keep their stacks (``context="state"``), an allocation
    without one has that of the block in ``segments``."""
    op: Array = ops.of_entry.copy()
    bare = np.flatnonzero((found.entries.kind == KIND["alloc"]) & (op < 0))
    live = found.blocks.live[found.blocks.of_row[bare]]
    op[bare[live >= 0]] = ops.of_live[live[live >= 0]]
    return op


def _block_columns(found: Snapshot) -> _BlockColumns:
    """What the history says of each block at first sight, and ``segments`` of those it alone tells of."""
    entries, live, blocks = found.entries, found.live, found.blocks
    told = blocks.lifetime >= 0
    rows = found.lives.first_row[blocks.lifetime[told]]
    untold = blocks.live[~told]

    def joined(history: Array, state: Array) -> Array:
        column = np.zeros(len(told), history.dtype)
        column[told] = history[rows]
        column[~told] = state[untold]
        return column

    device = joined(entries.device, live.device)
    address = joined(entries.address, live.address)
    requested = joined(entries.size, live.requested)
    pool = joined(entries.pool, live.pool)
    in_state = blocks.live >= 0
    pool[in_state] = live.pool[blocks.live[in_state]]
    stream = joined(entries.stream, live.stream)
    return _BlockColumns(device, address, requested, stream, pool, allocated_sizes(found, requested, device, address))


def device_text(device: Array) -> Text:
    """A column of device numbers as cuda:0, cuda:1, ..."""
    numbers, codes = np.unique(device, return_inverse=True)
    return Text(codes.astype(np.int8), [f"cuda:{number}" for number in numbers.tolist()])


def labels_table(found: Snapshot, ops: Ops) -> pa.Table:
    """The table ``labels``: blocks whose stack says what they are for."""
    blocks = found.blocks
    category = np.full(len(blocks.lifetime), -1, np.int8)
    told = blocks.lifetime >= 0
    category[told] = ops.category[found.lives.first_row[blocks.lifetime[told]]]
    unseen = (blocks.live >= 0) & (category < 0)
    category[unseen] = ops.live_category[blocks.live[unseen]]
    block = np.flatnonzero(category >= 0)
    return make_table("labels", len(block), {"block_id": block, "category": Text(category[block], CATEGORIES)})


def segment_stacks(segments: Segments, stacks: Stacks) -> Array:
    """names.id of the stack that made each segment grow; -1: not taken."""
    return np.array([stacks.distinct[place].stack for place in stacks.intern(segments.frames).tolist()], np.int64)


def segments_table(segments: Segments, stack: Array) -> pa.Table:
    """The table ``segments``; ``stack`` as ``segment_stacks`` gives it."""
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
