"""Payloads of windows of any width, as :mod:`memtrace.dashboards.payload` builds them for the page.

A window with few events is analyzed itself. A wider one is analyzed in a small trace that stands for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from memtrace.dashboards.delta_encoding import encode_columns
from memtrace.dashboards.payload import build_payload
from memtrace.dashboards.source_lines import SourceOptions

from memtrace.analysis.part_summary import LEVELS
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES

if TYPE_CHECKING:
    from memtrace.analysis.indexed_trace import IndexedTrace
    from memtrace.analysis.overview_trace import OverviewTrace

MAX_POINTS: Final = 12_000
"""Most instants of the curve of an overview."""
MAX_BLOCKS: Final = 15_000
"""Most blocks of an overview, besides those that stand for smaller ones."""


@dataclass(frozen=True)
class WindowPayload:
    """The payload of a window, for the served page (``templates/served.js``)."""

    packed: dict[str, Any]
    plain: dict[str, Any]
    """As in a payload, and ``served``: ``window_us`` (first and last time of the payload), ``range_us`` (those of the
    whole trace), ``is_exact`` (whether the window itself was analyzed), ``num_rows`` of the whole trace, and the
    rows of the whole trace that the payload's rows stand for: ``row_offset`` from ``first_row`` on, or the packed
    column ``served_rows``."""
    note: str


def build_window_payload(
    indexed: IndexedTrace, device: str, start_ns: int | None = None, end_ns: int | None = None
) -> WindowPayload | None:
    """Return the payload of a window of a device; None where the device has no blocks there.

    Args:
        indexed: the trace of one rank with its index.
        device: a device of the trace.
        start_ns: start of the window; None: the window begins with the trace.
        end_ns: time of the first event that is outside the window; None: the window ends with the trace.
    """
    index = indexed.index
    if device not in index.devices:
        return None
    window = indexed.exact_window(start_ns, end_ns)
    overview = None
    if window is None:
        overview = indexed.overview(device, start_ns, end_ns, max_points=MAX_POINTS, max_blocks=MAX_BLOCKS)
    small = overview.trace if overview is not None else window.trace if window is not None else indexed.trace
    payload = build_payload(small, device, sources=SourceOptions()) if device in small.devices else None
    if payload is None:
        return None
    served: dict[str, Any] = {
        "window_us": [_to_us(start_ns, 0), _to_us(end_ns, index.end_ns)],
        "range_us": [0, index.end_ns // 1000],
        "is_exact": window is not None,
        "num_rows": index.end_row,
        "row_offset": 0 if window is None else window.row_offset,
        "first_row": 0 if window is None else window.first_row,
    }
    packed, note = dict(payload.packed), " ".join(filter(None, payload.notes.values()))
    if overview is not None:
        packed["curve"] = _encode_curve(overview)
        packed["served_rows"] = encode_columns({"row": overview.whole_row})
        note = (
            f"This is an overview of {index.events_around(start_ns, end_ns):,} events: it shows every peak and the "
            "largest blocks. Zoom in for all events."
        )
    return WindowPayload(packed, {**payload.plain, "served": served}, note)


def _to_us(time_ns: int | None, otherwise_ns: int) -> int:
    return (otherwise_ns if time_ns is None else time_ns) // 1000


def _encode_curve(overview: OverviewTrace) -> dict[str, Any]:
    """Return the curve at the instants of an overview: its events happen at the instants, some bytes at a time."""
    levels: dict[str, Array] = dict(zip(LEVELS, overview.points.levels, strict=True))
    columns = {"time_us": overview.points.time_ns // 1000, "event": overview.row}
    columns |= {name: levels[name] for name in CATEGORIES}
    if (levels["allocated"] >= 0).all():
        columns["allocated"] = levels["allocated"]
    if (levels["reserved"] >= 0).any():
        columns["reserved"] = levels["reserved"].clip(min=0)  # parts before the first segment
    return encode_columns(columns)
