"""Keyframes: the live set at the start of a part, carried from part to part while a trace is written.

A keyframe makes a part self-contained: who opens a trace at the part knows every live block with its allocation, its
operator call, its labels, and the facts about its accesses that categories depend on. The table ``live`` of
``format.schema`` documents the columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from memtrace.format.arrays import Array
from memtrace.format.live_segments import LiveSegments
from memtrace.format.schema import CATEGORIES, EVENT_KINDS, LABEL_PRIORITY, OP_PREFIX, PHASES, SPAN_KINDS, TABLES

Columns = Mapping[str, Array]

_ALLOC, _FREE, _READ, _BASELINE, _LIVE = (
    EVENT_KINDS.index(kind) for kind in ("alloc", "free", "read", "baseline", "live")
)
_FORWARD, _BACKWARD = PHASES.index("forward"), PHASES.index("backward")
_STEP, _PHASE = SPAN_KINDS.index("step"), SPAN_KINDS.index("phase")
_LIVE_NAMES: Final = tuple(column.name for column in TABLES["live"])
_EVENT_NAMES: Final = tuple(column.name for column in TABLES["events"] if column.name in _LIVE_NAMES)
_OP_NAMES: Final = tuple(column.name for column in TABLES["ops"] if column.name != "op_id")
_IS_BOOL: Final = {column.name: column.dtype == "bool" for column in TABLES["live"]}
_NO_TIME: Final = np.iinfo(np.int64).min
_LAST_TIME: Final = np.iinfo(np.int64).max
# Lookup tables over a range of ids are used while the range is at most this many times as long as the ids.
_DENSE: Final = 8

LABEL_RANK: Final = np.array([*(LABEL_PRIORITY.index(name) for name in CATEGORIES), len(LABEL_PRIORITY)], np.int8)
"""Rank of each category code among the labels of a block, 0 the strongest; the last entry serves -1, no category."""


@dataclass(frozen=True)
class Level:
    """The live bytes of a device over some rows, minus those before the rows.

    Attributes:
        time_ns: times, ascending.
        size: bytes: the highest level from each time until the next one; the last is the level after the rows.
    """

    time_ns: Array
    size: Array


@dataclass(frozen=True)
class PartColumns:
    """Columns of some rows of a part, codes and -1 for null as in ``Trace.columns``; absent columns are null.

    Rows of ``events`` and ``ops`` that do not matter after the last of the rows can be left out.
    """

    events: Columns
    """With rows left out, ``order_ns`` is the largest time of all rows up to each row."""
    ops: Columns = field(default_factory=dict)
    labels: Columns = field(default_factory=dict)
    spans: Columns = field(default_factory=dict)
    phase_of_name: Mapping[int, int] = field(default_factory=dict)
    """Phase codes by names.id, for the names of spans of kind phase."""
    levels: Mapping[int, Level] | None = None
    """By device code: how the rows change the live bytes; None: all rows are there to compute it from."""


def order_of(events: Columns, before_ns: int) -> Array:
    """Return the largest time up to each row, given that of all rows before the first."""
    return np.maximum.accumulate(np.maximum(events.get("order_ns", events["time_ns"]), before_ns))


def surviving_rows(kind: Array, block: Array) -> Array:
    """Return the rows of events that begin a block which none of the rows frees, in the order of the rows."""
    begins = np.flatnonzero(((kind == _ALLOC) | (kind == _BASELINE) | (kind == _LIVE)) & (block >= 0))
    freed = block[np.flatnonzero((kind == _FREE) & (block >= 0))]
    return begins[~_is_member(block[begins], freed)]


def strongest_labels(places: Array, category: Array, name: Array, num_blocks: int) -> tuple[Array, Array, Array]:
    """Return for each block its strongest category, the name in its strongest named label, and that label's category.

    Args:
        places: the block of each label.
        category: codes, -1 where a label has only a name. Equally strong labels: the last one wins.
        name: names.id, -1 where a label has no name.
        num_blocks: the number of blocks; one without labels has -1 throughout.
    """
    result = [np.full(num_blocks, -1, dtype) for dtype in (np.int8, np.int32, np.int8)]
    # Fancy assignment keeps the last value, so the strongest label is assigned last.
    order = np.argsort(-LABEL_RANK[category], kind="stable")
    result[0][places[order]] = category[order]
    named = order[name[order] >= 0]
    result[1][places[named]] = name[named]
    result[2][places[named]] = category[named]
    return result[0], result[1], result[2]


class LiveSet:
    """The live blocks and segments after all rows given to ``advance``, which must come in the order of the parts.

    An operator call's row is written when the call returns, its events as they happen, and a step's or a phase's span
    when it ends. What refers to a row that is still to come stays open here until the row arrives.
    """

    def __init__(self) -> None:
        self._columns: dict[str, Array] = {
            name: np.empty(0, bool if _IS_BOOL[name] else np.int64) for name in _LIVE_NAMES
        }
        self._has_op = np.empty(0, bool)
        self._span_start = np.empty(0, np.int64)
        self._open_reads = np.empty((2, 0), np.int64)
        self._segments = LiveSegments()
        self.order_ns = int(_NO_TIME)
        """Largest time of all events so far."""

    def without_steps(self) -> LiveSet:
        """Return a copy for a trace that begins here: its own steps are still to come."""
        copy = LiveSet()
        copy._columns = {name: values.copy() for name, values in self._columns.items()}
        copy._columns["step"][:] = -1
        copy._has_op, copy._span_start = self._has_op.copy(), self._span_start.copy()
        copy._open_reads = self._open_reads.copy()
        copy._segments = self._segments.copy()
        copy.order_ns = self.order_ns
        return copy

    def advance(self, part: PartColumns) -> None:
        """Carry the live set over the rows of the next part."""
        if len(part.events.get("kind", ())):
            self._replace_blocks(part.events)
            self._segments.advance({name: part.events[name] for name in _EVENT_NAMES if name in part.events})
        self._fill_operators(part.ops)
        self._note_reads(part)
        if len(part.labels.get("block_id", ())):
            self._add_labels(part.labels)
        if len(part.spans.get("kind", ())):
            self._find_steps(part.spans)
            self._find_phases(part.spans, part.phase_of_name)

    def keyframe(self) -> dict[str, Array]:
        """Return the columns of the table ``live``: segments first, then blocks by id."""
        segments = self._segments.columns(_EVENT_NAMES)
        num_segments = len(segments["kind"])
        missing = _missing(num_segments)
        keyframe = {}
        for name in _LIVE_NAMES:
            values = segments.get(name, missing[_IS_BOOL[name]])
            keyframe[name] = np.concatenate([values, self._columns[name]])
        keyframe["order_ns"][:num_segments] = segments["time_ns"]
        return keyframe

    def _replace_blocks(self, events: Columns) -> None:
        kind, block = events["kind"], events["block_id"]
        order = order_of(events, self.order_ns)
        self.order_ns = int(order[-1])
        freed = block[np.flatnonzero((kind == _FREE) & (block >= 0))]
        alive = np.ones(len(self._columns["block_id"]), bool)
        places, found = self._places(freed)
        alive[places[found]] = False
        rows = surviving_rows(kind, block)
        rows = rows[np.argsort(block[rows], kind="stable")]
        fresh = {name: events[name][rows] for name in _EVENT_NAMES if name in events}
        fresh["kind"] = np.where(fresh["kind"] == _ALLOC, _LIVE, fresh["kind"])
        fresh["order_ns"] = order[rows]
        missing = _missing(len(rows))
        for name, values in self._columns.items():
            self._columns[name] = np.concatenate([values[alive], fresh.get(name, missing[_IS_BOOL[name]])])
        self._has_op = np.concatenate([self._has_op[alive], np.zeros(len(rows), bool)])
        self._span_start = np.concatenate([self._span_start[alive], np.full(len(rows), _NO_TIME)])
        if np.any(np.diff(self._columns["block_id"]) < 0):
            self._sort()

    def _sort(self) -> None:
        """Restore the order by block id: readers of files number some blocks out of their order."""
        order = np.argsort(self._columns["block_id"], kind="stable")
        self._columns = {name: values[order] for name, values in self._columns.items()}
        self._has_op, self._span_start = self._has_op[order], self._span_start[order]

    def _places(self, block_ids: Array) -> tuple[Array, Array]:
        """Return the row of each block in the live set, and whether it is there."""
        return find_sorted(self._columns["block_id"], block_ids)

    def _fill_operators(self, ops: Columns) -> None:
        if not len(ops.get("op_id", ())):
            return
        places = np.flatnonzero(~self._has_op & (self._columns["op_id"] >= 0))
        rows, found = find_rows(ops["op_id"], self._columns["op_id"][places])
        places, rows = places[found], rows[found]
        for name in _OP_NAMES:
            if name in ops:
                self._columns[OP_PREFIX + name][places] = ops[name][rows]
        self._has_op[places] = True

    def _note_reads(self, part: PartColumns) -> None:
        """Note which live blocks operators of forward and backward have read."""
        events, ops = part.events, part.ops
        open_reads = self._open_reads
        if len(events.get("kind", ())) and "op_id" in events:
            reads = np.flatnonzero(events["kind"] == _READ)
            _, alive = self._places(events["block_id"][reads])
            reads = reads[alive]
            new_reads = np.stack([events["block_id"][reads], events["op_id"][reads]]).astype(np.int64)
            open_reads = np.concatenate([open_reads, new_reads], axis=1)
        open_reads = open_reads[:, open_reads[1] >= 0]
        places, alive = self._places(open_reads[0])
        open_reads, places = open_reads[:, alive], places[alive]
        rows, found = find_rows(ops.get("op_id", np.empty(0, np.int64)), open_reads[1])
        if found.any() and "phase" in ops:
            phase = ops["phase"][rows[found]]
            recompute = ops["recompute"][rows[found]] if "recompute" in ops else np.zeros(len(phase), bool)
            blocks_read = places[found]
            self._columns["read_in_forward"][blocks_read[phase == _FORWARD]] = True
            self._columns["read_in_backward"][blocks_read[(phase == _BACKWARD) & ~recompute]] = True
        open_reads = open_reads[:, ~found]
        self._open_reads = np.unique(open_reads, axis=1) if open_reads.shape[1] else open_reads

    def _add_labels(self, labels: Columns) -> None:
        places, found = self._places(labels["block_id"])
        if not found.any():
            return
        columns, everything = self._columns, np.arange(len(self._columns["block_id"]))
        # What is known already comes first: of equally strong labels the last one wins.
        columns["category"], columns["name"], columns["name_category"] = strongest_labels(
            np.concatenate([everything, everything, places[found]]),
            np.concatenate([columns["category"], columns["name_category"], labels["category"][found]]).astype(np.int8),
            np.concatenate([np.full(len(everything), -1), columns["name"], labels["name"][found]]),
            len(everything),
        )

    def _find_steps(self, spans: Columns) -> None:
        steps = np.flatnonzero(spans["kind"] == _STEP)
        restarts = np.flatnonzero(spans["index"][steps] == 0)
        if len(restarts):
            # Steps before the last step 0 came from optimizers, until the program marked its own: they are void.
            self._columns["step"][:] = -1
            steps = steps[restarts[-1] :]
        steps = steps[np.argsort(spans["start_ns"][steps], kind="stable")]
        open_rows = np.flatnonzero(self._columns["step"] < 0)
        if not len(steps) or not len(open_rows):
            return
        time, start = self._columns["order_ns"][open_rows], spans["start_ns"][steps]
        place = np.searchsorted(start, time, side="right") - 1
        inside = (place >= 0) & (time < (start + spans["duration_ns"][steps])[place])
        self._columns["step"][open_rows[inside]] = spans["index"][steps][place[inside]]

    def _find_phases(self, spans: Columns, phase_of_name: Mapping[int, int]) -> None:
        """Find the innermost span of kind phase around each allocation: that which began last."""
        phases = np.flatnonzero(spans["kind"] == _PHASE)
        start_ns, end_ns = spans["start_ns"][phases], (spans["start_ns"] + spans["duration_ns"])[phases]
        # Most blocks without an operator are older than all of these spans; most spans are around none of the others.
        is_open = (self._columns["op_phase"] < 0) & (self._columns["order_ns"] >= start_ns.min(initial=_LAST_TIME))
        open_rows = np.flatnonzero(is_open)
        if not len(open_rows):
            return
        time = self._columns["order_ns"][open_rows]
        phases = phases[(start_ns <= time.max()) & (end_ns > time.min())]
        for index in phases[np.argsort(spans["start_ns"][phases], kind="stable")].tolist():
            start = int(spans["start_ns"][index])
            inside = (start <= time) & (time < start + int(spans["duration_ns"][index]))
            rows = open_rows[inside & (self._span_start[open_rows] <= start)]
            self._columns["span_phase"][rows] = phase_of_name.get(int(spans["name"][index]), -1)
            self._span_start[rows] = start


def find_sorted(ordered: Array, wanted: Array) -> tuple[Array, Array]:
    """Return the place of each wanted value in an ascending array, and whether it is there."""
    if not len(ordered):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    places = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return places, ordered[places] == wanted


def _missing(num_rows: int) -> tuple[Array, Array]:
    """Return the values of a column that nothing is known of: of a column of numbers, and of one of booleans."""
    return np.full(num_rows, -1, np.int64), np.zeros(num_rows, bool)


def find_rows(ids: Array, wanted: Array) -> tuple[Array, Array]:
    """Return the last row of each wanted id in a column of ids in any order, and whether it is there."""
    if not len(ids) or not len(wanted):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    low, high = int(ids.min()), int(ids.max())
    if high - low >= _DENSE * len(ids) + 1024:
        order = np.argsort(ids, kind="stable")
        places = np.maximum(np.searchsorted(ids[order], wanted, side="right") - 1, 0)
        return order[places], ids[order[places]] == wanted
    row_of = np.full(high - low + 1, -1, np.int64)
    row_of[ids - low] = np.arange(len(ids))
    inside = (wanted >= low) & (wanted <= high)
    rows = np.where(inside, row_of[np.where(inside, wanted - low, 0)], -1)
    return np.maximum(rows, 0), rows >= 0


def _is_member(values: Array, members: Array) -> Array:
    """Return which values are among the members; ids are dense, so a table over their range is the quickest way."""
    if not len(values) or not len(members):
        return np.zeros(len(values), bool)
    low, high = int(values.min()), int(values.max())
    if high - low >= _DENSE * len(values) + 1024:
        return np.isin(values, members)
    is_member = np.zeros(high - low + 1, bool)
    is_member[members[(members >= low) & (members <= high)] - low] = True
    result: Array = is_member[values - low]
    return result
