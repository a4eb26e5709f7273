"""Third pass: the blocks that are live at one moment of a long trace, and what the trace knows of them.

What a block is for shows in the last part that holds it, together with the keyframe of that part, which carries what
earlier parts knew. A handful of parts has to be read for the blocks of one moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.blocks import allocated_sizes, blocks
from memtrace.analysis.by_part.spans import open_part
from memtrace.analysis.event_codes import KIND, SPAN
from memtrace.analysis.operators import op_column, operator_index
from memtrace.format.arrays import Array
from memtrace.format.encode import encode_codes
from memtrace.trace import Trace

COLUMNS: Final = ("id", "is_baseline", "size", "requested", "allocated_size", "address", "stream", "category", "name",
                  "op", "op_name", "module", "phase", "stack")  # fmt: skip
"""Columns of the blocks; -1: none or unknown. ``requested`` is -1 where ``size`` is the allocator's."""

BlockColumns = dict[str, Array]


@dataclass(frozen=True)
class Moment:
    """A row of events of a part, counted from its first event; -1: before it."""

    part: int
    row: int


def live_ids(trace: Trace, device: str, moment: Moment) -> tuple[Array, Array]:
    """Return the ids of the blocks that are live on a device at a moment, and which of them the part frees later."""
    stored = trace.stored_columns(
        moment.part, {"live": ("block_id", "device"), "events": ("kind", "device", "block_id")}
    )
    if device not in stored.devices:
        return np.empty(0, np.int64), np.empty(0, bool)
    code, live, events = stored.devices.index(device), stored.columns["live"], stored.columns["events"]
    kind, block = events["kind"], events["block_id"]
    of_device = (events["device"] == code) & (block >= 0)
    rows = np.arange(len(kind))
    # Blocks that are older than the recording are live before they are first seen.
    begins = of_device & (
        ((kind == KIND["alloc"]) & (rows <= moment.row)) | (kind == KIND["baseline"]) | (kind == KIND["live"])
    )
    older = live["block_id"][(live["device"] == code) & (live["block_id"] >= 0)]
    ids = np.concatenate([older, block[begins]]).astype(np.int64)
    freed = of_device & (kind == KIND["free"])
    ids = np.setdiff1d(ids, block[freed & (rows <= moment.row)])
    return ids, np.isin(ids, block[freed & (rows > moment.row)])


def last_parts(trace: Trace, ids: Array, first: int) -> Array:
    """Return the last part that holds each block.

    Args:
        trace: a single-rank trace.
        ids: blocks that are live at the end of the part ``first``.
        first: the part.
    """
    numbers = trace.part_numbers
    low = numbers.index(first)
    result = np.full(len(ids), first)
    _search(trace, numbers, np.arange(len(ids)), ids, low, len(numbers) - 1, result)
    return result


def _search(trace: Trace, numbers: list[int], chosen: Array, ids: Array, low: int, high: int, result: Array) -> None:
    """Find the last part of the chosen blocks between two places, of which the first holds all of them."""
    if not len(chosen) or low == high:
        result[chosen] = numbers[low]
        return
    middle = (low + high + 1) // 2
    live = trace.stored_columns(numbers[middle], {"live": ("block_id",)}).columns["live"]["block_id"]
    is_there = np.isin(ids[chosen], live)
    _search(trace, numbers, chosen[is_there], ids, middle, high, result)
    _search(trace, numbers, chosen[~is_there], ids, low, middle - 1, result)


def describe_blocks(trace: Trace, ids: Array, parts: Array, *, has_phases: bool) -> BlockColumns:
    """Return ``COLUMNS`` of blocks, in the order of their ids.

    Args:
        trace: a single-rank trace.
        ids: the blocks.
        parts: the last part that holds each.
        has_phases: see ``open_part``.
    """
    numbers = np.unique(parts).tolist()
    pieces = [_describe_in_part(open_part(trace, part, has_phases=has_phases), ids[parts == part]) for part in numbers]
    if not pieces:
        return {name: np.empty(0, np.int64) for name in COLUMNS}
    columns = {name: np.concatenate([piece[name] for piece in pieces]) for name in COLUMNS}
    order = np.argsort(columns["id"], kind="stable")
    return {name: values[order] for name, values in columns.items()}


def _describe_in_part(part: Trace, ids: Array) -> BlockColumns:
    table = blocks(part)
    place = ids if part.block_ids is None else np.searchsorted(part.block_ids, ids)
    events = part.columns("events", "kind", "block_id", "op_id")
    is_begin = np.isin(events["kind"], [KIND["alloc"], KIND["baseline"], KIND["live"]]) & (events["block_id"] >= 0)
    begins = np.flatnonzero(is_begin)
    row = np.full(len(table), -1, np.int64)
    row[events["block_id"][begins]] = begins
    row = row[place]
    op = events["op_id"][row].astype(np.int64)
    return {
        "id": ids,
        "is_baseline": events["kind"][row] == KIND["baseline"],
        "size": table.size[place],
        "requested": np.where(table.size_is_requested[place], table.size[place], -1),
        "allocated_size": allocated_sizes(part)[place],
        "address": table.address[place],
        "stream": table.stream[place],
        "category": table.category[place],
        "name": table.name[place],
        # An operator call that was never written has no row.
        "op": np.where(operator_index(part).rows(op) >= 0, op, np.where(op >= 0, -2, -1)),
        **{name: op_column(part, op, column) for name, column in
           (("op_name", "name"), ("module", "module"), ("phase", "phase"), ("stack", "stack"))},
    }  # fmt: skip


def small_trace(trace: Trace, device: str, columns: BlockColumns) -> Trace:
    """Return a trace in memory of some blocks, of the time at which all of them are live.

    Their numbers there are their places in ``columns``.

    Args:
        trace: the long trace, which has the names.
        device: the device of the blocks.
        columns: ``COLUMNS`` of the blocks.
    """
    number, zero = np.arange(len(columns["id"])), np.zeros(1, np.int64)
    op = columns["op"]
    # Calls that were never written keep an id, which has no row.
    unwritten = int(op.max(initial=-1)) + 1 + number
    events = {
        "time_ns": np.zeros(len(number), np.int64),
        "kind": np.where(columns["is_baseline"], KIND["baseline"], KIND["alloc"]).astype(np.int8),
        "device": np.zeros(len(number), np.int8),
        "block_id": number,
        "size": columns["requested"],
        "allocated_size": columns["allocated_size"],
        "address": columns["address"],
        "stream": columns["stream"],
        "op_id": np.where(op == -2, unwritten, op),
    }
    known = np.flatnonzero(op >= 0)
    _, first = np.unique(op[known], return_index=True)
    rows = known[first]
    ops = {
        "op_id": op[rows],
        "name": columns["op_name"][rows],
        "start_ns": np.zeros(len(rows), np.int64),
        **{name: columns[name][rows] for name in ("module", "phase", "stack")},
    }
    labels = {"block_id": number, "category": columns["category"], "name": columns["name"]}
    tables = {
        "events": encode_codes("events", events, (device,)),
        "ops": encode_codes("ops", ops, ()),
        "labels": encode_codes("labels", labels, ()),
        # A marked step, so that none is searched for.
        "spans": encode_codes("spans", {"kind": np.array([SPAN["step"]]), "start_ns": zero, "duration_ns": zero}, ()),
    }
    return trace.with_tables(tables, {})
