"""Tables of the allocator's state: block map at the peak, reserved memory over time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.allocator.history import (
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Int64s,
)
from memtrace.allocator.model import CachingAllocator
from memtrace.allocator.operations import OperationSequence, run_operations
from memtrace.allocator.replay import PreparedHistory, replay_allocator, run_history
from memtrace.allocator.restored_state import restore_state
from memtrace.allocator.settings import AllocatorSettings
from memtrace.allocator.simulated_devices import SyntheticDevice
from memtrace.allocator.what_if import Workload

if TYPE_CHECKING:
    import pandas as pd

_BLOCK_MAP_COLUMNS: Final = (
    "segment",
    "segment_address",
    "address",
    "size_bytes",
    "requested_bytes",
    "live",
    "stream",
    "pool",
    "small",
)


def block_map_at_peak(prepared: PreparedHistory) -> pd.DataFrame:
    """Return the live and free blocks of every segment at the peak of reserved memory, by replaying the history.

    Columns: segment (numbered by address), segment_address, address, size_bytes, requested_bytes (NA: a free block),
    live, stream, pool, small.
    """
    whole, _ = run_history(prepared)
    at_peak = replay_allocator(prepared)
    until_peak = _first_requests(prepared.operations, whole.request_at_peak)
    run_operations(until_peak, at_peak, restore_state(at_peak, prepared.start))
    return block_map(at_peak)


def block_map(allocator: CachingAllocator) -> pd.DataFrame:
    """Return the live and free blocks of every segment of a model, with the columns of `block_map_at_peak`."""
    import pandas as pd

    rows = [
        (
            number,
            blocks[0].address,
            block.address,
            block.size,
            block.requested if block.live else None,
            block.live,
            block.free_list.stream,
            block.free_list.pool.private,
            block.free_list.pool.small,
        )
        for number, blocks in enumerate(allocator.segments())
        for block in blocks
    ]
    table: pd.DataFrame = pd.DataFrame(rows, columns=list(_BLOCK_MAP_COLUMNS)).astype({"requested_bytes": "Int64"})
    return table


def free_bytes_by_segment(blocks: pd.DataFrame) -> pd.Series[int]:
    """Return the free bytes of each segment of a block map, most first; the index is the segment's number."""
    free: pd.Series[int] = blocks["size_bytes"].where(~blocks["live"], 0).groupby(blocks["segment"]).sum()
    return free.sort_values(ascending=False, kind="stable")


def reserved_over_time(workload: Workload, settings: AllocatorSettings, time_ns: Int64s) -> pd.DataFrame:
    """Return the memory reserved under a setting on a device of unlimited capacity.

    One row per change and one at the end. Columns: time_ns, reserved_bytes.

    Args:
        workload: the requests.
        settings: the settings to simulate.
        time_ns: time of each entry that the workload's operations refer to.
    """
    import pandas as pd

    operations = workload.operations
    allocator = CachingAllocator(settings, SyntheticDevice(total_bytes=workload.device_bytes), workload.rules)
    run_operations(operations, allocator)
    request_times = time_ns[operations.request_entries] if len(time_ns) else time_ns
    first, last = (int(time_ns[0]), int(time_ns[-1])) if len(time_ns) else (0, 0)
    request = np.array([event.request for event in allocator.log], np.int64) - operations.num_older
    change = np.array([_reserved_change(event.kind, event.size) for event in allocator.log], np.int64)
    times = np.where(request > 0, np.append(request_times, first)[np.maximum(request, 1) - 1], first)
    reserved = np.append(np.cumsum(change), allocator.reserved)
    table = pd.DataFrame({"time_ns": np.append(times, last), "reserved_bytes": reserved})
    last_of_each_time: pd.DataFrame = table.groupby("time_ns", sort=True, as_index=False).last()
    return last_of_each_time


def _reserved_change(kind: int, size: int) -> int:
    if kind in (SEGMENT_ALLOC, SEGMENT_MAP):
        return size
    return -size if kind in (SEGMENT_FREE, SEGMENT_UNMAP) else 0


def _first_requests(operations: OperationSequence, num_requests: int) -> OperationSequence:
    """Return the operations up to and including the n-th request."""
    end = int(np.searchsorted(np.cumsum(operations.is_request), num_requests)) + 1 if num_requests else 0
    columns = {name: getattr(operations, name)[:end] for name in ("operation", "number", "entry")}
    return replace(operations, **columns)
