"""An index of a trace that is too large to analyze at once: the curve at some instants, and the largest blocks.

    index = TraceIndex()
    for number in trace.part_numbers:
        index.add(summarize_part(trace, number))
    index.curve(trace, "cuda:0", max_points=20_000)

The index grows with the trace, a part at a time, and is a few bytes for each hundred events. No peak is lost: among the
instants of every part is that of the highest level. Rows are those of the table events of the whole trace.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from memtrace.analysis.index_columns import CHANGE_COLUMNS, ColumnChunks, LevelChanges
from memtrace.analysis.indexed_spans import SpanIndex
from memtrace.analysis.part_summary import (
    BLOCK_COLUMNS,
    FIRST_CATEGORY,
    LEVELS,
    REQUESTED,
    RESERVED,
    BlockColumns,
    CurvePoints,
    PartSummary,
    curve_after,
)
from memtrace.analysis.peak import requested_bytes
from memtrace.analysis.timeline import select_plot_points
from memtrace.format.arrays import Array
from memtrace.format.keyframes import find_sorted
from memtrace.trace import Trace

MAX_POINTS: Final = 600_000
"""Most instants of a curve in the index; beyond it every part keeps half of its own."""
MAX_OPEN_PARTS: Final = 4
"""Parts that stay open because windows end in them."""
MAX_BLOCKS: Final = 300_000
"""Most freed blocks in the index; beyond it the larger half stays."""
_BLOCK_COLUMNS: Final = (*BLOCK_COLUMNS, "is_large")
_NO_POINTS: Final = CurvePoints(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((len(LEVELS), 0), np.int64))


@dataclass(frozen=True)
class IndexedPart:
    """Where a part lies."""

    number: int
    first_row: int
    """Its first event, counted from the first event of the first part that was added."""
    num_events: int
    num_live: int
    """Rows of its keyframe."""
    end_ns: int
    """Largest time of the events up to its end."""

    @property
    def end_row(self) -> int:
        """The row after its last event."""
        return self.first_row + self.num_events


class TraceIndex:
    """What is kept of the parts of one rank's trace, which are added in their order.

    Attributes:
        parts: the parts, in order.
        devices: the devices of the parts so far.
        num_blocks: number of all blocks so far, by device.
        spans: the steps and phases so far.
    """

    def __init__(self) -> None:
        self.spans = SpanIndex()
        self.parts: list[IndexedPart] = []
        self.devices: list[str] = []
        self.num_blocks: dict[str, int] = {}
        self._curves: dict[str, dict[int, CurvePoints]] = {}
        self._changes: dict[str, LevelChanges] = {}
        self._freed = ColumnChunks(_BLOCK_COLUMNS)
        self._live: BlockColumns = {name: np.empty(0, np.int64) for name in _BLOCK_COLUMNS}
        self._opened: OrderedDict[int, Trace] = OrderedDict()
        self._joined: dict[str, tuple[CurvePoints, Array]] = {}  # by device: the points of all parts, and their bounds

    # -- growing ---------------------------------------------------------------------------------------------

    def add(self, summary: PartSummary) -> None:
        """Add the next part."""
        last = self.parts[-1] if self.parts else None
        part = IndexedPart(
            number=summary.number,
            first_row=last.end_row if last else 0,
            num_events=summary.num_events,
            num_live=summary.num_live,
            end_ns=max(summary.end_ns, last.end_ns) if last else summary.end_ns,
        )
        for device in summary.devices:
            if device not in self.devices:
                self.devices.append(device)
                self._curves[device] = {}
                self._changes[device] = LevelChanges()
                self.num_blocks[device] = 0
        codes = np.array([self.devices.index(device) for device in summary.devices], np.int64)
        self._update_live(_placed(summary.older, codes, part.first_row), part)
        begun = _placed(summary.begun, codes, part.first_row)
        self._live = {name: np.concatenate([values, begun[name]]) for name, values in self._live.items()}
        self._retire()
        for device in summary.devices:
            points = summary.curves[device]
            self._curves[device][part.number] = replace(points, row=points.row + part.first_row)
            self.num_blocks[device] += summary.num_begun[device]
            late = summary.late[device]
            for level in np.flatnonzero(late).tolist():
                self._changes[device].add(level, np.array([-1]), part.first_row, late[[level]])
        self.parts.append(part)
        self._joined.clear()
        self._bound_points()

    def _update_live(self, older: BlockColumns, part: IndexedPart) -> None:
        """Update the live blocks by what a part knows of those in its keyframe."""
        order = np.argsort(self._live["id"], kind="stable")
        place, found = find_sorted(self._live["id"][order], older["id"])
        if not found.all():
            # Only the first part has blocks that are not known yet.
            fresh = {name: values[~found] for name, values in older.items()}
            for code, device in enumerate(self.devices):
                self.num_blocks[device] += int((fresh["device"] == code).sum())
            fresh["begin_row"] = np.full(len(fresh["id"]), -1)
            fresh["is_large"] = np.ones(len(fresh["id"]), np.int64)
        else:
            fresh = {name: values[:0] for name, values in older.items()}
        live = {name: values.copy() for name, values in self._live.items()}
        place = order[place[found]] if len(order) else place[found]
        known = {name: values[found] for name, values in older.items()}
        self._move_categories(live, known, place, part.first_row)
        for name in ("category", "name", "end_row", "end_ns"):
            live[name][place] = known[name]
        for name in ("num_reads", "num_writes"):
            live[name][place] += known[name]
        self._live = {name: np.concatenate([values, fresh[name]]) for name, values in live.items()}

    def _move_categories(self, live: BlockColumns, known: BlockColumns, place: Array, end_row: int) -> None:
        """Move the bytes of blocks whose category a later part reveals from one category to the other."""
        changed = np.flatnonzero(live["category"][place] != known["category"])
        for code, device in enumerate(self.devices):
            of_device = changed[known["device"][changed] == code]
            first, size = live["begin_row"][place[of_device]], known["size"][of_device]
            for category in np.unique(live["category"][place[of_device]]).tolist():
                chosen = live["category"][place[of_device]] == category
                self._changes[device].add(FIRST_CATEGORY + category, first[chosen], end_row, -size[chosen])
            for category in np.unique(known["category"][of_device]).tolist():
                chosen = known["category"][of_device] == category
                self._changes[device].add(FIRST_CATEGORY + category, first[chosen], end_row, size[chosen])

    def _retire(self) -> None:
        """Put away the blocks that were freed: the largest are kept."""
        is_freed = self._live["end_row"] >= 0
        kept = is_freed & (self._live["is_large"] != 0)
        self._freed.append({name: values[kept] for name, values in self._live.items()})
        self._live = {name: values[~is_freed] for name, values in self._live.items()}
        if len(self._freed) > MAX_BLOCKS:
            columns = self._freed.columns
            larger = columns["size"] >= np.median(columns["size"])
            order = np.argsort(-columns["size"], kind="stable")[: min(int(larger.sum()), MAX_BLOCKS // 2)]
            self._freed.replace({name: values[np.sort(order)] for name, values in columns.items()})

    def _bound_points(self) -> None:
        for device, curves in self._curves.items():
            if sum(len(points.row) for points in curves.values()) > MAX_POINTS:
                self._curves[device] = {
                    number: _thinned(points, max(4, len(points.row) // 2)) for number, points in curves.items()
                }

    def drop_before(self, number: int) -> None:
        """Forget the parts with smaller numbers, which a ring deleted."""
        num_dropped = sum(part.number < number for part in self.parts)
        if not num_dropped:
            return
        self.spans.drop_before(self.parts[num_dropped - 1].end_ns)
        self.parts = self.parts[num_dropped:]
        self._joined.clear()
        first_row = self.parts[0].first_row if self.parts else np.iinfo(np.int64).max
        for device, curves in self._curves.items():
            self._curves[device] = {part: points for part, points in curves.items() if part >= number}
        columns = self._freed.columns
        kept = columns["end_row"] >= first_row
        self._freed.replace({name: values[kept] for name, values in columns.items()})

    # -- on disk ---------------------------------------------------------------------------------------------

    def to_arrays(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the index as arrays, and everything else as a JSON value."""
        arrays = {f"freed.{name}": values for name, values in self._freed.columns.items()}
        arrays |= {f"live.{name}": values for name, values in self._live.items()}
        arrays |= self.spans.to_arrays()
        for code, device in enumerate(self.devices):
            curves = self._curves[device]
            points = _joined([_NO_POINTS, *curves.values()])
            arrays[f"curve.{code}.part"] = np.repeat(
                np.array(list(curves), np.int64), [len(points.row) for points in curves.values()]
            )
            arrays |= {f"curve.{code}.{name}": getattr(points, name) for name in ("row", "time_ns", "levels")}
            arrays |= {f"changes.{code}.{name}": values for name, values in self._changes[device].columns.items()}
        plain = {"parts": [asdict(part) for part in self.parts], "devices": self.devices, "num_blocks": self.num_blocks}
        return arrays, plain

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Array], plain: dict[str, Any]) -> TraceIndex:
        """Return the index that ``to_arrays`` gave."""
        index = cls()
        index.parts = [IndexedPart(**part) for part in plain["parts"]]
        index.devices, index.num_blocks = plain["devices"], plain["num_blocks"]
        index.spans = SpanIndex.from_arrays(arrays)
        index._freed.replace({name: arrays[f"freed.{name}"] for name in _BLOCK_COLUMNS})
        index._live = {name: arrays[f"live.{name}"] for name in _BLOCK_COLUMNS}
        for code, device in enumerate(index.devices):
            part = arrays[f"curve.{code}.part"]
            points = CurvePoints(*(arrays[f"curve.{code}.{name}"] for name in ("row", "time_ns", "levels")))
            numbers, first = np.unique(part, return_index=True)
            bounds = zip(numbers.tolist(), first.tolist(), [*first[1:].tolist(), len(part)], strict=True)
            index._curves[device] = {number: _part_of(points, low, high) for number, low, high in bounds}
            index._changes[device] = LevelChanges()
            index._changes[device].restore({name: arrays[f"changes.{code}.{name}"] for name in CHANGE_COLUMNS})
        return index

    # -- asking ----------------------------------------------------------------------------------------------

    def peak(self, device: str) -> CurvePoints:
        """Return the highest point of a device's curve, with the row of the whole trace."""
        points = self._stored(device, range(len(self.parts)))
        top = points.levels[REQUESTED].argmax(keepdims=True)
        return CurvePoints(points.row[top] + self._offset, points.time_ns[top], points.levels[:, top])

    @property
    def num_events(self) -> int:
        """Number of the events of all parts."""
        return self.parts[-1].end_row - self.parts[0].first_row if self.parts else 0

    @property
    def end_ns(self) -> int:
        """Largest time of all events; 0 without parts."""
        return self.parts[-1].end_ns if self.parts else 0

    def part_at(self, row: int) -> int | None:
        """Return the number of the part with a row of the whole trace; None for rows of the first keyframe."""
        inside = (part for part in self.parts if part.first_row <= row - self._offset < part.end_row)
        return next((part.number for part in inside), None)

    @property
    def first_row(self) -> int:
        """Row of the whole trace of the first event; the rows of the keyframe come before it."""
        return self.parts[0].num_live if self.parts else 0

    @property
    def end_row(self) -> int:
        """The number of rows of the whole trace."""
        return self.first_row + self.num_events

    def events_around(self, start_ns: int | None, end_ns: int | None) -> int:
        """Return the number of events of the parts in which a window lies."""
        first = 0 if start_ns is None else self._place_at(start_ns)
        last = len(self.parts) - 1 if end_ns is None else self._place_at(end_ns)
        return sum(part.num_events for part in self.parts[first : last + 1])

    @property
    def _offset(self) -> int:
        """Added to a row of the index, gives the row of the whole trace, which begins with the first keyframe."""
        return self.parts[0].num_live - self.parts[0].first_row

    def row_at(self, trace: Trace, time_ns: int) -> int:
        """Return the first row of the whole trace at or past a time; the number of rows where there is none."""
        return self._row_at(trace, time_ns) + self._offset

    def _row_at(self, trace: Trace, time_ns: int) -> int:
        for part in self.parts[self._place_at(time_ns) :]:
            time = self._open(trace, part).columns("events", "time_ns")["time_ns"][part.num_live :]
            late = np.flatnonzero(time >= time_ns)
            if len(late):
                return part.first_row + int(late[0])
        return self.parts[-1].end_row

    def _open(self, trace: Trace, part: IndexedPart) -> Trace:
        """Return a part of the trace; those that were used last stay open."""
        opened = self._opened.pop(part.number, None) or trace.part(part.number)
        self._opened[part.number] = opened
        while len(self._opened) > MAX_OPEN_PARTS:
            self._opened.popitem(last=False)
        return opened

    def _place_at(self, time_ns: int) -> int:
        """Return the place of the part that has the first event at or past a time."""
        return int(np.searchsorted([part.end_ns for part in self.parts], time_ns, side="left"))

    def curve(
        self, trace: Trace, device: str, start_ns: int | None = None, end_ns: int | None = None, *, max_points: int
    ) -> CurvePoints:
        """Return the curve of a device in a window at up to ``max_points`` rows of the whole trace.

        The first point is the level at the start of the window. The peak of the window is always one of the points.

        Args:
            trace: the trace of the index; the parts at both ends of the window are read.
            device: one of ``devices``.
            start_ns: start of the window; None: the window begins with the trace.
            end_ns: time of the first event that is outside the window; None: the window ends with the trace.
            max_points: at least 4.
        """
        first = self.parts[0].first_row if start_ns is None else self._row_at(trace, start_ns)
        end = self.parts[-1].end_row if end_ns is None else max(first, self._row_at(trace, end_ns))
        low, high = self._places(first, max(end, first + 1))
        is_inside = [first <= part.first_row and part.end_row <= end for part in (self.parts[low], self.parts[high])]
        inner = range(low + (not is_inside[0]), high + is_inside[1])
        edges = [place for place in dict.fromkeys((low, high)) if place not in inner]
        pieces = [
            self._corrected(device, self._exact(trace, device, self.parts[place], first, end, max_points))
            for place in edges
        ]
        if len(inner):
            pieces.insert(int(low in edges), self._stored(device, inner))
        points = _joined([piece if place == 0 else _part_of(piece, 1) for place, piece in enumerate(pieces)])
        points = _thinned(points, max_points)
        return replace(points, row=points.row + self._offset)

    def _places(self, first: int, end: int) -> tuple[int, int]:
        """Return the first and the last place of the parts with rows from ``first`` to ``end``, which is excluded."""
        last_place = len(self.parts) - 1
        ends = np.array([part.end_row for part in self.parts])
        low = min(int(np.searchsorted(ends, first, side="right")), last_place)
        return low, max(low, min(int(np.searchsorted(ends, end, side="left")), last_place))

    def _stored(self, device: str, places: range) -> CurvePoints:
        """Return the stored points of some parts, the level at the start of the first of them included."""
        if device not in self._joined:
            curves = self._curves[device]
            pieces = [
                self._corrected(device, curves.get(part.number) or _without_blocks(part, part.first_row))
                for part in self.parts
            ]
            bounds = np.cumsum([0, *(len(piece.row) for piece in pieces)])
            self._joined[device] = _joined(pieces), bounds
        points, bounds = self._joined[device]
        chosen = np.ones(int(bounds[places[-1] + 1] - bounds[places[0]]), bool)
        chosen[bounds[places[1:]] - bounds[places[0]]] = False
        inside = _part_of(points, int(bounds[places[0]]), int(bounds[places[-1] + 1]))
        return CurvePoints(inside.row[chosen], inside.time_ns[chosen], inside.levels[:, chosen])

    def _exact(
        self, trace: Trace, device: str, part: IndexedPart, first: int, end: int, max_points: int
    ) -> CurvePoints:
        """Return the curve between two rows of a part that is read."""
        opened = self._open(trace, part)
        if device not in opened.devices:
            return _without_blocks(part, max(first, part.first_row))
        low = max(first - part.first_row, 0) + part.num_live
        high = min(end - part.first_row, part.num_events) + part.num_live
        live = requested_bytes(opened, device)
        inside = slice(*np.searchsorted(live.rows, [low, high]).tolist())
        rows = live.rows[inside][select_plot_points(live.bytes[inside], max(4, max_points))]
        points = curve_after(opened, device, part.num_live, np.concatenate([[low - 1], rows]))
        return replace(points, row=points.row + part.first_row)

    def _corrected(self, device: str, points: CurvePoints) -> CurvePoints:
        """Return points of one part with what later parts revealed of the blocks that are live at them."""
        levels, position = points.levels.copy(), 2 * points.row
        position[:1] += 1  # the start of a part: after the row before it, but with what the part knows
        for level in range(len(LEVELS)):
            change = self._changes[device].at(level, position)
            levels[level] = np.where(levels[level] >= 0, levels[level] + change, -1)
        return replace(points, levels=levels)

    def blocks(self, device: str, first_row: int, end_row: int, max_blocks: int) -> tuple[BlockColumns, int]:
        """Return the largest blocks of the index that are live between two rows, and the number of all blocks there.

        Args:
            device: one of ``devices``.
            first_row: row of the whole trace.
            end_row: the row after the last one.
            max_blocks: number of blocks.

        Returns:
            ``BLOCK_COLUMNS`` with rows of the whole trace, in the order of the allocations, and the number of the
            device's blocks.
        """
        freed = self._freed.columns
        columns = {name: np.concatenate([freed[name], self._live[name]]) for name in BLOCK_COLUMNS}
        base = self.parts[0].first_row
        begin = np.where(columns["begin_row"] >= base, columns["begin_row"] + self._offset, -1)
        end = np.where(columns["end_row"] >= 0, columns["end_row"] + self._offset, -1)
        inside = (columns["device"] == self.devices.index(device)) & (columns["size"] > 0)
        chosen = np.flatnonzero(inside & (begin < end_row) & ((end < 0) | (end >= first_row)))
        chosen = chosen[np.argsort(-columns["size"][chosen], kind="stable")[:max_blocks]]
        chosen = chosen[np.argsort(begin[chosen], kind="stable")]
        columns |= {"begin_row": begin, "end_row": end}
        return {name: values[chosen] for name, values in columns.items()}, self.num_blocks[device]


