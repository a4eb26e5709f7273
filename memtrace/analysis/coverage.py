"""What a trace covers, printed at the head of every answer."""

from __future__ import annotations

import numpy as np

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.peak import peak
from memtrace.schema import COUNTERS
from memtrace.trace import Coverage, Trace


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


def coverage(trace: Trace) -> Coverage:
    """The coverage of a single-rank trace; see ``Coverage`` for its fields."""
    manifest, found = trace.manifest, blocks(trace)
    told = manifest.get("coverage", {})
    time = trace.columns("events", "time_ns")["time_ns"]
    timed = len(time) > 0 and trace.has_times
    unattributed = 0
    for device in trace.devices:
        live = peak(trace, device).live
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
