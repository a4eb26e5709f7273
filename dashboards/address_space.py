"""Addresses of blocks and segments, packed for the page's track of lifetimes (``templates/track_addresses.js``).

Addresses that nothing uses are left out, because the used ranges of a process are far apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from memtrace.dashboards.delta_encoding import encode_columns

from memtrace.allocator.rules import SMALL_SEGMENT_BYTES
from memtrace.analysis.block_lifetimes import close_address_gaps
from memtrace.analysis.blocks import blocks
from memtrace.analysis.segment_ranges import SegmentRanges, find_segment_ranges
from memtrace.format.schema import MAX_BYTES

if TYPE_CHECKING:
    from memtrace.format.arrays import Array
    from memtrace.trace import Trace

MAX_SEGMENTS: Final = 20_000
"""Most segments on the page: the largest."""
KINDS: Final = ("large segment", "small segment (2 MiB)", "part of an expandable segment")


def encode_address_space(trace: Trace, device: str, block: Array) -> dict[str, Any]:
    """Return ``addresses`` and ``segments`` as packed columns.

    Args:
        trace: A single-rank trace.
        device: One of ``trace.devices``.
        block: Ids of the blocks.

    Returns:
        ``addresses``: ``offset``, the address of each block without unused ranges (-1: unknown). ``segments``: offset,
        size, begin_row, end_row, begin_us, end_us (-1: as the rows at the start and the end) and kind, an index into
        ``KINDS``.
    """
    table, segments = blocks(trace), _largest(find_segment_ranges(trace, device))
    address, size = table.address[block], table.size[block]
    known = np.flatnonzero(address >= 0)
    closed = close_address_gaps(
        np.concatenate([address[known], segments.address]), np.concatenate([size[known], segments.size])
    )
    offset = np.full(len(block), -1, np.int64)
    offset[known] = closed[: len(known)]
    if int(closed.max(initial=0)) > MAX_BYTES:
        offset[:] = -1
    kind = np.where(segments.is_expandable, 2, np.where(segments.size <= SMALL_SEGMENT_BYTES, 1, 0))
    return {
        "addresses": encode_columns({"offset": offset}),
        "segments": encode_columns(
            {
                "offset": closed[len(known) :],
                "size": segments.size,
                "begin_row": segments.begin_row,
                "end_row": segments.end_row,
                "begin_us": _times_us(trace, segments.begin_row),
                "end_us": _times_us(trace, segments.end_row),
                "kind": kind,
            }
        ),
    }


def _largest(ranges: SegmentRanges) -> SegmentRanges:
    if len(ranges) <= MAX_SEGMENTS:
        return ranges
    kept = np.sort(np.argsort(-ranges.size, kind="stable")[:MAX_SEGMENTS])
    return SegmentRanges(
        ranges.address[kept],
        ranges.size[kept],
        ranges.begin_row[kept],
        ranges.end_row[kept],
        ranges.is_expandable[kept],
    )


def _times_us(trace: Trace, rows: Array) -> Array:
    """Return the times of rows of events; -1 for those before the first row and after the last one."""
    time_ns = trace.columns("events", "time_ns")["time_ns"]
    inside = (rows >= 0) & (rows < len(time_ns))
    times = np.full(len(rows), -1, np.int64)
    times[inside] = time_ns[rows[inside]] // 1000
    return times
