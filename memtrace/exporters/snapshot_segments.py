"""The final state of a device as a snapshot has it: segments with the blocks in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from memtrace.analysis.attribution import KIND
from memtrace.analysis.blocks import blocks
from memtrace.analysis.device_state import DeviceBlocks, DeviceSegments, FreeBlocks, device_state_at
from memtrace.exporters.snapshot_entries import DeviceHistory
from memtrace.format.arrays import Array
from memtrace.trace import Trace

Frames = list[dict[str, Any]]

_ALLOCATED: Final = "active_allocated"
_PENDING: Final = "active_pending_free"
_INACTIVE: Final = "inactive"


def pool_pair(number: int) -> tuple[int, int]:
    """Return a memory pool as torch names it; (0, 0), the default pool, for -1."""
    return (number // 2, 0) if number > 0 and number % 2 else (0, max(number, 0) // 2)


def live_size(trace: Trace, history: DeviceHistory) -> int:
    """Return the bytes of the blocks in the final segments, rounding included."""
    return int(_final_state(trace, history)[1].size.sum())


def final_segments(
    trace: Trace, history: DeviceHistory, number: int, frames_of: Callable[[int], Frames]
) -> list[dict[str, Any]]:
    """Return the segments at the end of the trace.

    Args:
        trace: the trace of one rank.
        history: the device.
        number: number of the device in the snapshot.
        frames_of: returns the frames of a call stack.
    """
    segments, live, free = _final_state(trace, history)
    stack = blocks(trace).stack[live.block]
    is_pending = _is_pending(trace, live.block)
    content: list[list[dict[str, Any]]] = [[] for _ in range(len(segments))]
    for index, owner in enumerate(live.segment.tolist()):
        content[owner].append(
            {
                "address": _unsigned(live.address[index]),
                "size": int(live.size[index]),
                "requested_size": int(live.requested[index]),
                "state": _PENDING if is_pending[index] else _ALLOCATED,
                "frames": frames_of(int(stack[index])),
            }
        )
    for address, size, owner in zip(free.address.tolist(), free.size.tolist(), free.segment.tolist(), strict=True):
        inactive = {"address": _unsigned(address), "size": size, "requested_size": 0, "state": _INACTIVE, "frames": []}
        content[owner].append(inactive)
    return [_segment(segments, index, number, members) for index, members in enumerate(content)]


def _segment(segments: DeviceSegments, index: int, number: int, members: list[dict[str, Any]]) -> dict[str, Any]:
    members.sort(key=lambda block: int(block["address"]))
    active = [block for block in members if block["state"] != _INACTIVE]
    return {
        "device": number,
        "address": _unsigned(segments.address[index]),
        "total_size": int(segments.size[index]),
        "allocated_size": sum(block["size"] for block in active if block["state"] == _ALLOCATED),
        "active_size": sum(block["size"] for block in active),
        "requested_size": sum(block["requested_size"] for block in active),
        "stream": max(int(segments.stream[index]), 0),
        "segment_type": "small" if segments.small[index] else "large",
        "segment_pool_id": pool_pair(int(segments.pool[index])),
        "is_expandable": bool(segments.expandable[index]),
        "frames": [],
        "blocks": members,
    }


def _final_state(trace: Trace, history: DeviceHistory) -> tuple[DeviceSegments, DeviceBlocks, FreeBlocks]:
    """Return the state after the last event. Blocks outside every segment get one of their own each."""
    device = trace.devices.index(history.device)
    state = device_state_at(trace, device, trace.num_rows("events") - 1)
    has_bytes = state.live.requested > 0
    live = DeviceBlocks(
        *(getattr(state.live, name)[has_bytes] for name in ("block", "address", "requested", "size", "segment"))
    )
    if history.has_segments:
        outside = np.flatnonzero(live.segment < 0)
        address = live.address
    else:
        # What the CPU's allocator rounds is unknown; the state has the sizes that a GPU's would have.
        outside, address = np.arange(len(live)), history.address[live.block]
        live = DeviceBlocks(live.block, address, live.requested, live.requested, live.segment)
    owner = live.segment.copy()
    owner[outside] = len(state.segments) + np.arange(len(outside))
    segments = _with_made_up(state.segments, address[outside], live.size[outside])
    return segments, DeviceBlocks(live.block, address, live.requested, live.size, owner), state.free


def _with_made_up(segments: DeviceSegments, address: Array, size: Array) -> DeviceSegments:
    zeros, no = np.zeros(len(address), np.int64), np.zeros(len(address), bool)
    return DeviceSegments(
        address=np.concatenate([segments.address, address]),
        size=np.concatenate([segments.size, size]),
        stream=np.concatenate([segments.stream, zeros]),
        pool=np.concatenate([segments.pool, zeros]),
        small=np.concatenate([segments.small, no]),
        expandable=np.concatenate([segments.expandable, no]),
    )


def _is_pending(trace: Trace, block: Array) -> Array:
    """Return whether the program freed each live block, which then waits for a stream."""
    events = trace.columns("events", "kind", "block_id")
    released = events["block_id"][events["kind"] == KIND["free_requested"]]
    is_released = np.isin(block, released)
    return is_released


def _unsigned(address: int) -> int:
    """Return an address as torch writes it; the trace has those of 2**63 and above as two's complement."""
    return int(address) % (1 << 64)
