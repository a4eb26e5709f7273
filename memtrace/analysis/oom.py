"""Out-of-memory errors: the request that failed, the memory it could not use, what held the rest, and what to try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.allocator.rules import uses_small_pool
from memtrace.allocator.settings import AllocatorSettings
from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.attribution import KIND, op_column
from memtrace.analysis.blocks import blocks
from memtrace.analysis.device_state import DeviceState, device_state_at, recorded_settings
from memtrace.analysis.fragmentation import Fragmentation, measure_fragmentation
from memtrace.analysis.outside_memory import OutsideMemory, outside_memory_at_failure
from memtrace.analysis.thresholds import CONTEXT_BYTES, MIN_ROUNDING_SHARE
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.trace import Trace
from memtrace.units import format_bytes

MAX_HOLDERS: Final = 8
"""Most allocation sites listed for one out-of-memory error."""
REDUCE_LIVE_MEMORY: Final = "Reduce live memory: the table lists the lines that allocated most of it."


@dataclass(frozen=True)
class MemoryHolder:
    """Live blocks of one allocation site."""

    site: str | None
    """Allocation site; None: no stack was recorded."""
    requested_bytes: int
    num_blocks: int


@dataclass(frozen=True)
class RequestRoom:
    """Where a request on a GPU could look for memory, and why it found none."""

    segment_bytes: int
    """Bytes that the allocator requested from the device to serve it, under the recorded settings."""
    largest_fit_bytes: int
    """Largest free block that the request could use."""
    free_same_stream_bytes: int
    """Free bytes that the request could use: on its stream, in its pool, in segments for its size."""
    free_elsewhere_bytes: int
    """Free bytes that it could not use: on other streams, in other pools, or in segments for other sizes."""
    lacking_bytes: int
    """By how much live memory must shrink for the request to fit without any fragmentation; 0: it would have fitted."""
    state: Fragmentation
    """The reserved memory of the device when the request failed."""


@dataclass(frozen=True)
class OutOfMemory(Displayed):
    """One failed allocation."""

    device: str
    event: int
    """Row of ``events``."""
    time_ns: int | None
    """Time of the failure; None: the trace has no times."""
    asked_bytes: int
    """Size of the request that failed."""
    site: str | None
    """Allocation site of the request; None: no stack was recorded."""
    device_free_bytes: int | None
    """Bytes that the driver reported free; None: unknown."""
    outside: OutsideMemory | None
    """Memory of the GPU outside torch's allocator (contexts, libraries, other processes); None: unknown, or the CPU."""
    live_bytes: int
    """Bytes requested for the live blocks."""
    room: RequestRoom | None
    """None on the CPU, whose allocator has no segments."""
    holders: tuple[MemoryHolder, ...]
    """The allocation sites that hold most, largest first, at most ``MAX_HOLDERS``."""
    advice: tuple[str, ...]
    """What to try, in sentences, the most promising first."""


def explain_out_of_memory(trace: Trace) -> list[OutOfMemory]:
    """Return every failed allocation in a trace of one rank, in order."""
    kinds = trace.columns("events", "kind")["kind"]
    return [_explain(trace, int(row)) for row in np.flatnonzero(kinds == KIND["oom"])]


def _explain(trace: Trace, row: int) -> OutOfMemory:
    events = trace.columns("events", "time_ns", "device", "size", "stream", "pool", "op_id", "device_free")
    time_ns, code = int(events["time_ns"][row]), int(events["device"][row])
    asked, device_free = int(events["size"][row]), int(events["device_free"][row])
    state, settings = device_state_at(trace, code, row), recorded_settings(trace)
    known_free = device_free if device_free >= 0 else None
    room, outside = None, None
    if trace.devices[code] != "cpu":
        reserved = int(state.segments.size.sum())
        outside = outside_memory_at_failure(trace, trace.devices[code], time_ns, known_free, reserved)
    if len(state.segments):
        pool, stream = max(int(events["pool"][row]), 0), max(int(events["stream"][row]), 0)
        is_usable = _usable_free_blocks(state, settings, asked, pool, stream)
        room = _measure_room(trace, state, settings, asked, max(device_free, 0), is_usable)
    sites, place = allocation_sites(trace, op_column(trace, events["op_id"][row : row + 1], "stack"))
    return OutOfMemory(
        device=trace.devices[code],
        event=row,
        time_ns=time_ns if trace.has_times else None,
        asked_bytes=asked,
        site=sites[int(place[0])],
        device_free_bytes=known_free,
        outside=outside,
        live_bytes=int(state.live.requested.sum()),
        room=room,
        holders=_find_holders(trace, state),
        advice=tuple(_advise(settings, asked, room, device_free, outside)),
    )


def _measure_room(
    trace: Trace, state: DeviceState, settings: AllocatorSettings, asked: int, device_free: int, is_usable: Array
) -> RequestRoom:
    usable = state.free.size[is_usable]
    free_usable, free_total = int(usable.sum()), int(state.free.size.sum())
    return RequestRoom(
        segment_bytes=settings.device_request_size(asked),
        largest_fit_bytes=int(usable.max(initial=0)),
        free_same_stream_bytes=free_usable,
        free_elsewhere_bytes=free_total - free_usable,
        lacking_bytes=max(asked - free_total - device_free, 0),
        state=measure_fragmentation(trace, state),
    )