def _placed(columns: BlockColumns, device_codes: Array, first_row: int) -> BlockColumns:
    """Return blocks of a part with rows and devices of the index."""
    placed = {name: values.astype(np.int64) for name, values in columns.items()}
    if len(placed["device"]):
        placed["device"] = device_codes[placed["device"]]
    for name in ("begin_row", "end_row"):
        placed[name] = np.where(placed[name] >= 0, placed[name] + first_row, -1)
    return placed


def _without_blocks(part: IndexedPart, row: int) -> CurvePoints:
    """Return the level before a row of a part in which the device has no blocks."""
    levels = np.zeros((len(LEVELS), 1), np.int64)
    levels[RESERVED] = -1
    return CurvePoints(np.array([row - 1]), np.array([part.end_ns]), levels)


def _part_of(points: CurvePoints, low: int, high: int | None = None) -> CurvePoints:
    return CurvePoints(points.row[low:high], points.time_ns[low:high], points.levels[:, low:high])


def _joined(pieces: list[CurvePoints]) -> CurvePoints:
    return CurvePoints(
        np.concatenate([piece.row for piece in pieces]),
        np.concatenate([piece.time_ns for piece in pieces]),
        np.concatenate([piece.levels for piece in pieces], axis=1),
    )


def _thinned(points: CurvePoints, max_points: int) -> CurvePoints:
    """Return the first and the highest of equal runs of points."""
    chosen = select_plot_points(points.levels[REQUESTED], max_points)
    return CurvePoints(points.row[chosen], points.time_ns[chosen], points.levels[:, chosen])
