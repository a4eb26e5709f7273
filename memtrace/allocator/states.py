"""Tables behind the figures: segments over time, the blocks and holes at the peak, reserved bytes under a
setting."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from memtrace.allocator.devices import InventedDevice
from memtrace.allocator.history import (
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Int64s,
)
from memtrace.allocator.layout import lay_out
from memtrace.allocator.model import Allocator
from memtrace.allocator.pairing import pair
from memtrace.allocator.program import ALLOCATE, TRY, Program, run
from memtrace.allocator.replay import Prepared, fresh_allocator
from memtrace.allocator.settings import Settings
from memtrace.allocator.what_if import Case

if TYPE_CHECKING:
    import pandas as pd


def segment_lifetimes(prepared: Prepared) -> pd.DataFrame:
    """One row a segment the history knows; an expandable one is a stretch mapped at the start.

    Columns: address, size_bytes, stream, small, expandable, from_ns (NA: older than the history), to_ns (NA:
    held at the end). Source: segment_alloc and segment_free entries, and the segments at the start.
    """
    import pandas as pd

    history, older = prepared.history, prepared.start.segments
    rows = np.flatnonzero((history.kind == SEGMENT_ALLOC) | (history.kind == SEGMENT_FREE))
    found = pair(history.address[rows], history.kind[rows] == SEGMENT_ALLOC)
    born = np.flatnonzero(history.kind[rows] == SEGMENT_ALLOC)
    ends = np.concatenate([_first_free(older.address, history.address[rows], found.held_before), found.partner[born]])
    times = history.time_ns[rows]
    table: pd.DataFrame = pd.DataFrame(
        {
            "address": np.concatenate([older.address, history.address[rows[born]]]),
            "size_bytes": np.concatenate([older.size, history.size[rows[born]]]),
            "stream": np.concatenate([older.stream, history.stream[rows[born]]]),
            "small": np.concatenate([older.small, history.size[rows[born]] == prepared.rules.small_segment_bytes]),
            "expandable": np.concatenate([older.expandable, np.zeros(len(born), np.bool_)]),
        }
    )
    from_ns = np.concatenate([np.full(len(older), -1, np.int64), times[born]])
    to_ns = np.where(ends >= 0, np.append(times, 0)[ends], -1)
    for name, column in (("from_ns", from_ns), ("to_ns", to_ns)):
        table[name] = pd.array(column, dtype="Int64")
        table.loc[column < 0, name] = pd.NA
    return table


def _first_free(address: Int64s, freed: Int64s, held_before: Int64s) -> Int64s:
    """For each older segment the row that gave it back; -1: none did."""
    order = held_before[np.argsort(freed[held_before], kind="stable")]
    at = np.searchsorted(freed[order], address)
    place = np.append(order, -1)[np.minimum(at, len(order))]
    return np.where((at < len(order)) & (np.append(freed, -1)[place] == address), place, -1)


def state_at_peak(prepared: Prepared) -> pd.DataFrame:
    """The blocks and holes of every segment when the most was reserved, by the replay. Bytes.

    Columns: segment (numbered by address), segment_address, address, size_bytes, requested_bytes (NA: a
    hole), live, stream, pool, small.
    """
    whole = fresh_allocator(prepared)
    run(prepared.program, whole, lay_out(whole, prepared.start))
    then = fresh_allocator(prepared)
    run(_until(prepared.program, whole.peak_position), then, lay_out(then, prepared.start))
    return state_table(then)


def state_table(allocator: Allocator) -> pd.DataFrame:
    """The blocks and holes of every segment of a model, as `state_at_peak` has them."""
    import pandas as pd

    rows = [
        (
            number,
            blocks[0].address,
            block.address,
            block.size,
            block.requested if block.live else None,
            block.live,
            block.home.stream,
            block.home.pool.private,
            block.home.pool.small,
        )
        for number, blocks in enumerate(allocator.segments())
        for block in blocks
    ]
    names = [
        "segment",
        "segment_address",
        "address",
        "size_bytes",
        "requested_bytes",
        "live",
        "stream",
        "pool",
        "small",
    ]
    state: pd.DataFrame = pd.DataFrame(rows, columns=names).astype({"requested_bytes": "Int64"})
    return state


def reserved_over_time(case: Case, settings: Settings, time_ns: Int64s) -> pd.DataFrame:
    """Bytes reserved under a setting, one row a change and one at the end, without a limit on the device.

    `time_ns` are the times of the rows that the program's `entry` names. Columns: time_ns, reserved_bytes.
    """
    import pandas as pd

    allocator = Allocator(settings, InventedDevice(total=case.device_bytes), case.rules)
    run(case.program, allocator)
    moments = time_ns[case.program.malloc_entries] if len(time_ns) else time_ns
    first, last = (int(time_ns[0]), int(time_ns[-1])) if len(time_ns) else (0, 0)
    count = np.array([position for position, *_ in allocator.log], np.int64) - case.program.num_older
    change = np.array([_change(kind, size) for _, kind, _, size in allocator.log], np.int64)
    times = np.where(count > 0, np.append(moments, first)[np.maximum(count, 1) - 1], first)
    reserved = np.append(np.cumsum(change), allocator.reserved)
    table = pd.DataFrame({"time_ns": np.append(times, last), "reserved_bytes": reserved})
    last_of_each: pd.DataFrame = table.groupby("time_ns", sort=True, as_index=False).last()
    return last_of_each


def _change(kind: int, size: int) -> int:
    if kind in (SEGMENT_ALLOC, SEGMENT_MAP):
        return size
    return -size if kind in (SEGMENT_FREE, SEGMENT_UNMAP) else 0


def _until(program: Program, requests: int) -> Program:
    """The operations up to and with the n-th request."""
    asked = np.cumsum((program.operation == ALLOCATE) | (program.operation == TRY))
    end = int(np.searchsorted(asked, requests)) + 1 if requests else 0
    return replace(program, operation=program.operation[:end], number=program.number[:end], entry=program.entry[:end])
