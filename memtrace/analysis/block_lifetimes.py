"""Lifetimes of the largest blocks of a device: when and where in the address space each of them was live."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True)
class BlockLifetimes:
    """The largest blocks of a device, one entry per block in every array."""

    block_ids: Array
    start_ns: Array
    """Time of the allocation; for a block that is older than the recording, the time of the first event."""
    end_ns: Array
    """Time of the free; for a block that is live at the end, the time of the last event."""
    offset_bytes: Array
    """Address without the gaps that none of these blocks covers."""
    size_bytes: Array
    category: Array
    """Code into ``schema.CATEGORIES``."""
    num_blocks: int
    """Number of blocks of the device with a known address, whether among the largest or not."""


def compute_block_lifetimes(trace: Trace, device: str, max_blocks: int) -> BlockLifetimes:
    """Return the lifetimes of the ``max_blocks`` largest blocks of a device; none where addresses are unknown."""
    table = blocks(trace)
    candidates = np.flatnonzero((table.device == trace.devices.index(device)) & (table.address >= 0) & (table.size > 0))
    largest = candidates[np.argsort(-table.size[candidates], kind="stable")[:max_blocks]]
    time_ns = trace.columns("events", "time_ns")["time_ns"]
    first_ns, last_ns = (int(time_ns[0]), int(time_ns[-1])) if len(time_ns) else (0, 0)
    return BlockLifetimes(
        block_ids=largest,
        start_ns=np.where(table.alloc_ns[largest] >= 0, table.alloc_ns[largest], first_ns),
        end_ns=np.where(table.free_ns[largest] >= 0, table.free_ns[largest], last_ns),
        offset_bytes=close_address_gaps(table.address[largest], table.size[largest]),
        size_bytes=table.size[largest],
        category=table.category[largest],
        num_blocks=len(candidates),
    )


def close_address_gaps(address: Array, size: Array) -> Array:
    """Return offsets in the order of the addresses, without the gaps that no block ever covers.

    Without this, the address space of a process would look empty: its used ranges are far apart.
    """
    if not len(address):
        return address
    order = np.argsort(address, kind="stable")
    reach = np.maximum.accumulate(address[order] + size[order])
    gap = np.zeros(len(order), np.int64)
    gap[1:] = np.maximum(0, address[order][1:] - reach[:-1])
    offset = np.empty(len(order), np.int64)
    offset[order] = address[order] - address[order][0] - np.cumsum(gap)
    return offset
