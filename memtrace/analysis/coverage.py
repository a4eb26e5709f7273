"""What a trace covers: shown before every result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.attribution import KIND, PHASE, step_rows, steps_are_marked
from memtrace.analysis.block_accesses import seen_access_share
from memtrace.analysis.blocks import CATEGORY, blocks
from memtrace.analysis.gaps import Gaps, find_gaps
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
    program_steps: int | None
    """Training steps of the program, where a schedule chose which are recorded; None: no schedule, or unknown."""
    gaps_ns: int
    """Time within the recording in which nothing was observed."""
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
    seen_access_share: float | None
    """Share of the bytes accessed whose reads and writes were recorded: less than 1 where compiled code ran that could
    not be observed. None: unknown."""
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
    columns = blocks(trace)
    events = trace.columns("events", "time_ns", "kind")
    # The first rows of a window stand for what is live at its start.
    time = events["time_ns"][np.flatnonzero(events["kind"] == KIND["live"]).max(initial=-1) + 1 :]
    has_times = len(time) > 0 and trace.has_times
    gaps = find_gaps(trace)
    unattributed_bytes = 0
    for device in trace.devices:
        live = find_peak(trace, device).live
        unattributed_bytes += int(columns.size[live[columns.category[live] == CATEGORY["unknown"]]].sum())
    limits_ns = (int(time[0]), int(time[-1])) if has_times else None
    return describe_coverage(
        trace,
        limits_ns,
        num_events=len(time),
        num_steps=len(step_rows(trace).number),
        baseline_bytes=int(columns.size[(columns.alloc_event < 0) & (columns.alloc_ns < 0)].sum()),
        unattributed_bytes=unattributed_bytes,
        outside_bytes=outside_allocator_bytes(trace),
        seen_share=seen_access_share(trace),
        notes=[*_gap_notes(trace, gaps), *_step_notes(trace)],
        gaps_ns=int((gaps.end_ns - gaps.start_ns).sum()),
    )


def describe_coverage(
    trace: Trace,
    limits_ns: tuple[int, int] | None,
    *,
    num_events: int,
    num_steps: int,
    baseline_bytes: int,
    unattributed_bytes: int,
    outside_bytes: int | None,
    seen_share: float | None,
    notes: Sequence[str] = (),
    gaps_ns: int = 0,
) -> Coverage:
    """Return the coverage of a single-rank trace, of which only the manifest and the notes on its files are read.

    Args:
        trace: the trace.
        limits_ns: times of the first and the last event; None: unknown.
        num_events: see ``Coverage``, as for the others.
        num_steps: number of the steps.
        baseline_bytes: bytes of blocks that are older than the recording.
        unattributed_bytes: bytes of category unknown.
        outside_bytes: bytes outside the allocator.
        seen_share: share of the accessed bytes whose reads and writes were recorded; None: unknown.
        notes: sentences besides those of the manifest and the files.
        gaps_ns: time in which nothing was observed.
    """
    manifest = trace.manifest
    return Coverage(
        first_event_ns=limits_ns[0] if limits_ns else None,
        last_event_ns=limits_ns[1] if limits_ns else None,
        num_events=num_events,
        num_steps=num_steps,
        program_steps=manifest.coverage.program_steps,
        gaps_ns=gaps_ns,
        lost_events=manifest.coverage.lost_events,
        dropped_events=manifest.coverage.dropped_events,
        baseline_bytes=baseline_bytes,
        unattributed_bytes=unattributed_bytes,
        outside_allocator_bytes=outside_bytes,
        seen_access_share=seen_share,
        finished=manifest.finished,
        stop_reason=manifest.stop_reason,
        notes=(*manifest.coverage.notes, *trace.file_notes, *notes),
    )


def _gap_notes(trace: Trace, gaps: Gaps) -> list[str]:
    """Return a sentence about the steps that were not recorded."""
    if not len(gaps):
        return []
    options, total = trace.manifest.options, trace.manifest.coverage.program_steps
    num_steps = len(step_rows(trace).number)
    recorded = f"{num_steps:,} of {total:,} steps were" if total is not None else "Only some of the steps were"
    schedule = f" ({options.schedule})" if options is not None and options.schedule is not None else ""
    return [
        f"{recorded} recorded{schedule}. What happened between them is unknown: no step and no access counts there, "
        "and blocks that live across such a gap are checked for leaks only"
    ]


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
