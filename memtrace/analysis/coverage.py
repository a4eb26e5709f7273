"""What a trace covers: shown before every result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, step_rows, steps_are_marked
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.outside_memory import outside_readings
from memtrace.analysis.peak import find_peak
from memtrace.display import Displayed
from memtrace.trace import Trace

NO_TRAINING_NOTE: Final = (
    "no backward pass and no optimizer step was recorded: the steps are iterations of evaluation or inference"
)


@dataclass(frozen=True)
class Coverage(Displayed):
    """What a trace covers. None: unknown. Bytes are requested bytes."""

    first_event_ns: int | None
    """Time of the first event, ns since the recording began; None also where the file has no times."""
    last_event_ns: int | None
    """Time of the last event."""
    num_events: int
    num_steps: int
    lost_events: int | None
    """Events the recorder could not write."""
    dropped_events: int | None
    """Events older than the steps that a ring recording keeps."""
    baseline_bytes: int
    """Bytes of the blocks that are older than the recording and were seen in it, all devices."""
    unattributed_bytes: int
    """Bytes live at the requested peak in blocks of category unknown, summed over the devices."""
    outside_allocator_bytes: int | None
    """Bytes in use on the devices outside the traced allocator; None on a CPU."""
    finished: bool
    """False: the process died while recording; the trace ends at the last flush."""
    stop_reason: str | None
    """Why the recording ended before the program did."""
    notes: tuple[str, ...]
    """Sentences about what the trace cannot show, and why."""


def outside_allocator_bytes(trace: Trace) -> int | None:
    """Return the largest memory in use on the trace's GPUs outside its allocator, by the driver's count.

    It belongs to CUDA contexts, libraries and other processes. Bytes, summed over the devices; None where the driver's
    or the allocator's count was not read.
    """
    readings = outside_readings(trace)
    if not len(readings.device):
        return None
    return sum(int(readings.bytes[readings.device == code].max()) for code in np.unique(readings.device))


def compute_coverage(trace: Trace) -> Coverage:
    """Return the coverage of a single-rank trace, computed once."""
    return trace.cached(_compute_coverage)


def _compute_coverage(trace: Trace) -> Coverage:
    manifest, columns = trace.manifest, blocks(trace)
    events = trace.columns("events", "time_ns", "kind")
    # The first rows of a window stand for what is live at its start.
    time = events["time_ns"][np.flatnonzero(events["kind"] == KIND["live"]).max(initial=-1) + 1 :]
    has_times = len(time) > 0 and trace.has_times
    unattributed_bytes = 0
    for device in trace.devices:
        live = find_peak(trace, device).live
        unattributed_bytes += int(columns.size[live[columns.category[live] == CATEGORY["unknown"]]].sum())
    return Coverage(
        first_event_ns=int(time[0]) if has_times else None,
        last_event_ns=int(time[-1]) if has_times else None,
        num_events=len(time),
        num_steps=len(step_rows(trace).number),
        lost_events=manifest.coverage.lost_events,
        dropped_events=manifest.coverage.dropped_events,
        baseline_bytes=int(columns.size[(columns.alloc_event < 0) & (columns.alloc_ns < 0)].sum()),
        unattributed_bytes=unattributed_bytes,
        outside_allocator_bytes=outside_allocator_bytes(trace),
        finished=manifest.finished,
        stop_reason=manifest.stop_reason,
        notes=(*manifest.coverage.notes, *trace.file_notes, *_step_notes(trace)),
    )


def _step_notes(trace: Trace) -> list[str]:
    """Return a sentence about detected steps that are no training steps, such as the samples of a test loop.

    Only a recording knows the phase of every operator. A window of it can leave out the backward pass.
    """
    is_whole_recording = trace.manifest.source.kind == "recording" and trace.surroundings is None
    if not is_whole_recording or steps_are_marked(trace) or not len(step_rows(trace).number):
        return []
    phase = trace.columns("ops", "phase")["phase"]
    if not (phase == PHASE["forward"]).any() or np.isin(phase, [PHASE["backward"], PHASE["optimizer"]]).any():
        return []
    return [NO_TRAINING_NOTE]
