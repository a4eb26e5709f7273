"""Memory of each step on each device: its peak, what held it, what was reserved, and the growth until its end."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import LiveBytes, level_at, live_bytes, requested_bytes, reserved_bytes
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace


@dataclass(frozen=True)
class DeviceStepMemory:
    """The memory of one device during one step."""

    device: str
    """Name of the device, such as ``cuda:0``."""
    peak_bytes: int
    """Maximum of the live requested bytes during the step."""
    category_bytes: dict[str, int]
    """Bytes of each category at the peak of the step; categories without bytes are left out."""
    reserved_bytes: int | None
    """Maximum of the bytes reserved in segments during the step; None: unknown, or an allocator without segments."""
    live_end_bytes: int
    """Bytes live when the step ends."""
    growth_bytes: int | None
    """Increase of ``live_end_bytes`` since the end of the previous step; None without that step."""


@dataclass(frozen=True)
class StepMemory:
    """The memory of one step on all devices."""

    step: int
    """Step number."""
    devices: tuple[DeviceStepMemory, ...]
    """The devices of the trace."""

    def live_end_bytes(self, device: str) -> int | None:
        """Return the bytes live on a device when the step ends; None where the device had no events yet."""
        return next((memory.live_end_bytes for memory in self.devices if memory.device == device), None)


def measure_step_memory(
    trace: Trace, *, previous: StepMemory | None = None, until_ns: int | None = None
) -> tuple[StepMemory, ...]:
    """Return the memory of every step of a single-rank trace, in order.

    Args:
        trace: a trace of one rank, or a window of it.
        previous: the step before the first one of a window, for the growth of that one.
        until_ns: leave out steps that end at this time or later; None: none are left out.
    """
    steps = step_rows(trace)
    is_wanted = np.ones(len(steps.number), bool) if until_ns is None else steps.start_ns + steps.duration_ns < until_ns
    chosen = np.flatnonzero(is_wanted)
    if previous is not None:
        chosen = chosen[steps.number[chosen] > previous.step]
    first, end = steps.first_row[chosen], steps.end_row[chosen]
    columns = [_measure_device(trace, device, first, end) for device in trace.devices]
    result: list[StepMemory] = []
    for place, number in enumerate(steps.number[chosen].tolist()):
        devices = []
        for device, column in zip(trace.devices, columns, strict=True):
            is_next = previous is not None and previous.step + 1 == number
            before = previous.live_end_bytes(device) if previous is not None and is_next else None
            devices.append(column.at(place, device, before))
        previous = StepMemory(number, tuple(devices))
        result.append(previous)
    return tuple(result)


@dataclass(frozen=True)
class _DeviceColumns:
    """One element per step."""

    peak: Array
    by_category: Array
    """A row per category, a column per step."""
    reserved: Array | None
    live_end: Array

    def at(self, place: int, device: str, live_before: int | None) -> DeviceStepMemory:
        end = int(self.live_end[place])
        at_peak = self.by_category[:, place].tolist()
        return DeviceStepMemory(
            device=device,
            peak_bytes=int(self.peak[place]),
            category_bytes={name: size for name, size in zip(CATEGORIES, at_peak, strict=True) if size},
            reserved_bytes=None if self.reserved is None else int(self.reserved[place]),
            live_end_bytes=end,
            growth_bytes=None if live_before is None else end - live_before,
        )


def _measure_device(trace: Trace, device: str, first: Array, end: Array) -> _DeviceColumns:
    table, live = blocks(trace), requested_bytes(trace, device)
    peak, peak_row = _maxima(live, first, end)
    reserved = reserved_bytes(trace, device)
    by_category = [
        level_at(live_bytes(trace, device, np.where(table.category == code, table.size, 0)), peak_row)
        for code in range(len(CATEGORIES))
    ]
    return _DeviceColumns(
        peak=peak,
        by_category=np.stack(by_category),
        reserved=None if reserved is None else _maxima(reserved, first, end)[0],
        live_end=level_at(live, end - 1),
    )


def _maxima(live: LiveBytes, first: Array, end: Array) -> tuple[Array, Array]:
    """Return the highest level in each range of rows [first, end), the one at its start included, and its row."""
    level = np.concatenate([[live.start], live.bytes])
    rows = np.concatenate([[-1], live.rows])
    starts = np.searchsorted(live.rows, first - 1, side="right")
    ends = np.searchsorted(live.rows, end - 1, side="right") + 1
    places = [start + int(level[start:stop].argmax()) for start, stop in zip(starts, ends, strict=True)]
    highest = np.array(places, np.int64)
    return level[highest], rows[highest]
