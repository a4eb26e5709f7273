"""The part of ``plan auto`` that concerns the CUDA caching allocator: memory that it reserves and does not use."""

from __future__ import annotations

from dataclasses import dataclass

from memtrace.allocator.plan import plan_allocator
from memtrace.analysis.peak import find_peak
from memtrace.planning.auto_changes import ProgramChange
from memtrace.trace import Trace


@dataclass(frozen=True)
class AllocatorChoice:
    """Memory that the allocator reserves beyond the requested bytes, and the settings that keep it small."""

    unused_bytes: int
    """Reserved minus requested bytes, each at its own peak; 0 where the device has no caching allocator."""
    changes: tuple[ProgramChange, ...]


def choose_allocator(trace: Trace, device: str, *, change_settings: bool) -> AllocatorChoice:
    """Return the settings of the allocator with the least reserved memory, if they save any.

    Args:
        trace: A single-rank trace.
        device: The device.
        change_settings: Whether other settings than the recorded ones are considered.
    """
    peak = find_peak(trace, device)
    if peak.reserved is None:
        return AllocatorChoice(0, ())
    recorded = max(peak.reserved.bytes - peak.requested.bytes, 0)
    if not change_settings:
        return AllocatorChoice(recorded, ())
    plans = [each for each in plan_allocator(trace).devices if each.device == device]
    known = [
        prediction
        for each in plans
        if each.replay is not None
        for prediction in each.predictions
        if prediction.peak_reserved_bytes is not None
    ]
    best = min(known, key=lambda prediction: prediction.peak_reserved_bytes or 0, default=None)
    if best is None or best.is_recorded or (best.peak_reserved_bytes or 0) >= peak.reserved.bytes:
        return AllocatorChoice(recorded, ())
    change = ProgramChange(
        "allocator settings",
        f"export PYTORCH_CUDA_ALLOC_CONF={best.setting}",
        0,
        "Reserved memory beyond the requested bytes is predicted for the recorded requests, not for those of the plan.",
    )
    return AllocatorChoice(max((best.peak_reserved_bytes or 0) - peak.requested.bytes, 0), (change,))
