"""The history of a device as PyTorch's CUDA allocator records it: one entry per allocation, free and segment event.

Devices without segments (the CPU) get one segment per block, reserved and released with the block, because PyTorch's
viewer needs a segment around each block. Reserved bytes are then equal to the bytes of the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.attribution import KIND
from memtrace.analysis.blocks import Blocks, blocks
from memtrace.analysis.device_state import has_segments
from memtrace.format.arrays import Array
from memtrace.trace import Trace

ACTIONS: Final = (
    "alloc",
    "free_requested",
    "free_completed",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)
_ACTION: Final = {name: code for code, name in enumerate(ACTIONS)}
_OWN_KINDS: Final = (
    "free_requested",
    "segment_alloc",
    "segment_free",
    "segment_map",
    "segment_unmap",
    "oom",
    "snapshot",
)
_FIRST_MADE_UP_ADDRESS: Final = 1 << 52
"""Above the addresses of processes, and exact in JavaScript."""
_ALIGNMENT: Final = 512


@dataclass(frozen=True)
class Entries:
    """Entries in the order of what happened; -1 is none or unknown."""

    row: Array
    """Row of the table events."""
    action: Array
    """Index into ACTIONS."""
    block: Array
    address: Array
    size: Array
    """Requested bytes of a block, bytes of a segment, requested bytes of a failed allocation."""
    device_free: Array

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True)
class DeviceHistory:
    """What a snapshot needs of one device."""

    device: str
    has_segments: bool
    """Whether the trace has the allocator's segments; if not, each block is one."""
    address: Array
    """Address of each block of the trace."""
    entries: Entries


def device_history(trace: Trace, device: str) -> DeviceHistory:
    """Return the history of a device of a single-rank trace. Blocks without a byte are left out."""
    code = trace.devices.index(device)
    table = blocks(trace)
    on_device = (table.device == code) & (table.size > 0)
    with_segments = has_segments(trace, code)
    address = table.address if with_segments else distinct_addresses(table, on_device)
    own = _own_entries(trace, code, address, on_device)
    pieces = [_block_entries(table, on_device, address, own, has_own_segments=with_segments), own]
    joined = [np.concatenate(columns) for columns in zip(*pieces, strict=True)]
    order = np.lexsort((joined[1], joined[0]))
    row, _, *rest = (column[order] for column in joined)
    return DeviceHistory(device, with_segments, address, Entries(row, *rest))


_Columns = tuple[Array, ...]
"""Row, position within the row, action, block, address, size, free bytes of the device."""


def _block_entries(
    table: Blocks, on_device: Array, address: Array, own: _Columns, *, has_own_segments: bool
) -> _Columns:
    """Return allocations and frees, with the entries that PyTorch's allocator would have around them."""
    allocated = np.flatnonzero(on_device & (table.alloc_event >= 0))
    freed = np.flatnonzero(on_device & (table.free_event >= 0))
    is_requested = np.zeros(len(table), bool)
    is_requested[own[3][own[2] == _ACTION["free_requested"]]] = True
    parts = [
        (allocated, table.alloc_event, 1, "alloc"),
        (freed[~is_requested[freed]], table.free_event, 0, "free_requested"),
        (freed, table.free_event, 1, "free_completed"),
    ]
    if not has_own_segments:
        parts += [(allocated, table.alloc_event, 0, "segment_alloc"), (freed, table.free_event, 2, "segment_free")]
    block = np.concatenate([part[0] for part in parts])
    return (
        np.concatenate([row[chosen] for chosen, row, _, _ in parts]),
        np.concatenate([np.full(len(chosen), position) for chosen, _, position, _ in parts]),
        np.concatenate([np.full(len(chosen), _ACTION[action]) for chosen, _, _, action in parts]),
        block,
        address[block],
        table.size[block],
        np.full(len(block), -1),
    )


def _own_entries(trace: Trace, device: int, address: Array, on_device: Array) -> _Columns:
    """Return the entries that the trace itself has, except allocations and frees."""
    events = trace.columns("events", "kind", "device", "block_id", "size", "address", "device_free")
    kinds = [KIND[name] for name in _OWN_KINDS]
    chosen = (events["device"] == device) & np.isin(events["kind"], kinds)
    # A snapshot needs to know how much was free when an allocation failed.
    chosen &= (events["kind"] != KIND["oom"]) | (events["device_free"] >= 0)
    is_release = events["kind"] == KIND["free_requested"]
    chosen &= ~is_release | ((events["block_id"] >= 0) & on_device[events["block_id"]] if len(on_device) else False)
    row = np.flatnonzero(chosen)
    kind, block = events["kind"][row], events["block_id"][row]
    action_of_kind = np.full(len(KIND), -1)
    action_of_kind[kinds] = [_ACTION[name] for name in _OWN_KINDS]
    is_release = kind == KIND["free_requested"]
    block_address, block_size = events["address"][row].copy(), events["size"][row].copy()
    block_address[is_release] = address[block[is_release]]
    block_size[is_release] = blocks(trace).size[block[is_release]]
    return (
        row,
        np.ones(len(row), np.int64),
        action_of_kind[kind],
        np.where(is_release, block, -1),
        block_address,
        block_size,
        events["device_free"][row],
    )


def distinct_addresses(table: Blocks, on_device: Array) -> Array:
    """Return an address for each block of a device that no other block of it has while it is live.

    Unknown addresses are replaced, and those of blocks that begin in the memory of a live block (two NumPy arrays on
    one buffer).
    """
    address = table.address.copy()
    begin = table.alloc_event
    end = np.where(table.free_event >= 0, table.free_event, np.iinfo(np.int64).max)
    chosen = np.flatnonzero(on_device & (address >= 0))
    chosen = chosen[np.lexsort((begin[chosen], address[chosen]))]
    is_taken = (address[chosen[1:]] == address[chosen[:-1]]) & (begin[chosen[1:]] < end[chosen[:-1]])
    replaced = np.concatenate([chosen[1:][is_taken], np.flatnonzero(on_device & (address < 0))])
    room = -(-table.size[replaced] // _ALIGNMENT) * _ALIGNMENT
    address[replaced] = _FIRST_MADE_UP_ADDRESS + np.cumsum(room) - room
    distinct: Array = address
    return distinct
