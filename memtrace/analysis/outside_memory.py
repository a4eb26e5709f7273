"""Memory of a GPU outside torch's allocator: CUDA contexts, libraries such as NCCL, and other processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from memtrace.format.arrays import Array
from memtrace.format.schema import COUNTERS
from memtrace.trace import Trace
from memtrace.units import format_bytes


@dataclass(frozen=True)
class OutsideReadings:
    """The memory in use outside torch's allocator at each reading of the driver, one element per reading."""

    time_ns: Array
    device: Array
    """Position in ``Trace.devices``."""
    bytes: Array


@dataclass(frozen=True)
class OutsideMemory:
    """Memory in use on a GPU outside torch's allocator, at one moment of a recording."""

    bytes: int
    growth_bytes: int | None
    """By how much it grew since the recording began; None: unknown."""
    is_exact: bool
    """Whether it was measured at that moment; otherwise it is the last reading before, usually of the step's start."""


def outside_readings(trace: Trace) -> OutsideReadings:
    """Return what was in use outside torch's allocator at each reading of a single-rank trace, in order of time."""
    return find_outside_readings(trace.columns("counters", "time_ns", "device", "name", "value"))


def find_outside_readings(counters: Mapping[str, Array]) -> OutsideReadings:
    """Return what was in use outside torch's allocator at each reading, by columns of the table ``counters``."""
    name, device, value = counters["name"], counters["device"], counters["value"]
    # The rows of one reading are neighbors: what the allocator reserved, if it reports that, then what is in use.
    used = np.flatnonzero(name == COUNTERS.index("device_used"))
    used = used[(name[used - 1] == COUNTERS.index("reserved")) & (device[used - 1] == device[used])]
    return OutsideReadings(counters["time_ns"][used], device[used], value[used] - value[used - 1])


def outside_memory_at_failure(
    trace: Trace, device: str, time_ns: int, device_free: int | None, reserved: int
) -> OutsideMemory | None:
    """Return the memory outside torch's allocator when an allocation failed; None: unknown.

    Args:
        trace: a single-rank trace.
        device: name of the device.
        time_ns: time of the failure.
        device_free: bytes that the driver reported free then; None: unknown.
        reserved: bytes that the allocator had reserved then.
    """
    readings = outside_readings(trace)
    on_device = readings.device == trace.devices.index(device)
    values = readings.bytes[on_device]
    info = trace.manifest.devices.get(device)
    if info is not None and info.total_bytes is not None and device_free is not None:
        num_bytes, is_exact = max(info.total_bytes - device_free - reserved, 0), True
    else:
        earlier = values[readings.time_ns[on_device] <= time_ns]
        if not len(earlier):
            return None
        num_bytes, is_exact = int(earlier[-1]), False
    return OutsideMemory(num_bytes, num_bytes - int(values[0]) if len(values) else None, is_exact)


def describe_outside_memory(outside: OutsideMemory | None) -> str:
    """Return a sentence about the memory outside torch's allocator when an allocation failed."""
    if outside is None:
        return "Memory in use outside torch's allocator (CUDA context, libraries, other processes): unknown."
    when = "" if outside.is_exact else ", when it was last read"
    grown = f"; {format_bytes(outside.growth_bytes)} more than when the recording began" if outside.growth_bytes else ""
    if outside.growth_bytes and outside.growth_bytes < 0:
        grown = f"; {format_bytes(-outside.growth_bytes)} less than when the recording began"
    return (
        f"Memory in use outside torch's allocator (CUDA context, libraries, other processes): "
        f"{format_bytes(outside.bytes)}{when}{grown}."
    )