def _usable_free_blocks(state: DeviceState, settings: AllocatorSettings, asked: int, pool: int, stream: int) -> Array:
    """Return which free blocks a request may use, whatever their size."""
    segments, owner = state.segments, state.free.segment
    same_list = (segments.pool[owner] == pool) & (segments.stream[owner] == stream)
    is_usable: Array = same_list & (segments.small[owner] == uses_small_pool(settings.round_size(asked)))
    return is_usable


def _find_holders(trace: Trace, state: DeviceState) -> tuple[MemoryHolder, ...]:
    live = state.live
    sites, place = allocation_sites(trace, blocks(trace).stack[live.block])
    held = np.bincount(place, weights=live.requested, minlength=len(sites)).astype(np.int64)
    num_blocks = np.bincount(place, minlength=len(sites))
    largest = np.argsort(-held, kind="stable")[:MAX_HOLDERS]
    return tuple(MemoryHolder(sites[i], int(held[i]), int(num_blocks[i])) for i in largest.tolist())


def _advise(
    settings: AllocatorSettings, asked: int, room: RequestRoom | None, device_free: int, outside: OutsideMemory | None
) -> list[str]:
    """Return what would have helped, judged by the numbers."""
    if room is None:
        return [REDUCE_LIVE_MEMORY]
    advice = _advice_about_outside_memory(room, device_free, outside)
    advice += _advice_about_size(asked, room, device_free, outside_is_cause=bool(advice))
    if not settings.expandable_segments:
        advice += _advice_about_expandable_segments(asked, room)
    if room.free_elsewhere_bytes >= asked:
        advice.append(
            f"Use fewer streams, or delete CUDA graphs that own private memory pools: "
            f"{format_bytes(room.free_elsewhere_bytes)} are reserved but unused on other streams, in private pools or "
            "in segments for other sizes, where this request cannot use them."
        )
    if room.state.waste_bytes >= MIN_ROUNDING_SHARE * max(room.state.requested_bytes, 1):
        lower = " or lower roundup_power2_divisions" if settings.roundup_power2_divisions else ""
        advice.append(
            f"Combine many small tensors into few large ones{lower}: rounding takes "
            f"{format_bytes(room.state.waste_bytes)}."
        )
    return advice or [REDUCE_LIVE_MEMORY]


def _advice_about_outside_memory(room: RequestRoom, device_free: int, outside: OutsideMemory | None) -> list[str]:
    """Return what to do about memory outside the allocator, where enough of it for the request is unusual."""
    missing = room.segment_bytes - device_free
    if outside is None or device_free < 0 or missing <= 0:
        return []
    growth = outside.growth_bytes or 0
    if growth < missing and outside.bytes - CONTEXT_BYTES < missing:
        return []
    grown = f", {format_bytes(growth)} more than when the recording began" if growth > 0 else ""
    return [
        f"Check for other processes on the device (nvidia-smi) and for libraries that allocate there: "
        f"{format_bytes(outside.bytes)} are in use outside torch's allocator{grown}. The request would have succeeded "
        f"with {format_bytes(missing)} of them."
    ]


def _advice_about_size(asked: int, room: RequestRoom, device_free: int, *, outside_is_cause: bool) -> list[str]:
    advice = []
    if device_free >= room.segment_bytes:
        advice.append(
            f"Check for a memory limit of this process (torch.cuda.set_per_process_memory_fraction), or for another "
            f"process that needed the memory for a short time: the device had {format_bytes(device_free)} free, enough "
            f"for the {format_bytes(room.segment_bytes)} that the allocator requested."
        )
    obtainable = room.state.reserved_bytes + device_free
    if device_free >= 0 and obtainable < asked and not outside_is_cause:
        advice.append(
            f"Request less memory: {format_bytes(asked)} exceed the {format_bytes(obtainable)} that would be available "
            "with no other tensor on the device. Check the shape of the tensor."
        )
    elif room.lacking_bytes:
        advice.append(
            f"Reduce live memory by {format_bytes(room.lacking_bytes)}: the request would not fit even without "
            "fragmentation. Use a smaller batch, activation checkpointing, or an optimizer with less state."
        )
    return advice


def _advice_about_expandable_segments(asked: int, room: RequestRoom) -> list[str]:
    action = "Try PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
    effect = "Expandable segments usually waste less; memtrace plan allocator predicts the effect."
    if room.free_same_stream_bytes >= room.segment_bytes:
        return [
            f"{action}: {format_bytes(room.free_same_stream_bytes)} are reserved but unused, in blocks that are each "
            f"too small. {effect}"
        ]
    if room.state.pinned_bytes >= asked:
        return [
            f"{action}: {format_bytes(room.state.pinned_bytes)} are free in segments that live blocks keep from being "
            f"released. {effect}"
        ]
    return []
