"""Files of ``export_memory_timeline`` of torch.profiler: raw rows (``.raw.json.gz``) or totals (``.json``).

Neither kind identifies blocks or devices. In the trace of a raw file, each version of a tensor is a block, so that the
totals by category are exact at any time. In the trace of a file of totals, each category is one block, which is freed
and allocated again whenever the total of the category changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import numpy as np

from memtrace.errors import TraceError
from memtrace.format.encode import Known, Text, empty_tables, make_table
from memtrace.format.schema import CATEGORIES, EVENT_KINDS, MAX_BYTES
from memtrace.readers.content import Content
from memtrace.readers.fields import integers
from memtrace.readers.lifetimes import ALLOC, FREE, assign_slots, find_lifetimes
from memtrace.readers.rank import ReadRank
from memtrace.readers.rows import FieldError
from memtrace.readers.tables import Array, Names, new_manifest

DEVICE: Final = "unknown"
_BASELINE: Final = np.int8(EVENT_KINDS.index("baseline"))
_PREEXISTING: Final = 1
_ACTIONS: Final = (1, 2, 3, 4)
_MAX_NS: Final = 1 << 62
# In the order of torch.profiler's Category; AUTOGRAD_DETAIL is allocated and freed within a backward pass.
_CATEGORIES: Final = (
    "parameter",
    "optimizer_state",
    "input",
    "temporary",
    "activation",
    "gradient",
    "temporary",
    "unknown",
)
_CODES: Final = np.array([CATEGORIES.index(name) for name in _CATEGORIES], np.int8)
_NOTES: Final = [
    "The file does not name its device and contains neither addresses nor call stacks",
    "Sizes are those of tensors where torch.profiler knew them, and those of allocator blocks elsewhere",
    "Memory of torch.profiler's category AUTOGRAD_DETAIL is counted as temporary",
]


def read_timeline(value: list[Any], content: Content) -> ReadRank:
    """Convert a loaded timeline to a trace.

    Raises:
        TraceError: the value is not a timeline of ``export_memory_timeline``.
    """
    try:
        if len(value) == 2 and isinstance(value[1], list) and all(isinstance(row, list) for row in value[1]):
            return _convert_totals(*_parse_totals(value), content)
        return _convert_rows(_parse_rows(value), content)
    except FieldError as error:
        raise TraceError(
            f"{content.path}: not a timeline of export_memory_timeline ({error}). Export it again to a file name that "
            "ends in .raw.json.gz."
        ) from None


def _parse_rows(value: list[Any]) -> Array:
    """Return an array whose four rows are the columns time, action, bytes and category."""
    if any(not isinstance(row, list) or len(row) != 4 for row in value):
        raise FieldError("a row does not have the four fields time, action, bytes, category")
    flat = integers([number for row in value for number in row], "the value", "number {}")
    rows: Array = flat.reshape(-1, 4).T
    if not np.isin(rows[1], _ACTIONS).all():
        raise FieldError("a row has an action that is not between 1 and 4")
    if rows[3].min() < 0 or rows[3].max() >= len(_CATEGORIES):
        raise FieldError(f"a row has a category that is not between 0 and {len(_CATEGORIES) - 1}")
    if np.abs(rows[2]).max() > MAX_BYTES or np.abs(rows[0]).max() > _MAX_NS:
        raise FieldError("a row has an impossible size or time")
    return rows


def _convert_rows(rows: Array, content: Content) -> ReadRank:
    time, action, size, category = rows[:, rows[2] != 0]
    before = (action == _PREEXISTING) | (time < 0)
    if not len(time):
        raise FieldError("it contains no allocation")
    t0 = int(time[~before].min()) if (~before).any() else 0
    order = np.lexsort((time, ~before))
    time, size, category, before = np.maximum(time[order], t0), size[order], category[order], before[order]
    kind = np.where(size > 0, ALLOC, FREE)
    size = np.abs(size)
    slots = assign_slots(category * (np.int64(1) << 50) + size, kind)
    lives = find_lifetimes(kind, np.zeros(len(kind), np.int8), slots, size)
    rows_of_older = lives.first_row[~lives.allocated]
    # First the blocks that the file only frees, then those that it marks as older, then the others.
    first = np.concatenate(
        [rows_of_older, np.flatnonzero((kind == ALLOC) & before), np.flatnonzero((kind == ALLOC) & ~before)]
    )
    number = np.full(len(lives), -1, np.int64)
    number[lives.of_row[first]] = np.arange(len(first))
    older = len(rows_of_older)
    kind = np.where((kind == ALLOC) & before, _BASELINE, kind)
    rank = _make_rank(
        content,
        time=np.concatenate([np.full(older, t0), time]) - t0,
        kind=np.concatenate([np.full(older, _BASELINE), kind]),
        block=np.concatenate([np.arange(older), number[lives.of_row]]),
        size=np.concatenate([size[rows_of_older], size]),
        category=_CODES[category[first]],
        t0=t0,
    )
    return replace(
        rank,
        manifest=rank.manifest.with_notes(
            "Each block is one version of a tensor. The file does not identify the block that a free ends, so memtrace "
            "assumes the youngest of the same size and category; totals by category are exact"
        ),
    )


def _parse_totals(value: list[Any]) -> tuple[Array, Array]:
    """Return the times in nanoseconds, and the totals in bytes with a row for each time and a column per category."""
    times, rows = value
    width = len(_CATEGORIES) + 1
    if not isinstance(times, list) or len(times) != len(rows) or not rows or any(len(row) != width for row in rows):
        raise FieldError(f"it does not have one row of {width} totals for each time")
    if any(not isinstance(time, int | float) or not abs(time) < _MAX_NS / 1000 for time in times):
        raise FieldError("a time is not a number")
    flat = integers([number for row in rows for number in row], "the value", "total {}")
    if np.abs(flat).max() > MAX_BYTES:
        raise FieldError("a total is larger than the memory of any device")
    return np.array([round(time * 1000) for time in times], np.int64), flat.reshape(-1, width)[:, 1:]


def _convert_totals(time: Array, totals: Array, content: Content) -> ReadRank:
    has_negative_totals = bool((totals < 0).any())
    totals = np.maximum(totals, 0)
    previous = np.vstack([np.zeros((1, totals.shape[1]), np.int64), totals[:-1]])
    row, category = np.nonzero(totals != previous)
    # All frees of a time come before its allocations, so that the sum in between never exceeds both totals.
    old, new = previous[row, category], totals[row, category]
    row = np.concatenate([row[old > 0], row[new > 0]])
    size = np.concatenate([old[old > 0], new[new > 0]])
    kind = np.concatenate([np.full(int((old > 0).sum()), FREE), np.full(int((new > 0).sum()), ALLOC)])
    category = np.concatenate([category[old > 0], category[new > 0]])
    order = np.lexsort((kind == ALLOC, row))
    row, size, kind, category = row[order], size[order], kind[order], category[order]
    # A category has one block at a time, so the category can serve as its address.
    lives = find_lifetimes(kind, np.zeros(len(kind), np.int8), category, size)
    number = np.empty(len(lives), np.int64)
    number[lives.of_row[kind == ALLOC]] = np.arange(int((kind == ALLOC).sum()))
    rank = _make_rank(
        content,
        time=time[row] - time[0],
        kind=np.where((kind == ALLOC) & (row == 0), _BASELINE, kind),
        block=number[lives.of_row],
        size=size,
        category=_CODES[category[kind == ALLOC]],
        t0=int(time[0]),
    )
    notes = [
        "The file contains totals by category and no blocks: each category is shown as one block, which is allocated "
        "again whenever its total changes"
    ]
    if has_negative_totals:
        notes.append("Some totals are negative; they are counted as 0")
    manifest = replace(rank.manifest, coverage=replace(rank.manifest.coverage, has_blocks=False))
    return replace(rank, manifest=manifest.with_notes(*notes))


def _make_rank(
    content: Content, *, time: Array, kind: Array, block: Array, size: Array, category: Array, t0: int
) -> ReadRank:
    """Build the trace. ``category`` has one element per block, the other arrays have one per event."""
    manifest = new_manifest("memory_timeline", content.path.name, t0 if t0 > 0 else None)
    events: dict[str, Array | Text | Known] = {
        "time_ns": time,
        "kind": Text(kind, EVENT_KINDS),
        "device": Text(np.zeros(len(kind), np.int8), [DEVICE]),
        "block_id": Known(block, block >= 0),
        "size": size,
    }
    labels: dict[str, Array | Text | Known] = {
        "block_id": np.arange(len(category)),
        "category": Text(category, CATEGORIES),
    }
    tables = empty_tables() | {
        "events": make_table("events", len(kind), events),
        "labels": make_table("labels", len(category), labels),
        "names": Names().table(),
    }
    return ReadRank(manifest.with_notes(*_NOTES), tables)
