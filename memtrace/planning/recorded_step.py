"""The recorded step that predictions start from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.peak import requested_bytes
from memtrace.analysis.warm_up import steps_after_warm_up
from memtrace.errors import MemtraceError
from memtrace.planning.plan import StepCost
from memtrace.trace import Trace


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step. Limits are rows of the events table: [first_row, end_row)."""

    number: int
    first_row: int
    end_row: int
    start_ns: int
    duration_ns: int
    """Duration of this step."""
    cost: StepCost
    """Peak of this step, and the median duration of the steps after warm-up (None: the trace has no real times)."""


def main_device(trace: Trace) -> str:
    """Return the device that plans are made for: the one with the highest peak, GPUs before the CPU.

    Raises:
        MemtraceError: The trace has no memory events.
    """
    if not trace.devices:
        raise MemtraceError("the trace has no memory events. Record a training loop.")
    devices = [device for device in trace.devices if device != "cpu"] or trace.devices
    return max(devices, key=lambda device: int(requested_bytes(trace, device).bytes.max(initial=0)))


def choose_step(trace: Trace, device: str) -> RecordedStep:
    """Return the step after warm-up with the highest peak on a device, the last of several.

    In a trace of few steps, the last one is the least affected by warm-up: optimizer state exists from its start.

    Raises:
        MemtraceError: The trace has no steps, or no memory of this device.
    """
    if device not in trace.devices:
        raise MemtraceError(f"the trace has no memory of {device}: its devices are {', '.join(trace.devices)}.")
    rows = step_rows(trace)
    if not len(rows.number):
        raise MemtraceError(
            "the trace has no steps, which plans start from: record several steps, or mark them with Recording.step()."
        )
    chosen = np.flatnonzero(np.isin(rows.number, steps_after_warm_up(trace)))
    peaks = [step_peak(trace, device, int(rows.first_row[step]), int(rows.end_row[step])) for step in chosen]
    best = int(chosen[len(peaks) - 1 - int(np.argmax(peaks[::-1]))])
    has_times = trace.has_times and not trace.has_fake_tensors
    step_ns = int(np.median(rows.duration_ns[chosen])) if has_times else None
    return RecordedStep(
        number=int(rows.number[best]),
        first_row=int(rows.first_row[best]),
        end_row=int(rows.end_row[best]),
        start_ns=int(rows.start_ns[best]),
        duration_ns=int(rows.duration_ns[best]),
        cost=StepCost(max(peaks), step_ns),
    )


def step_peak(trace: Trace, device: str, first_row: int, end_row: int) -> int:
    """Return the peak of the requested bytes of a device from before the row ``first_row`` until ``end_row``."""
    live = requested_bytes(trace, device)
    first, end = np.searchsorted(live.rows, [first_row, end_row])
    before = live.start if first == 0 else int(live.bytes[first - 1])
    return max(before, int(live.bytes[first:end].max(initial=0)))
