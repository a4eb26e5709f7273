"""Reserved memory of a long trace: its peak, and how it is used there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import numpy as np

from memtrace.analysis.by_part.events import NotDivisibleError
from memtrace.analysis.by_part.levels import DeviceFacts
from memtrace.analysis.by_part.live_blocks import BlockColumns
from memtrace.analysis.event_codes import KIND
from memtrace.analysis.fragmentation import Fragmentation, compute_fragmentation
from memtrace.analysis.peak import Maximum
from memtrace.format.arrays import Array
from memtrace.format.encode import encode_codes
from memtrace.trace import Trace

_COLUMNS: Final = ("kind", "address", "size", "stream", "pool")


def find_reserved(segments: Trace, device: str, facts: DeviceFacts) -> tuple[Maximum, int] | None:
    """Return the peak of the reserved bytes and those at the end; None where the device has no segments.

    Args:
        segments: a trace with the segments at the end.
        device: name of the device.
        facts: what all parts hold of the device.

    Raises:
        NotDivisibleError: the recording was cut off before the segments at its end were written.
    """
    final = segments.columns("segments", "device", "size")
    is_there = device in segments.devices
    of_device = final["device"] == segments.devices.index(device) if is_there else np.zeros(0, bool)
    if not facts.segment_rows and not of_device.any():
        return None
    if not segments.num_rows("segments"):
        raise NotDivisibleError("the segments at the end are unknown")
    end = int(final["size"][of_device].sum()) if is_there else 0
    return facts.reserved.maximum(end - facts.reserved.total), end


def find_fragmentation(
    trace: Trace,
    segments: Trace,
    device: str,
    facts: DeviceFacts,
    reserved: tuple[Maximum, int],
    live_blocks: Callable[[str, int], BlockColumns],
) -> Fragmentation | None:
    """Return how the reserved memory is used at its peak; see ``fragmentation.compute_fragmentation``.

    Args:
        trace: the long trace.
        segments: a trace with the segments at the end.
        device: name of the device.
        facts: what all parts hold of the device.
        reserved: the peak of the reserved bytes, and those at the end.
        live_blocks: returns the blocks that are live after a row.
    """
    row = _row_of_peak(facts, reserved)
    columns = live_blocks(device, row)
    history = facts.segment_rows or tuple(np.empty(0, np.int64) for _ in range(6))
    num_blocks, num_events = len(columns["id"]), len(history[0])

    def both(of_blocks: Array, of_segments: Array) -> Array:
        return np.concatenate([of_blocks, of_segments])

    missing = np.full(num_events, -1)
    events: dict[str, Array] = {
        "time_ns": np.zeros(num_blocks + num_events, np.int64),
        "kind": both(np.full(num_blocks, KIND["baseline"]), history[1]).astype(np.int8),
        "device": np.zeros(num_blocks + num_events, np.int8),
        "block_id": both(np.arange(num_blocks), missing),
        "size": both(columns["requested"], history[3]),
        "allocated_size": both(columns["allocated_size"], missing),
        "address": both(columns["address"], history[2]),
        "stream": both(columns["stream"], history[4]),
        "pool": both(np.full(num_blocks, -1), history[5]),
    }
    zero = np.zeros(1, np.int64)
    step: dict[str, Array] = {"kind": np.array([0]), "start_ns": zero, "duration_ns": zero}
    small = trace.with_tables(
        {
            "events": encode_codes("events", events, (device,)),
            "segments": segments.arrow_table("segments"),
            "spans": encode_codes("spans", step, ()),
        },
        {},
    )
    at = num_blocks + int(np.searchsorted(history[0], row, side="right")) - 1
    result = compute_fragmentation(small, device, row=at)
    return None if result is None else replace(result, event=row)


def _row_of_peak(facts: DeviceFacts, reserved: tuple[Maximum, int]) -> int:
    """Return, of the rows at the peak of reserved memory, the first with most live bytes; -1: the start."""
    start, peak = reserved[1] - facts.reserved.total, reserved[0].bytes
    moment = facts.fullest
    is_moment = moment is not None and start + moment.reserved == peak
    if start == peak and not (is_moment and moment is not None and moment.live > 0):
        return -1
    if is_moment and moment is not None:
        return moment.row
    return reserved[0].event
