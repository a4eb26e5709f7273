"""A trace of any size with its index: curves, blocks and spans of any window, in bounded time and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from memtrace.analysis.overview_trace import OverviewTrace, build_overview
from memtrace.analysis.part_summary import CurvePoints
from memtrace.analysis.trace_index import TraceIndex
from memtrace.trace import Trace

if TYPE_CHECKING:
    pass

MAX_EXACT_EVENTS: Final = 300_000
"""Events of the parts of a window up to which it is analyzed itself, without the index."""

MAX_SPANS: Final = 20_000
"""Most steps, and most phases, of an overview."""


@dataclass(frozen=True)
class ExactWindow:
    """A window that is small enough to be analyzed itself."""

    trace: Trace
    first_row: int
    """First row of the window's own events; the rows of older blocks and segments come before it."""
    row_offset: int
    """Added to a row of the window's own events, gives the row of the whole trace."""


class IndexedTrace:
    """A single-rank trace and its index.

    Attributes:
        trace: the whole trace; only parts of it are read.
        index: the index of its parts.
    """

    def __init__(self, trace: Trace, index: TraceIndex) -> None:
        self.trace = trace
        self.index = index

    def exact_window(self, start_ns: int | None = None, end_ns: int | None = None) -> ExactWindow | None:
        """Return a window of the trace itself; None where it has too many events."""
        index = self.index
        if index.events_around(start_ns, end_ns) > MAX_EXACT_EVENTS:
            return None
        window = self.trace.window(start_ns=start_ns, end_ns=end_ns)
        first = index.first_row if start_ns is None else index.row_at(self.trace, start_ns)
        end = index.end_row if end_ns is None else max(first, index.row_at(self.trace, end_ns))
        num_rows = window.num_rows("events")
        return ExactWindow(window, num_rows - (end - first), end - num_rows)

    def peak(self, device: str) -> CurvePoints:
        """Return the highest point of a device's curve; none where it has no points."""
        return self.index.peak(device)

    def peak_part(self, device: str) -> Trace | None:
        """Return the part of the trace in which the peak of a device is; None where the peak is at the start."""
        row = int(self.index.peak(device).row[0])
        number = self.index.part_at(row)
        return None if number is None else self.trace.part(number)

    def overview(
        self, device: str, start_ns: int | None = None, end_ns: int | None = None, *, max_points: int, max_blocks: int
    ) -> OverviewTrace:
        """Return a small trace that stands for a window of a device."""
        index = self.index
        points = index.curve(self.trace, device, start_ns, end_ns, max_points=max_points)
        end_row = index.end_row if end_ns is None else index.row_at(self.trace, end_ns)
        blocks, _ = index.blocks(device, int(points.row[0]) + 1, end_row, max_blocks)
        steps, phases = (spans.between(start_ns, end_ns) for spans in (index.spans.steps, index.spans.phases))
        return build_overview(self.trace, device, points, blocks, steps.longest(MAX_SPANS), phases.longest(MAX_SPANS))
