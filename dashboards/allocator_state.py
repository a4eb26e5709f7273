"""Tables of the caching allocator: fragmented segments, and out-of-memory errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memtrace.dashboards.sections import Column, Row, Table
from memtrace.dashboards.text import name_text

from memtrace.analysis.allocation_sites import allocation_site
from memtrace.analysis.fragmentation import Fragmentation, compute_fragmentation, pinned_segments_table
from memtrace.analysis.oom import OutOfMemory, explain_out_of_memory
from memtrace.units import format_bytes, format_count, format_duration

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_ROWS: Final = 15
NO_STACK: Final = "no stack"


def fragmentation_table(trace: Trace, device: str) -> Table | None:
    """Return the segments with free memory that live blocks pin; None where the trace has no segments."""
    fragmentation = compute_fragmentation(trace, device)
    if fragmentation is None:
        return None
    segments = pinned_segments_table(trace, device)
    columns = (
        Column("segment size", "number"),
        Column("free", "number"),
        Column("largest free block", "number"),
        Column("live blocks", "number"),
        Column("largest live block", "number"),
        Column("allocated at", "code"),
    )
    rows = tuple(
        Row(
            (
                format_bytes(int(segment.size)),
                format_bytes(int(segment.free_bytes)),
                format_bytes(int(segment.largest_free_bytes)),
                f"{segment.num_blocks:,}",
                format_bytes(int(segment.pin_bytes)),
                name_text(allocation_site(trace, int(segment.pin_stack)) or NO_STACK),
            )
        )
        for segment in segments.head(MAX_ROWS).itertuples(index=False)
    )
    note = _fragmentation_note(fragmentation)
    if len(rows) < len(segments):
        note += f" The table shows the {len(rows)} of {len(segments):,} such segments with most free memory."
    return Table(columns, rows, note=note)


def _fragmentation_note(fragmentation: Fragmentation) -> str:
    when = "" if fragmentation.time_ns is None else f" (at {format_duration(fragmentation.time_ns)})"
    return (
        f"Peak of reserved memory{when}: {format_bytes(fragmentation.reserved_bytes)} in "
        f"{format_count(fragmentation.num_segments, 'segment')}, of which "
        f"{format_bytes(fragmentation.requested_bytes)} requested, "
        f"{format_bytes(fragmentation.waste_bytes)} added by rounding, {format_bytes(fragmentation.free_bytes)} free. "
        f"Of the free memory, {format_bytes(fragmentation.releasable_bytes)} could be released and "
        f"{format_bytes(fragmentation.pinned_bytes)} are in segments with live blocks. The largest request that fits "
        f"without a new segment is {format_bytes(fragmentation.largest_fit_bytes)}."
    )


def failures_table(trace: Trace, device: str) -> Table | None:
    """Return the out-of-memory errors of a device with what held the memory; None where there was none."""
    failures = [failure for failure in explain_out_of_memory(trace) if failure.device == device]
    if not failures:
        return None
    columns = (
        Column("time", "number"),
        Column("request", "number"),
        Column("live memory", "number"),
        Column("outside torch", "number"),
        Column("allocation site", "code"),
        Column("what to try"),
    )
    rows = tuple(_failure_row(failure) for failure in failures[:MAX_ROWS])
    note = f"{format_count(len(failures), 'failed allocation')}."
    if len(rows) < len(failures):
        note = f"The first {len(rows)} of {len(failures):,} failed allocations."
    return Table(columns, rows, note=note, detail="largest allocation sites")


def _failure_row(failure: OutOfMemory) -> Row:
    cells = (
        format_duration(failure.time_ns),
        format_bytes(failure.asked_bytes),
        format_bytes(failure.live_bytes),
        format_bytes(failure.outside.bytes if failure.outside else None),
        name_text(failure.site or NO_STACK),
        " ".join(failure.advice),
    )
    holders = tuple(
        f"{format_bytes(holder.requested_bytes)} in {format_count(holder.num_blocks, 'block')}: "
        f"{name_text(holder.site or NO_STACK)}"
        for holder in failure.holders
    )
    return Row(cells, holders)
