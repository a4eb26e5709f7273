"""The memory curve of a device, its out-of-memory errors and the memory that the driver reports, packed for the page.

Drawn by ``templates/track_curve.js``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from memtrace.dashboards.delta_encoding import MAX_VALUE, encode_columns, encode_to_fit

from memtrace.analysis.blocks import blocks
from memtrace.analysis.timeline import MemoryCurve, compute_memory_curve
from memtrace.format.schema import COUNTERS, EVENT_KINDS

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_POINTS: Final = 700_000
"""Most instants of the curve: those of a full CUDA history of 1,000,000 entries."""
MAX_FAILURES: Final = 1000
MAX_READINGS: Final = 20_000


@dataclass(frozen=True)
class EncodedCurve:
    """The finest curve that fits."""

    packed: dict[str, Any]
    """Columns time_us and event, a column of bytes for each category, and allocated and reserved where they are
    known."""
    num_points: int
    num_changes: int

    @property
    def note(self) -> str:
        """What the curve leaves out."""
        if self.num_points >= self.num_changes:
            return f"The curve has each of the {self.num_changes:,} changes."
        return (
            f"The curve has {self.num_points:,} of {self.num_changes:,} changes: the highest value of every interval "
            "between two of them is among them."
        )


def encode_curve(trace: Trace, device: str, max_chars: int) -> EncodedCurve | None:
    """Return the curve of a device in at most ``max_chars`` characters; None where it has no allocations."""
    table = blocks(trace)
    if not ((table.device == trace.devices.index(device)) & (table.size > 0)).any():
        return None

    num_changes = 0

    def encode(max_points: int) -> dict[str, Any]:
        nonlocal num_changes
        curve = compute_memory_curve(trace, device, max_points)
        num_changes = curve.num_changes
        return _encode_points(curve)

    packed, _ = encode_to_fit(encode, MAX_POINTS, max_chars)
    return EncodedCurve(packed, packed["length"], num_changes)


def _encode_points(curve: MemoryCurve) -> dict[str, Any]:
    lines = {"allocated": curve.allocated, "reserved": curve.reserved}
    known = {name: level for name, level in lines.items() if level is not None}
    return encode_columns({"time_us": curve.time_ns // 1000, "event": curve.row, **curve.by_category, **known})


def encode_failures(trace: Trace, device: str) -> dict[str, Any]:
    """Return the allocations of a device that failed as columns time_us, event and bytes (-1: unknown)."""
    events = trace.columns("events", "kind", "device", "time_ns", "size")
    failed = (events["kind"] == EVENT_KINDS.index("oom")) & (events["device"] == trace.devices.index(device))
    rows = np.flatnonzero(failed)[:MAX_FAILURES]
    sizes = np.minimum(events["size"][rows], MAX_VALUE)
    return encode_columns({"time_us": events["time_ns"][rows] // 1000, "event": rows, "bytes": sizes})


def encode_device_used(trace: Trace, device: str) -> dict[str, Any]:
    """Return the memory in use on a device by all processes, at each reading of the driver: columns time_us and bytes.

    Of too many readings it has the highest of equal numbers of neighbors. Empty where the trace has none.
    """
    counters = trace.columns("counters", "time_ns", "device", "name", "value")
    selected = (counters["device"] == trace.devices.index(device)) & (counters["name"] == COUNTERS.index("device_used"))
    time_ns, value = counters["time_ns"][selected], counters["value"][selected]
    order = np.argsort(time_ns, kind="stable")
    starts = np.arange(0, len(order), max(1, -(-len(order) // MAX_READINGS)))
    highest = np.maximum.reduceat(value[order], starts) if len(starts) else value
    return encode_columns({"time_us": time_ns[order][starts] // 1000, "bytes": highest})
