"""A small trace that stands for a large one: its curve at some instants, its largest blocks, its steps and phases.

Whatever works on a trace works on it. Everything happens at the instants: a block begins at the first instant after its
allocation. At each instant the live bytes of every category are those of the large trace; blocks without an operator
stand for the bytes of all smaller blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.analysis.event_codes import KIND, SPAN
from memtrace.analysis.indexed_spans import Spans
from memtrace.analysis.part_summary import FIRST_CATEGORY, BlockColumns, CurvePoints
from memtrace.format.arrays import Array
from memtrace.format.encode import encode_codes
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pyarrow as pa

SMALLER_BLOCKS: Final = "smaller blocks"
"""Tensor name of the blocks that stand for the bytes of all smaller ones."""
_REST_NAME: Final = int(np.iinfo(np.int32).max)


@dataclass(frozen=True)
class OverviewTrace:
    """A small trace, and how its rows relate to those of the large one."""

    trace: Trace
    points: CurvePoints
    """The instants: rows and levels of the large trace. The first is the start."""
    row: Array
    """Last row of the small trace up to each instant; -1: none."""
    whole_row: Array
    """Row of the large trace of each row of the small one; those of older blocks are before the first instant."""


def build_overview(
    whole: Trace, device: str, points: CurvePoints, blocks: BlockColumns, steps: Spans, phases: Spans
) -> OverviewTrace:
    """Return a small trace of one device.

    Args:
        whole: the large trace, which has the names.
        device: the device.
        points: its curve at some rows, at least one.
        blocks: its largest blocks, with the rows of the large trace and -1 for none.
        steps: the steps to show.
        phases: the phases to show.
    """
    begin, end = _instants(points, blocks)
    rest = [
        _smaller_blocks(points.levels[FIRST_CATEGORY + code] - _live_bytes(blocks, begin, end, code, len(points.row)))
        for code in range(len(CATEGORIES))
    ]
    num_rest = sum(len(blocks_of[0]) for blocks_of in rest)
    columns = {
        "id": np.concatenate([blocks["id"], int(blocks["id"].max(initial=-1)) + 1 + np.arange(num_rest)]),
        "begin": np.concatenate([begin, *(blocks_of[0] for blocks_of in rest)]),
        "end": np.concatenate([end, *(blocks_of[1] for blocks_of in rest)]),
        "size": np.concatenate([blocks["size"], *(blocks_of[2] for blocks_of in rest)]),
        "category": np.concatenate(
            [blocks["category"], *(np.full(len(blocks_of[0]), code) for code, blocks_of in enumerate(rest))]
        ),
    }
    for name in ("allocated_size", "address", "stream", "begin_ns", "name", "op_name", "module", "stack", "phase"):
        values = blocks.get(name, np.full(len(begin), -1))
        columns[name] = np.concatenate([values, np.full(num_rest, _REST_NAME if name == "name" else -1)])
    events, instant = _events(points, columns)
    tables = {
        "events": encode_codes("events", events, (device,)),
        "ops": _ops(points, columns),
        "labels": encode_codes(
            "labels", {"block_id": columns["id"], "category": columns["category"], "name": columns["name"]}, ()
        ),
        "spans": _spans(steps, phases),
    }
    row = np.searchsorted(instant, np.arange(len(points.row)), side="right") - 1
    return OverviewTrace(whole.with_tables(tables, {_REST_NAME: SMALLER_BLOCKS}), points, row, points.row[instant])


def _instants(points: CurvePoints, blocks: BlockColumns) -> tuple[Array, Array]:
    """Return the instants at which blocks begin and end; the number of instants for a block that stays live."""
    begin = np.searchsorted(points.row, blocks["begin_row"], side="left")
    end = np.searchsorted(points.row, blocks["end_row"], side="left")
    return begin, np.where(blocks["end_row"] >= 0, end, len(points.row))


def _live_bytes(blocks: BlockColumns, begin: Array, end: Array, category: int, num_points: int) -> Array:
    """Return the live bytes of the blocks of one category after each instant."""
    chosen = blocks["category"] == category
    change = np.zeros(num_points + 1, np.int64)
    np.add.at(change, np.minimum(begin[chosen], num_points), blocks["size"][chosen])
    np.add.at(change, end[chosen], -blocks["size"][chosen])
    return np.cumsum(change)[:num_points]


def _smaller_blocks(level: Array) -> tuple[Array, Array, Array]:
    """Return blocks whose live bytes are ``level`` after each instant: begins, ends and sizes. The last to begin is the
    first to end."""
    level = np.maximum(level, 0)
    steps = np.diff(level, prepend=0)
    stack: list[tuple[int, int]] = []
    found: list[tuple[int, int, int]] = []
    for place in np.flatnonzero(steps).tolist():
        change = int(steps[place])
        if change > 0:
            stack.append((place, change))
            continue
        left = -change
        while left:
            begin, size = stack.pop()
            taken = min(size, left)
            found.append((begin, place, taken))
            left -= taken
            if size > taken:
                stack.append((begin, size - taken))
    found += [(begin, len(level), size) for begin, size in stack]
    columns = np.array(found, np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _events(points: CurvePoints, blocks: BlockColumns) -> tuple[dict[str, Array], Array]:
    """Return the columns of the events, and the instant of each. At an instant, frees come before allocations."""
    number = np.arange(len(blocks["id"]))
    present = (blocks["begin"] < blocks["end"]) & (blocks["begin"] < len(points.row)) & (blocks["size"] > 0)
    begins = number[present]
    ends = number[present & (blocks["end"] < len(points.row))]
    block = np.concatenate([begins, ends])
    instant = np.concatenate([blocks["begin"][begins], blocks["end"][ends]])
    is_free = np.concatenate([np.zeros(len(begins), bool), np.ones(len(ends), bool)])
    order = np.lexsort((~is_free, instant))
    block, instant, is_free = block[order], instant[order], is_free[order]
    is_older = ~is_free & (instant == 0)
    begin_ns = blocks["begin_ns"][block]
    kind = np.where(is_free, KIND["free"], KIND["alloc"])
    kind = np.where(is_older, np.where(begin_ns >= 0, KIND["live"], KIND["baseline"]), kind)
    time_ns = np.where(is_older & (begin_ns >= 0), np.minimum(begin_ns, points.time_ns[0]), points.time_ns[instant])
    columns = {
        "time_ns": time_ns,
        "kind": kind,
        "device": np.zeros(len(block), np.int8),
        "block_id": blocks["id"][block],
        "op_id": np.where(is_free, -1, block),
    }
    columns |= {name: blocks[name][block] for name in ("size", "allocated_size", "address", "stream")}
    return columns, instant


def _ops(points: CurvePoints, blocks: BlockColumns) -> pa.Table:
    """Return the operator calls that allocated the blocks, one for each."""
    begin = np.minimum(blocks["begin"], len(points.row) - 1)
    return encode_codes(
        "ops",
        {
            "op_id": np.arange(len(begin)),
            "name": blocks["op_name"],
            "start_ns": points.time_ns[begin],
            "module": blocks["module"],
            "phase": blocks["phase"],
            "stack": blocks["stack"],
        },
        (),
    )


def _spans(steps: Spans, phases: Spans) -> pa.Table:
    num_steps, num_phases = len(steps.index), len(phases.index)
    return encode_codes(
        "spans",
        {
            "kind": np.repeat([SPAN["step"], SPAN["phase"]], [num_steps, num_phases]),
            "name": np.concatenate([np.full(num_steps, -1), phases.index]),
            "start_ns": np.concatenate([steps.start_ns, phases.start_ns]),
            "duration_ns": np.concatenate([steps.end_ns - steps.start_ns, phases.end_ns - phases.start_ns]),
            "index": np.concatenate([steps.index, np.full(num_phases, -1)]),
        },
        (),
    )
