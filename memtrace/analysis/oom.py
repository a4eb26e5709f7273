"""Why an allocation failed: what was asked, what was free and did not serve, what holds the rest, what to try."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from memtrace.analysis.attribution import KIND, op_column
from memtrace.analysis.blocks import blocks
from memtrace.analysis.device_state import ROUNDING_BYTES, SMALL_BYTES, DeviceState, state_at
from memtrace.analysis.fragmentation import Fragmentation, measure
from memtrace.format.arrays import Array
from memtrace.trace import Trace

HOLD_LESS: Final = "Hold less at this moment: see what holds the memory."
_MEDIUM_BYTES: Final = 10 << 20
_MEDIUM_SEGMENT_BYTES: Final = 20 << 20
_SEGMENT_ROUNDING_BYTES: Final = 2 << 20


@dataclass(frozen=True)
class Holder:
    """Live blocks of one stack."""

    stack: int
    """names.id; -1: blocks without one."""
    requested_bytes: int
    num_blocks: int


@dataclass(frozen=True)
class Room:
    """Where a request on a GPU could look for memory, and why it found none. Bytes."""

    segment_bytes: int
    """What the allocator wanted from the device to serve it."""
    largest_fit_bytes: int
    """The largest free block where the request could look."""
    free_same_stream_bytes: int
    """Reserved and unused where the request could look: its stream, its pool, segments of its size."""
    free_elsewhere_bytes: int
    """Reserved and unused on other streams, in other pools and in segments for other sizes."""
    lacking_bytes: int
    """How much less must be live for it to fit if no free byte were out of reach; 0: it would have fitted."""
    state: Fragmentation


@dataclass(frozen=True)
class OutOfMemory:
    """One failed allocation. All numbers are bytes; None: not told."""

    device: str
    event: int
    time_ns: int | None
    asked_bytes: int
    stack: int
    """names.id of the stack that asked; -1: not taken."""
    device_free_bytes: int | None
    """What the driver had left."""
    live_bytes: int
    """What live blocks were asked for."""
    room: Room | None
    """None on the CPU, whose allocator keeps no segments."""
    holders: tuple[Holder, ...]
    """What holds the memory, the largest first."""
    advice: tuple[str, ...]
    """What to try, in sentences, the most promising first."""

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self)


def out_of_memory(trace: Trace) -> list[OutOfMemory]:
    """Every failed allocation in the trace, in its order."""
    kinds = trace.columns("events", "kind")["kind"]
    return [_explain(trace, int(row)) for row in np.flatnonzero(kinds == KIND["oom"])]


def segment_size(requested: int) -> int:
    """What the allocator asks the device for when no free block serves a request. Bytes."""
    rounded = max(-(-requested // ROUNDING_BYTES), 1) * ROUNDING_BYTES
    if rounded <= SMALL_BYTES:
        return _SEGMENT_ROUNDING_BYTES
    if rounded < _MEDIUM_BYTES:
        return _MEDIUM_SEGMENT_BYTES
    return -(-rounded // _SEGMENT_ROUNDING_BYTES) * _SEGMENT_ROUNDING_BYTES


def _explain(trace: Trace, row: int) -> OutOfMemory:
    events = trace.columns("events", "time_ns", "device", "size", "stream", "pool", "op_id", "device_free")
    code = int(events["device"][row])
    asked, device_free = int(events["size"][row]), int(events["device_free"][row])
    state = state_at(trace, code, row)
    room = None
    if len(state.segments):
        pool, stream = max(int(events["pool"][row]), 0), max(int(events["stream"][row]), 0)
        room = _room(trace, state, asked, pool, stream, max(device_free, 0))
    return OutOfMemory(
        device=trace.devices[code],
        event=row,
        time_ns=int(events["time_ns"][row]) if trace.has_times else None,
        asked_bytes=asked,
        stack=int(op_column(trace, events["op_id"][row : row + 1], "stack")[0]),
        device_free_bytes=device_free if device_free >= 0 else None,
        live_bytes=int(state.live.requested.sum()),
        room=room,
        holders=_holders(trace, state),
        advice=tuple(_advice(trace, asked, room, device_free)),
    )


def _room(trace: Trace, state: DeviceState, asked: int, pool: int, stream: int, device_free: int) -> Room:
    reachable = state.free.size[_reachable(state, asked, pool, stream)]
    free_here, free_all = int(reachable.sum()), int(state.free.size.sum())
    return Room(
        segment_bytes=segment_size(asked),
        largest_fit_bytes=int(reachable.max(initial=0)),
        free_same_stream_bytes=free_here,
        free_elsewhere_bytes=free_all - free_here,
        lacking_bytes=max(asked - free_all - device_free, 0),
        state=measure(trace, trace.devices[state.device], state),
    )


def _reachable(state: DeviceState, asked: int, pool: int, stream: int) -> Array:
    """Which free blocks a request could look at."""
    segments, owner = state.segments, state.free.segment
    same_place = (segments.pool[owner] == pool) & (segments.stream[owner] == stream)
    reachable: Array = same_place & (segments.small[owner] == (asked <= SMALL_BYTES))
    return reachable


def _holders(trace: Trace, state: DeviceState) -> tuple[Holder, ...]:
    live = state.live
    stacks, place = np.unique(blocks(trace).stack[live.block], return_inverse=True)
    held = np.bincount(place, weights=live.requested, minlength=len(stacks)).astype(np.int64)
    count = np.bincount(place, minlength=len(stacks))
    order = np.argsort(-held, kind="stable")
    return tuple(Holder(int(stacks[at]), int(held[at]), int(count[at])) for at in order)


def _advice(trace: Trace, asked: int, room: Room | None, device_free: int) -> list[str]:
    """What would have helped, by the numbers."""
    if room is None:
        return [HOLD_LESS]
    settings = trace.manifest.allocator_settings or {}
    expandable = bool(settings.get("expandable_segments"))
    state = room.state
    advice = []
    if device_free >= room.segment_bytes:
        advice.append(
            f"The device had {amount(device_free)} left, enough for the {amount(room.segment_bytes)} wanted from it: "
            "look for what limits this process (torch.cuda.set_per_process_memory_fraction), or for another that "
            "needed the memory only for a moment."
        )
    if 0 <= device_free < asked - state.reserved_bytes:
        advice.append(
            f"Ask for less: even with nothing else of this process on the device, {amount(asked)} are more than the "
            f"{amount(state.reserved_bytes + device_free)} that there would be. Is the shape what you meant?"
        )
    elif room.lacking_bytes:
        advice.append(
            f"Hold {amount(room.lacking_bytes)} less at this moment: even without any fragmentation the request does "
            "not fit. Try a smaller batch, activation checkpointing, or a cheaper optimizer: see what holds the memory."
        )
    if room.free_same_stream_bytes >= room.segment_bytes and not expandable:
        advice.append(
            "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: enough is reserved and unused, but in pieces; "
            "expandable segments can join them."
        )
    elif state.pinned_bytes >= asked and not expandable:
        advice.append(
            f"Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: {amount(state.pinned_bytes)} are free in segments "
            "that live blocks keep from being given back."
        )
    if room.free_elsewhere_bytes >= asked:
        advice.append(
            f"{amount(room.free_elsewhere_bytes)} are reserved and unused on other streams, in private pools or for "
            "blocks of another size, where this request cannot look: use fewer streams, or free the graphs that own "
            "the pools."
        )
    if state.waste_bytes * 10 >= max(state.requested_bytes, 1):
        advice.append(
            f"{amount(state.waste_bytes)} are lost to rounding: make many small tensors into few large ones, or lower "
            "roundup_power2_divisions."
        )
    return advice or [HOLD_LESS]


def amount(num_bytes: int) -> str:
    """Bytes for a sentence, in binary units."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
