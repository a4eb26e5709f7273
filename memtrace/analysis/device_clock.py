"""Clocks: when operators ran by the clock of a GPU, where the recording has it, and else by that of the host.

A GPU runs an operator later than the host launches it. ``record(device_time=True)`` measures when; the times are in the
table ``device_times``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from memtrace.analysis.operators import op_column
from memtrace.format.arrays import Array
from memtrace.trace import Trace
from memtrace.units import format_count

Clock = Literal["host", "launch", "device"]
CLOCKS: Final[tuple[Clock, ...]] = ("host", "launch", "device")
"""The clocks of access times: the host's time at which an operator ran on the CPU, the host's time at which it was
launched on a GPU, and the GPU's own time at which it ran."""
CLOCK_LABELS: Final = {"host": "host time", "launch": "host time of the launch", "device": "device time"}
HOST: Final = CLOCKS.index("host")
LAUNCH: Final = CLOCKS.index("launch")
DEVICE: Final = CLOCKS.index("device")


@dataclass(frozen=True)
class TimedCalls:
    """Operator calls that were timed on a device, in nanoseconds since the recording began."""

    op_id: Array
    device: Array
    """Position in ``Trace.devices``; -1: unknown."""
    start_ns: Array
    """When the call began on the device."""
    end_ns: Array
    """When it ended there."""

    def __len__(self) -> int:
        return len(self.op_id)


@dataclass(frozen=True)
class AccessTimes:
    """When accesses happened: a read when its operator began, a write when its operator ended."""

    host_ns: Array
    """By the host's clock; of an operator on a GPU, when it was launched."""
    device_ns: Array
    """By the clock of the GPU; -1 where the operator was not timed there."""
    clock: Array
    """The most exact clock that is known for each access, as a position in ``CLOCKS``."""


def timed_calls(trace: Trace) -> TimedCalls:
    """Return the operator calls of a single-rank trace that were timed on a device, ordered by call and device."""
    return trace.cached(_timed_calls)


def _timed_calls(trace: Trace) -> TimedCalls:
    if not trace.num_rows("device_times"):
        empty = np.empty(0, np.int64)
        return TimedCalls(empty, empty, empty, empty)
    table = trace.columns("device_times", "op_id", "device", "start_ns", "duration_ns")
    order = np.lexsort((table["device"], table["op_id"]))
    start_ns = table["start_ns"][order]
    op_id, device = table["op_id"][order].astype(np.int64), table["device"][order].astype(np.int64)
    return TimedCalls(op_id, device, start_ns, start_ns + table["duration_ns"][order])


def access_times(trace: Trace, rows: Array, is_read: Array) -> AccessTimes:
    """Return when accesses happened, on the device where the operator was timed there.

    Args:
        trace: a single-rank trace.
        rows: rows of ``events`` of kind read or write.
        is_read: whether each of them is a read.
    """
    events = trace.columns("events", "time_ns", "op_id", "device")
    device = events["device"][rows]
    on_cpu = np.array([name == "cpu" for name in trace.devices], bool)
    clock = np.where(on_cpu[device], HOST, LAUNCH).astype(np.int8)
    device_ns = np.full(len(rows), -1, np.int64)
    calls = timed_calls(trace)
    if len(calls):
        call = _find_calls(calls, len(trace.devices), events["op_id"][rows], device)
        is_timed = (call >= 0) & (clock == LAUNCH)
        timed = call[is_timed]
        device_ns[is_timed] = np.where(is_read[is_timed], calls.start_ns[timed], calls.end_ns[timed])
        clock[is_timed] = DEVICE
    return AccessTimes(events["time_ns"][rows], device_ns, clock)


def _find_calls(calls: TimedCalls, num_devices: int, op_id: Array, device: Array) -> Array:
    """Return the position in ``calls`` of each operator call on a device; -1: it was not timed there."""
    keys = calls.op_id * (num_devices + 1) + calls.device + 1
    found = np.full(len(op_id), -1, np.int64)
    for place in (np.zeros(len(device), np.int64), device.astype(np.int64) + 1):  # the device itself takes precedence
        wanted = op_id.astype(np.int64) * (num_devices + 1) + place
        position = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        is_found = (keys[position] == wanted) & (op_id >= 0)
        found[is_found] = position[is_found]
    return found


def count_clocks(clock: Array) -> dict[str, int]:
    """Return how many times are by each clock, given positions in ``CLOCKS``; clocks without any are left out."""
    counts = np.bincount(clock, minlength=len(CLOCKS)).tolist()
    return {name: number for name, number in zip(CLOCKS, counts, strict=True) if number}


def describe_clocks(num_intervals: Mapping[str, int]) -> str:
    """Return a sentence about the clocks by which access intervals were measured.

    Args:
        num_intervals: what ``count_clocks`` returns.
    """
    if set(num_intervals) <= {"host"}:
        return "Times are host times."
    if set(num_intervals) == {"device"}:
        return "Times are device times: when operators ran on the GPU."
    if "device" not in num_intervals:
        on_cpu = " of CPU operators, and" if "host" in num_intervals else ""
        return (
            f"Times are host times{on_cpu} of the launch: a GPU runs operators later than they are launched. Record "
            "with device_time=True to measure intervals on the GPU."
        )
    reasons = {
        "device": "on the GPU",
        "launch": "between launches on the host, because an operator at one of their ends was not timed on the GPU",
        "host": "on the CPU",
    }
    parts = [
        f"{format_count(num_intervals[clock], 'interval')} {reason}"
        for clock, reason in reasons.items()
        if num_intervals.get(clock)
    ]
    return f"Times are measured by several clocks: {'; '.join(parts)}."


def launch_times(trace: Trace) -> Array:
    """Return the host time at which each of ``timed_calls(trace)`` was launched; -1: unknown."""
    return op_column(trace, timed_calls(trace).op_id, "start_ns")
