"""From a trace to what the allocator planning works on: a device's history, or only what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memtrace.allocator.history import (
    ALLOC,
    FREE,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Blocks,
    History,
    Int8s,
    Int64s,
    Segments,
)
from memtrace.allocator.program import ALLOCATE, Program
from memtrace.allocator.program import FREE as FREE_BLOCK
from memtrace.allocator.settings import Settings
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
class Requests:
    """What was asked for on a device whose allocator left no history: a CPU or fake-tensor recording, say."""

    device: str
    program: Program
    time_ns: Int64s
    """When each operation of the program happened."""


def devices_to_plan(trace: Trace) -> tuple[str, ...]:
    """The GPUs of a trace; the CPU where there is none: what a GPU would reserve for the same requests."""
    gpus = tuple(device for device in trace.devices if device != "cpu")
    return gpus or trace.devices


def read_device(trace: Trace, device: str) -> History | Requests:
    """A device's history where its allocator left one, else what was asked for on it.

    `trace` is of one rank. Bytes and nanoseconds as in the trace.
    """
    events = trace.columns("events", *_EVENT_COLUMNS)
    mine = events["device"] == trace.devices.index(device)
    segments = _segments(trace, device)
    if len(segments) or np.isin(events["kind"][mine], _SEGMENT_KINDS).any():
        return _history(trace, device, {name: column[mine] for name, column in events.items()}, segments)
    return _requests(device, {name: column[mine] for name, column in events.items()})


def _history(trace: Trace, device: str, events: dict[str, Any], segments: Segments) -> History:
    kept = {name: column[np.isin(events["kind"], _HISTORY_KINDS)] for name, column in events.items()}
    manifest = trace.manifest
    told = manifest.devices.get(device)
    return History(
        device=device,
        kind=kept["kind"],
        address=kept["address"].astype(np.int64),
        size=kept["size"].astype(np.int64),
        stream=np.maximum(kept["stream"], 0).astype(np.int64),
        pool=kept["pool"].astype(np.int64),
        by_program=_released_by_program(trace, kept["kind"], kept["op_id"]),
        device_free=kept["device_free"].astype(np.int64),
        time_ns=kept["time_ns"].astype(np.int64),
        settings=Settings.from_snapshot(manifest.allocator_settings),
        segments=segments,
        blocks=_live_at_end(events),
        device_bytes=told.total_bytes if told else None,
        torch=manifest.versions.get("torch"),
    )


def _segments(trace: Trace, device: str) -> Segments:
    table = trace.columns("segments", "device", "address", "size", "stream", "pool", "small", "expandable")
    mine = table["device"] == trace.devices.index(device)
    return Segments(
        address=table["address"][mine].astype(np.int64),
        size=table["size"][mine].astype(np.int64),
        stream=np.maximum(table["stream"][mine], 0).astype(np.int64),
        pool=np.maximum(table["pool"][mine], 0).astype(np.int64),
        small=table["small"][mine].astype(np.bool_),
        expandable=table["expandable"][mine].astype(np.bool_),
    )


def _live_at_end(events: dict[str, Any]) -> Blocks:
    kind, block = events["kind"], events["block_id"]
    begun = np.flatnonzero((kind == ALLOC) | (kind == BASELINE) | (kind == LIVE))
    live = begun[~np.isin(block[begun], block[kind == FREE])]
    return Blocks(
        address=events["address"][live].astype(np.int64),
        size=events["allocated_size"][live].astype(np.int64),
        requested=events["size"][live].astype(np.int64),
    )


def _released_by_program(trace: Trace, kind: Int8s, op: Int64s) -> Int8s:
    """For entries that give a segment back: 1 where `empty_cache` is on the stack, 0 where it is not, -1
    without one."""
    told = np.full(len(kind), -1, np.int8)
    rows = np.flatnonzero(((kind == SEGMENT_FREE) | (kind == SEGMENT_UNMAP)) & (op >= 0))
    if not len(rows):
        return told
    ops = trace.columns("ops", "op_id", "stack")
    order = np.argsort(ops["op_id"], kind="stable")
    at = np.minimum(np.searchsorted(ops["op_id"][order], op[rows]), len(order) - 1)
    found = ops["op_id"][order][at] == op[rows]
    stack = np.where(found, ops["stack"][order[at]], -1)
    for identity in np.unique(stack[stack >= 0]).tolist():
        names = [frame.function for frame in trace.frames(identity)]
        if names:
            told[rows[stack == identity]] = any(name == "empty_cache" or "emptyCache" in name for name in names)
    return told


def _requests(device: str, events: dict[str, Any]) -> Requests:
    """Blocks by their numbers: those seen before their birth are older than the recording.

    Where a file tells only what the allocator counted for a block (a Chrome trace), that is taken for it.
    """
    kind, block = events["kind"], events["block_id"]
    size = np.where(events["size"] >= 0, events["size"], events["allocated_size"])
    begun = np.flatnonzero(((kind == ALLOC) | (kind == BASELINE) | (kind == LIVE)) & (size > 0))
    born, older = begun[kind[begun] == ALLOC], begun[kind[begun] != ALLOC]
    order = np.concatenate([older, born])
    number = np.full(int(block.max(initial=-1)) + 1, -1, np.int64)
    number[block[order]] = np.arange(len(order))
    ended = np.flatnonzero((kind == FREE) & (block >= 0))
    ended = ended[number[block[ended]] >= 0]
    rows = np.sort(np.concatenate([born, ended]))
    allocates = kind[rows] == ALLOC
    zeros: Int64s = np.zeros(len(order), np.int64)
    program = Program(
        operation=np.where(allocates, ALLOCATE, FREE_BLOCK).astype(np.int8),
        number=number[block[rows]],
        entry=np.arange(len(rows)),
        requested=size[order].astype(np.int64),
        stream=zeros,
        pool=zeros,
        num_older=len(older),
    )
    return Requests(device, program, events["time_ns"][rows].astype(np.int64))
