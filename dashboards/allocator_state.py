"""What a GPU's allocator holds without use, and the allocations that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from memtrace.dashboards.sections import Column, Row, Table
from memtrace.dashboards.text import name_text

from memtrace.analysis.allocation_sites import allocation_site
from memtrace.analysis.fragmentation import fragmentation, pinned_segments
from memtrace.analysis.oom import out_of_memory
from memtrace.analysis.summary import summarize_failure
from memtrace.units import format_bytes, format_duration

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_ROWS: Final = 15


def fragmentation_table(trace: Trace, device: str) -> Table | None:
    """The segments that cannot be given back though they hold free memory; None where segments are not told."""
    told = fragmentation(trace, device)
    if told is None:
        return None
    segments = pinned_segments(trace, device)
    columns = (
        Column("segment", "number"),
        Column("free in it", "number"),
        Column("largest piece", "number"),
        Column("live blocks", "number"),
        Column("largest of them", "number"),
        Column("allocated by", "code"),
    )
    rows = tuple(
        Row((format_bytes(int(row.size)), format_bytes(int(row.free_bytes)), format_bytes(int(row.largest_free_bytes)),
             f"{row.num_blocks:,}", format_bytes(int(row.pin_bytes)), name_text(allocation_site(trace,
             int(row.pin_stack)) or "–")))  # noqa: RUF001
        for row in segments.head(MAX_ROWS).itertuples(index=False)
    )  # fmt: skip
    when = "" if told.time_ns is None else f" ({format_duration(told.time_ns)})"
    note = (
        f"At the fullest moment{when} {format_bytes(told.reserved_bytes)} are reserved in "
        f"{told.num_segments:,} segments: {format_bytes(told.requested_bytes)} asked for, "
        f"{format_bytes(told.waste_bytes)} "
        f"of rounding, {format_bytes(told.free_bytes)} free, of which {format_bytes(told.releasable_bytes)} could "
        f"be given "
        f"back. The largest request that fits is {format_bytes(told.largest_fit_bytes)}. The {len(rows)} of "
        f"{len(segments):,} segments with most free memory that a live block keeps."
    )
    return Table(columns, rows, note=note)


def failures_table(trace: Trace, device: str) -> Table | None:
    """The allocations that failed on a device, each with what held the memory; None where none did."""
    failures = [summarize_failure(trace, found) for found in out_of_memory(trace) if found.device == device]
    if not failures:
        return None
    columns = (
        Column("when", "number"),
        Column("asked for", "number"),
        Column("live", "number"),
        Column("by", "code"),
        Column("what to try"),
    )
    rows = tuple(
        Row((format_duration(told.time_ns), format_bytes(told.asked_bytes), format_bytes(told.live_bytes),
             name_text(told.site or "–"), " ".join(told.advice)),  # noqa: RUF001
            tuple(f"{format_bytes(held.bytes)} in {held.num_blocks:,} blocks: {name_text(held.name or 'no stack')}"
                  for held in told.holders))
        for told in failures[:MAX_ROWS]
    )  # fmt: skip
    note = f"{len(rows)} of {len(failures)} failures."
    return Table(columns, rows, note=note, detail="held by")
