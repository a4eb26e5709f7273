"""What an index keeps of one part of a trace: the curve at some instants, and its largest blocks.

A part begins with a keyframe, so it is summarized by itself, in any order and in any process. Only later parts show
what becomes of the blocks that are live at its end: ``memtrace.analysis.trace_index`` puts the parts together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.blocks import allocated_sizes, blocks
from memtrace.analysis.peak import allocated_bytes, level_at, live_bytes, requested_bytes, reserved_bytes
from memtrace.analysis.timeline import select_plot_points
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

LEVELS: Final = ("requested", "allocated", "reserved", *CATEGORIES)
"""The rows of ``CurvePoints.levels``."""
REQUESTED, ALLOCATED, RESERVED, FIRST_CATEGORY = range(4)
EVENTS_PER_POINT: Final = 256
"""Events of a part for each of its instants in the index."""
MIN_POINTS: Final = 64
EVENTS_PER_BLOCK: Final = 512
"""Events of a part for each of its blocks in the index, in addition to those that are live at its end."""
MIN_BLOCKS: Final = 64
BLOCK_COLUMNS: Final = ("id", "device", "begin_row", "end_row", "begin_ns", "end_ns", "size", "allocated_size",
                        "address", "stream", "category", "phase", "step", "num_reads", "num_writes", "name", "op_name",
                        "module", "stack")  # fmt: skip
"""Columns of the blocks of a summary, as in ``analysis.blocks``; -1: none or unknown."""

BlockColumns = dict[str, Array]


@dataclass(frozen=True)
class CurvePoints:
    """The curve of one device after some rows of events; the values are exact there."""

    row: Array
    time_ns: Array
    levels: Array
    """Bytes: one row for each of ``LEVELS``; -1: unknown."""


@dataclass(frozen=True)
class PartSummary:
    """What an index keeps of one part. Rows count from the part's first event, which follows the keyframe."""

    number: int
    num_events: int
    num_live: int
    """Rows of the keyframe."""
    end_ns: int
    """Largest time of the events up to the end of the part."""
    devices: tuple[str, ...]
    """What the column ``device`` of the blocks refers to."""
    curves: dict[str, CurvePoints]
    """By device. The first point has row -1: the level at the start of the part."""
    begun: BlockColumns
    """Blocks that begin in the part: the largest, and all that are live at its end. ``is_large`` marks the largest."""
    older: BlockColumns
    """Blocks of the keyframe, and what the part knows of them."""
    num_begun: dict[str, int]
    """Number of the blocks that begin in the part, by device."""
    late: dict[str, Array]
    """By device the bytes of blocks that are older than the recording but first seen in the part, for each of
    ``LEVELS``: they were live in all earlier parts."""


def summarize_part(trace: Trace, number: int) -> PartSummary:
    """Return what an index keeps of a part.

    Args:
        trace: the whole trace of one rank.
        number: one of ``trace.part_numbers``.
    """
    part = trace.part(number)
    num_live = part.num_rows("live")
    time = part.columns("events", "time_ns")["time_ns"]
    columns = block_columns(part, num_live)
    is_older = _is_older(part, num_live)
    begins = ~is_older & (columns["device"] >= 0)  # ids of blocks that are not in the part have no device
    counts = np.bincount(columns["device"][begins], minlength=len(part.devices))
    is_large = _largest(columns, begins, len(time) - num_live)
    kept = is_large | (begins & (columns["end_row"] < 0))
    columns["is_large"] = is_large
    return PartSummary(
        number=number,
        num_events=len(time) - num_live,
        num_live=num_live,
        end_ns=int(time.max(initial=0)),
        devices=part.devices,
        curves={device: _curve(part, device, num_live) for device in part.devices},
        begun={name: values[kept] for name, values in columns.items()},
        older={name: values[is_older] for name, values in columns.items()},
        num_begun=dict(zip(part.devices, counts.tolist(), strict=True)),
        late={device: _first_seen_late(columns, begins, code) for code, device in enumerate(part.devices)},
    )


def block_columns(part: Trace, num_live: int) -> BlockColumns:
    """Return ``BLOCK_COLUMNS`` of all blocks of a part, by their place in ``blocks``; rows count past the keyframe."""
    table = blocks(part)
    ids = part.block_ids
    row = {"begin_row": table.alloc_event, "end_row": table.free_event}
    columns: BlockColumns = {
        "id": np.arange(len(table)) if ids is None else ids.astype(np.int64),
        "begin_ns": table.alloc_ns,
        "end_ns": table.free_ns,
        "allocated_size": allocated_sizes(part),
        **{name: np.where(rows >= 0, rows - num_live, -1) for name, rows in row.items()},
    }
    return {name: columns[name] if name in columns else getattr(table, name) for name in BLOCK_COLUMNS}


def _is_older(part: Trace, num_live: int) -> Array:
    """Return which blocks are in the keyframe."""
    block = part.columns("events", "block_id")["block_id"][:num_live]
    is_older = np.zeros(len(blocks(part)), bool)
    is_older[block[block >= 0]] = True
    return is_older


def _largest(columns: BlockColumns, candidates: Array, num_events: int) -> Array:
    """Return which of the candidates are the largest of their device."""
    chosen = np.zeros(len(candidates), bool)
    count = max(MIN_BLOCKS, num_events // EVENTS_PER_BLOCK)
    for device in np.unique(columns["device"][candidates]):
        of_device = np.flatnonzero(candidates & (columns["device"] == device) & (columns["size"] > 0))
        chosen[of_device[np.argsort(-columns["size"][of_device], kind="stable")[:count]]] = True
    return chosen


def _curve(part: Trace, device: str, num_live: int) -> CurvePoints:
    """Return the curve at the start of a part and at the first and the highest change of equal runs of changes."""
    live = requested_bytes(part, device)
    max_points = max(MIN_POINTS, part.num_rows("events") // EVENTS_PER_POINT)
    rows = live.rows[select_plot_points(live.bytes, max_points)]
    return curve_after(part, device, num_live, np.concatenate([[num_live - 1], rows]))


def curve_after(part: Trace, device: str, num_live: int, rows: Array) -> CurvePoints:
    """Return the levels of a device after rows of the events of a part; ``num_live - 1``: at its start."""
    table = blocks(part)
    time = part.columns("events", "time_ns")["time_ns"]
    levels = np.full((len(LEVELS), len(rows)), -1, np.int64)
    for place, level in (
        (REQUESTED, requested_bytes(part, device)),
        (ALLOCATED, allocated_bytes(part, device)),
        (RESERVED, reserved_bytes(part, device)),
    ):
        if level is not None:
            levels[place] = level_at(level, rows)
    for code in range(len(CATEGORIES)):
        sizes = np.where(table.category == code, table.size, 0)
        levels[FIRST_CATEGORY + code] = level_at(live_bytes(part, device, sizes), rows)
    at = np.clip(rows, 0, max(len(time) - 1, 0))
    return CurvePoints(rows - num_live, time[at] if len(time) else np.zeros(len(rows), np.int64), levels)


def _first_seen_late(columns: BlockColumns, candidates: Array, device: int) -> Array:
    """Return the bytes of the candidates on a device that are older than the recording, for each of ``LEVELS``."""
    late = candidates & (columns["begin_row"] < 0) & (columns["device"] == device)
    total = np.zeros(len(LEVELS), np.int64)
    total[REQUESTED] = columns["size"][late].sum()
    total[ALLOCATED] = np.maximum(columns["allocated_size"][late], 0).sum()
    np.add.at(total, FIRST_CATEGORY + columns["category"][late].astype(np.int64), columns["size"][late])
    return total
