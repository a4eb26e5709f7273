"""A trace of any size with its index: curves, blocks and spans of any window, in bounded time and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.block_catalog import BlockCatalog, distinct_texts
from memtrace.analysis.block_groups import modules_by_name
from memtrace.analysis.part_summary import LEVELS, CurvePoints
from memtrace.analysis.trace_index import TraceIndex
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

MAX_EXACT_EVENTS: Final = 400_000
"""Events of the parts of a window up to which it is analyzed itself, without the index."""


@dataclass(frozen=True)
class ExactWindow:
    """A window that is small enough to be analyzed itself."""

    trace: Trace
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
        return ExactWindow(window, end - window.num_rows("events"))

    def timeline(
        self, device: str, start_ns: int | None = None, end_ns: int | None = None, *, max_points: int = 2000
    ) -> pd.DataFrame:
        """Return the live bytes of a device in a window, with the columns of ``analysis.timeline.compute_timeline``.

        The first row is the level at the start of the window. The peak of the window is always one of the rows, and the
        values are exact at each of them.
        """
        import pandas as pd

        points = self.index.curve(self.trace, device, start_ns, end_ns, max_points=max_points)
        columns: dict[str, object] = {"time_ns": points.time_ns, "event": points.row}
        for name, level in zip(LEVELS, points.levels, strict=True):
            columns[name] = level if name in CATEGORIES or name == "requested" else _known(name, level)
        frame: pd.DataFrame = pd.DataFrame(columns)
        return frame

    def peak(self, device: str) -> CurvePoints:
        """Return the highest point of a device's curve; none where it has no points."""
        return self.index.peak(device)

    def catalog(
        self, device: str, start_ns: int | None = None, end_ns: int | None = None, *, max_blocks: int
    ) -> BlockCatalog:
        """Return the largest blocks of the index that are live on a device in a window."""
        index, trace = self.index, self.trace
        first = index.first_row if start_ns is None else index.row_at(trace, start_ns)
        end = index.end_row if end_ns is None else index.row_at(trace, end_ns)
        columns, num_blocks = index.blocks(device, first, end, max_blocks)
        modules, module = modules_by_name(trace, columns["category"], columns["name"], columns["module"])
        sites, site = allocation_sites(trace, columns["stack"])
        stacks, stack = np.unique(columns["stack"], return_inverse=True)
        names, name = distinct_texts(trace, columns["name"])
        operators, operator = distinct_texts(trace, columns["op_name"])
        return BlockCatalog(
            block=columns["id"],
            begin_row=columns["begin_row"],
            end_row=np.where(columns["end_row"] >= 0, columns["end_row"], index.end_row),
            begin_ns=columns["begin_ns"],
            end_ns=columns["end_ns"],
            size=columns["size"],
            category=columns["category"],
            phase=columns["phase"],
            step=columns["step"],
            num_reads=columns["num_reads"],
            num_writes=columns["num_writes"],
            name=name,
            operator=operator,
            module=module,
            site=site,
            stack=stack,
            names=names,
            operators=operators,
            modules=tuple(modules),
            sites=tuple(sites),
            stacks=tuple(stacks.tolist()),
            num_blocks=num_blocks,
        )


def _known(name: str, level: Array) -> object:
    """Return bytes that the allocator counts or reserves, NA where they are not known."""
    import pandas as pd

    if name == "reserved" and (level >= 0).any():
        return np.maximum(level, 0)  # parts before the first segment
    return pd.NA if (level < 0).any() else level
