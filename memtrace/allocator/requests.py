"""Reads from a trace what the allocator model needs: the history of a device, or only its requests."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memtrace.allocator.history import (
    ALLOC,
    FREE,
    FREE_REQUESTED,
    MAX_ADDRESS,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    AllocatorHistory,
    Int8s,
    Int64s,
    RecordedBlocks,
    RecordedSegments,
    resolve_pools,
)
from memtrace.allocator.operations import ALLOCATE, OperationSequence
from memtrace.allocator.operations import FREE as FREE_BLOCK
from memtrace.allocator.rules import TORCH
from memtrace.allocator.settings import AllocatorSettings
from memtrace.allocator.virtual_ranges import estimate_device_bytes, walk_back
from memtrace.analysis.gaps import find_gaps
from memtrace.format.manifest import Manifest
from memtrace.format.schema import EVENT_KINDS

if TYPE_CHECKING:
    from memtrace.trace import Trace

BASELINE: Final = EVENT_KINDS.index("baseline")
LIVE: Final = EVENT_KINDS.index("live")
_SEGMENT_KINDS: Final = (SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP)
_HISTORY_KINDS: Final = (ALLOC, FREE, FREE_REQUESTED, OOM, *_SEGMENT_KINDS)
_EVENT_COLUMNS: Final = (
    "time_ns",
    "kind",
    "device",
    "block_id",
    "size",
    "allocated_size",
    "address",
    "op_id",
    "stream",
    "pool",
    "device_free",
)


@dataclass(frozen=True, slots=True)
class RequestHistory:
    """The requests on a device without allocator history, for example of a CPU or fake-tensor recording."""

    device: str
    operations: OperationSequence
    time_ns: Int64s
    """Time of each operation."""


def devices_to_plan(trace: Trace) -> tuple[str, ...]:
    """Return the GPUs of a trace, or its CPU where it has none: then the plan estimates what a GPU would reserve.

    None where a schedule left out steps, whose allocations a replay needs.
    """
    if len(find_gaps(trace)):
        return ()
    gpus = tuple(device for device in trace.devices if device != "cpu")
    return gpus or trace.devices


def read_device_history(trace: Trace, device: str) -> AllocatorHistory | RequestHistory:
    """Return the allocator history of a device, or only its requests where the trace has no segments of it.

    Args:
        trace: a trace of one rank.
        device: a name from `trace.devices`.
    """
    events = trace.columns("events", *_EVENT_COLUMNS)
    on_device = events["device"] == trace.devices.index(device)
    device_events = {name: column[on_device] for name, column in events.items()}
    segments = _read_segments(trace, device)
    if not len(segments) and not np.isin(device_events["kind"], _SEGMENT_KINDS).any():
        return _read_requests(device, device_events)
    history = _read_allocator_history(trace, device, device_events, segments)
    has_ranges = segments.expandable.any() or (history.kind == SEGMENT_MAP).any()
    if history.device_bytes is not None or not has_ranges:
        return history
    return replace(history, estimated_device_bytes=trace.cached(_estimate_device_bytes))


def history_rows(trace: Trace, device: str) -> Int64s:
    """Return the row of events behind each entry of the allocator history of a device."""
    events = trace.columns("events", "kind", "device")
    on_device = events["device"] == trace.devices.index(device)
    return np.flatnonzero(on_device & np.isin(events["kind"], _HISTORY_KINDS))


def _estimate_device_bytes(trace: Trace) -> int | None:
    """Return the most memory that the GPUs can have by the virtual ranges of all, taken to be alike; None: unknown."""
    lifetimes = []
    events = trace.columns("events", *_EVENT_COLUMNS)
    for device in devices_to_plan(trace):
        rows = events["device"] == trace.devices.index(device)
        device_events = {name: column[rows] for name, column in events.items()}
        history = _read_allocator_history(trace, device, device_events, _read_segments(trace, device))
        ranges, _ = walk_back(replace(history, pool=resolve_pools(history)), TORCH)
        time = history.time_ns
        lifetimes += [
            (
                owner,
                int(time[owner.first]) if owner.first >= 0 else -1,
                int(time[owner.end]) if owner.end < len(history) else MAX_ADDRESS,
            )
            for owner in ranges
        ]
    settings = AllocatorSettings.from_snapshot(trace.manifest.allocator_settings)
    return estimate_device_bytes(lifetimes, settings.large_segment_bytes)


def _read_allocator_history(
    trace: Trace, device: str, events: dict[str, Any], segments: RecordedSegments
) -> AllocatorHistory:
    entries = {name: column[np.isin(events["kind"], _HISTORY_KINDS)] for name, column in events.items()}
    manifest = trace.manifest
    device_info = manifest.devices.get(device)
    return AllocatorHistory(
        device=device,
        kind=entries["kind"],
        address=entries["address"].astype(np.int64),
        size=entries["size"].astype(np.int64),
        stream=np.maximum(entries["stream"], 0).astype(np.int64),
        pool=entries["pool"].astype(np.int64),
        by_program=_released_by_program(trace, entries["kind"], entries["op_id"]),
        device_free=entries["device_free"].astype(np.int64),
        time_ns=entries["time_ns"].astype(np.int64),
        settings=_settings(manifest, device),
        segments=segments,
        blocks=_live_blocks_at_end(events),
        device_bytes=device_info.total_bytes if device_info else None,
        torch=manifest.versions.get("torch"),
    )


def _settings(manifest: Manifest, device: str) -> AllocatorSettings:
    settings, info = AllocatorSettings.from_snapshot(manifest.allocator_settings), manifest.devices.get(device)
    if info is None or not info.total_bytes or info.allowed_bytes is None:
        return settings
    return settings.with_memory_limit(info.allowed_bytes, info.total_bytes)


def _read_segments(trace: Trace, device: str) -> RecordedSegments:
    table = trace.columns("segments", "device", "address", "size", "stream", "pool", "small", "expandable")
    rows = table["device"] == trace.devices.index(device)
    return RecordedSegments(
        address=table["address"][rows].astype(np.int64),
        size=table["size"][rows].astype(np.int64),
        stream=np.maximum(table["stream"][rows], 0).astype(np.int64),
        pool=np.maximum(table["pool"][rows], 0).astype(np.int64),
        small=table["small"][rows].astype(np.bool_),
        expandable=table["expandable"][rows].astype(np.bool_),
    )


def _live_blocks_at_end(events: dict[str, Any]) -> RecordedBlocks:
    kind, block = events["kind"], events["block_id"]
    births = np.flatnonzero((kind == ALLOC) | (kind == BASELINE) | (kind == LIVE))
    live = births[~np.isin(block[births], block[kind == FREE])]
    return RecordedBlocks(
        address=events["address"][live].astype(np.int64),
        size=events["allocated_size"][live].astype(np.int64),
        requested=events["size"][live].astype(np.int64),
    )


def _released_by_program(trace: Trace, kind: Int8s, op: Int64s) -> Int8s:
    """Return `AllocatorHistory.by_program`.

    `empty_cache` is on the stack of what the program releases. Where only the next request belongs to an operator, the
    request did not cause the release.
    """
    by_program = np.full(len(kind), -1, np.int8)
    released = np.flatnonzero((kind == SEGMENT_FREE) | (kind == SEGMENT_UNMAP))
    requests = np.flatnonzero((kind == ALLOC) | (kind == OOM))
    next_op = np.append(op[requests], -1)[np.searchsorted(requests, released)]
    by_program[released[(op[released] < 0) & (next_op >= 0)]] = 1
    rows = released[op[released] >= 0]
    if not len(rows):
        return by_program
    ops = trace.columns("ops", "op_id", "stack")
    order = np.argsort(ops["op_id"], kind="stable")
    place = np.minimum(np.searchsorted(ops["op_id"][order], op[rows]), len(order) - 1)
    is_known = ops["op_id"][order][place] == op[rows]
    stack = np.where(is_known, ops["stack"][order[place]], -1)
    for stack_id in np.unique(stack[stack >= 0]).tolist():
        functions = [frame.function for frame in trace.frames(stack_id)]
        if functions:
            by_program[rows[stack == stack_id]] = any(
                function == "empty_cache" or "emptyCache" in function for function in functions
            )
    return by_program


def _read_requests(device: str, events: dict[str, Any]) -> RequestHistory:
    """Return the requests of a device; blocks that exist before their allocation is recorded count as older.

    Where a file only has the sizes of blocks and not of requests (Chrome traces), the sizes of blocks are used.
    """
    kind, block = events["kind"], events["block_id"]
    size = np.where(events["size"] >= 0, events["size"], events["allocated_size"])
    births = np.flatnonzero(((kind == ALLOC) | (kind == BASELINE) | (kind == LIVE)) & (size > 0) & (block >= 0))
    allocs, older = births[kind[births] == ALLOC], births[kind[births] != ALLOC]
    order = np.concatenate([older, allocs])
    number = np.full(int(block.max(initial=-1)) + 1, -1, np.int64)
    number[block[order]] = np.arange(len(order))
    frees = np.flatnonzero((kind == FREE) & (block >= 0))
    frees = frees[number[block[frees]] >= 0]
    rows = np.sort(np.concatenate([allocs, frees]))
    zeros: Int64s = np.zeros(len(order), np.int64)
    operations = OperationSequence(
        operation=np.where(kind[rows] == ALLOC, ALLOCATE, FREE_BLOCK).astype(np.int8),
        number=number[block[rows]],
        entry=np.arange(len(rows)),
        requested=size[order].astype(np.int64),
        stream=zeros,
        pool=zeros,
        num_older=len(older),
    )
    return RequestHistory(device, operations, events["time_ns"][rows].astype(np.int64))
