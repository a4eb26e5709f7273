"""Out-of-memory errors: the request that failed, the memory it could not use, what held the rest, and what to try."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from memtrace.allocator.rules import uses_small_pool
from memtrace.allocator.settings import AllocatorSettings
from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.attribution import KIND, op_column, step_rows
from memtrace.analysis.block_groups import group_by_category
from memtrace.analysis.blocks import blocks
from memtrace.analysis.device_state import DeviceState, device_state_at, recorded_settings
from memtrace.analysis.fragmentation import Fragmentation, measure_fragmentation
from memtrace.analysis.outside_memory import OutsideMemory, outside_memory_at_failure
from memtrace.analysis.peak import phase_at
from memtrace.analysis.thresholds import CONTEXT_BYTES, MIN_FRAGMENTED_SHARE, MIN_ROUNDING_SHARE
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.trace import Trace
from memtrace.units import format_bytes

MAX_HOLDERS: Final = 8
"""Most allocation sites listed for one out-of-memory error."""
REDUCE_LIVE_MEMORY: Final = "Reduce live memory: the table lists the lines that allocated most of it."


Cause = Literal["capacity", "fragmentation", "outside memory", "request too large"]
"""Why a request failed: live memory left too little room; the room was in pieces or in other pools; the memory was in
use outside torch's allocator, by other processes for instance; or the request exceeds what the device could give with
no other tensor on it."""


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
    available_bytes: int
    """Bytes that no tensor held: free on the device, or reserved but unused."""
    missing_bytes: int
    """By how much live memory must shrink for the request to fit if no unused part of the reserved memory serves it."""
    outside_excess_bytes: int
    """Memory outside torch's allocator with which the request would have succeeded, as far as it is unusual; else 0."""

    @property
    def certain_bytes(self) -> int:
        """By how much live memory must shrink for the request to fit although freed memory lies in pieces too.

        Twice as much as now may then be unused.
        """
        return self.missing_bytes + self.state.free_bytes

    def is_covered_by(self, saved_bytes: int) -> bool | None:
        """Return whether the request fits if live memory shrinks; None: it depends on where the freed blocks lie."""
        if saved_bytes >= self.certain_bytes:
            return True
        return False if saved_bytes < self.lacking_bytes else None


@dataclass(frozen=True)
class OutOfMemory(Displayed):
    """One failed allocation."""

    device: str
    event: int
    """Row of ``events``."""
    time_ns: int | None
    """Time of the failure; None: the trace has no times."""
    step: int | None
    """Step in which the request failed; None: outside every step, or in one that did not end."""
    phase: str | None
    """Phase of the request: forward, backward, optimizer or other; None: unknown."""
    cause: Cause | None
    """Why the request failed; None on the CPU, where memory runs out for reasons outside the process."""
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
    live_bytes_by_category: dict[str, int]
    """The same by category, largest first."""
    likely_activation_bytes: int
    """Those bytes of activations that backward had not read yet: they are likely ones."""
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
        room = _measure_room(trace, state, settings, asked, device_free, is_usable, outside)
    sites, place = allocation_sites(trace, op_column(trace, events["op_id"][row : row + 1], "stack"))
    table, live = blocks(trace), state.live.block
    step = int(step_rows(trace).of_rows(np.array([row]))[0])
    return OutOfMemory(
        device=trace.devices[code],
        event=row,
        time_ns=time_ns if trace.has_times else None,
        step=step if step >= 0 else None,
        phase=phase_at(trace, row),
        cause=None if room is None else _find_cause(asked, room, device_free),
        asked_bytes=asked,
        site=sites[int(place[0])],
        device_free_bytes=known_free,
        outside=outside,
        live_bytes=int(state.live.requested.sum()),
        live_bytes_by_category={group.name: group.bytes for group in group_by_category(trace, live) if group.name},
        likely_activation_bytes=int(table.size[live[table.waits_for_backward[live]]].sum()),
        room=room,
        holders=_find_holders(trace, state),
        advice=tuple(_advise(settings, asked, room, device_free, outside)),
    )


def _measure_room(
    trace: Trace,
    state: DeviceState,
    settings: AllocatorSettings,
    asked: int,
    device_free: int,
    is_usable: Array,
    outside: OutsideMemory | None,
) -> RequestRoom:
    usable = state.free.size[is_usable]
    free_usable, free_total = int(usable.sum()), int(state.free.size.sum())
    segment = settings.device_request_size(asked)
    available = free_total + max(device_free, 0)
    return RequestRoom(
        segment_bytes=segment,
        largest_fit_bytes=int(usable.max(initial=0)),
        free_same_stream_bytes=free_usable,
        free_elsewhere_bytes=free_total - free_usable,
        lacking_bytes=max(asked - available, 0),
        state=measure_fragmentation(trace, state),
        available_bytes=available,
        missing_bytes=max(segment - max(device_free, 0), 0),
        outside_excess_bytes=_outside_excess(segment, device_free, outside),
    )


def _outside_excess(segment_bytes: int, device_free: int, outside: OutsideMemory | None) -> int:
    """Return the unusual memory outside the allocator if the request would have succeeded with it, else 0."""
    missing = segment_bytes - device_free
    if outside is None or device_free < 0 or missing <= 0:
        return 0
    growth, beyond_context = outside.growth_bytes or 0, outside.bytes - CONTEXT_BYTES
    return next((excess for excess in (growth, beyond_context) if excess >= missing), 0)


def _find_cause(asked: int, room: RequestRoom, device_free: int) -> Cause:
    if room.outside_excess_bytes:
        return "outside memory"
    if device_free >= 0 and room.state.reserved_bytes + device_free < asked:
        return "request too large"
    is_in_pieces = room.state.free_bytes >= MIN_FRAGMENTED_SHARE * room.state.reserved_bytes
    return (
        "fragmentation"
        if not room.lacking_bytes and (is_in_pieces or device_free >= room.segment_bytes)
        else "capacity"
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
    if outside is None or not room.outside_excess_bytes:
        return []
    growth = outside.growth_bytes or 0
    grown = f", {format_bytes(growth)} more than when the recording began" if growth > 0 else ""
    return [
        f"Check for other processes on the device (nvidia-smi) and for libraries that allocate there: "
        f"{format_bytes(outside.bytes)} are in use outside torch's allocator{grown}. The request would have succeeded "
        f"with {format_bytes(room.segment_bytes - device_free)} of them."
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
