"""What a trace covers, printed at the head of every answer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.peak import find_peak
from memtrace.format.schema import COUNTERS
from memtrace.trace import Trace


@dataclass(frozen=True)
class Coverage:
    """What a trace covers. None: not known. Bytes are requested bytes."""

    first_event_ns: int | None
    """Time of the first event, ns since the recording began."""
    last_event_ns: int | None
    """Time of the last event."""
    num_events: int
    num_steps: int
    lost_events: int | None
    """Events the recorder could not write."""
    dropped_events: int | None
    """Events older than the steps a ring recording keeps."""
    baseline_bytes: int
    """Bytes of the blocks older than the recording that it came to see, all devices."""
    unattributed_bytes: int
    """Bytes live at the requested peak in blocks of category unknown, summed over the devices."""
    outside_allocator_bytes: int | None
    """Bytes that the process holds on its devices outside the traced allocator; None on a CPU."""
    finished: bool
    """False: the process died or was killed while recording; the trace ends at the last flush."""
    stop_reason: str | None
    notes: tuple[str, ...]
    """Sentences about what the trace cannot tell, and why."""

    def as_dict(self) -> dict[str, Any]:
        """The same as plain JSON values."""
        return asdict(self) | {"notes": list(self.notes)}


def outside_allocator(trace: Trace) -> int | None:
    """The most that was in use on the trace's GPUs beside what the allocator held, by the driver's count: contexts,
    libraries, other processes. Bytes, summed over devices; None where nobody asked the driver."""
    counters = trace.columns("counters", "device", "name", "value")
    used = np.flatnonzero(counters["name"] == COUNTERS.index("device_used"))
    if not len(used):
        return None
    # A reading's rows are written together: what was reserved stands before what was used.
    outside = counters["value"][used] - counters["value"][used - 1]
    return sum(int(outside[counters["device"][used] == code].max()) for code in np.unique(counters["device"][used]))


def compute_coverage(trace: Trace) -> Coverage:
    """The coverage of a single-rank trace; see ``Coverage`` for its fields."""
    return trace.cached(_compute_coverage)


def _compute_coverage(trace: Trace) -> Coverage:
    manifest, found = trace.manifest, blocks(trace)
    told = manifest.get("coverage", {})
    time = trace.columns("events", "time_ns")["time_ns"]
    timed = len(time) > 0 and trace.has_times
    unattributed = 0
    for device in trace.devices:
        live = find_peak(trace, device).live
        unattributed += int(found.size[live[found.category[live] == CATEGORY["unknown"]]].sum())
    return Coverage(
        first_event_ns=int(time[0]) if timed else None,
        last_event_ns=int(time[-1]) if timed else None,
        num_events=len(time),
        num_steps=len(step_rows(trace).number),
        lost_events=told.get("lost_events"),
        dropped_events=told.get("dropped_events"),
        baseline_bytes=int(found.size[found.alloc_event < 0].sum()),
        unattributed_bytes=unattributed,
        outside_allocator_bytes=outside_allocator(trace),
        finished=bool(manifest.get("finished")),
        stop_reason=manifest.get("stop_reason"),
        notes=(*told.get("notes", ()), *trace.file_notes),
    )
