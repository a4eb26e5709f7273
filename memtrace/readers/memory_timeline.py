"""What ``torch.profiler``'s ``export_memory_timeline`` writes: raw rows (``.raw.json.gz``) or totals (``.json``).

Neither names blocks or devices. In a raw file each version of a tensor stands as a block, so that every total by time
and category is exact; in a file of totals each category is one block that is made anew whenever its total changes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from memtrace.errors import TraceError
from memtrace.format.encode import Known, Text, empty_tables, make_table
from memtrace.format.schema import CATEGORIES, EVENT_KINDS
from memtrace.readers.content import Content
from memtrace.readers.fields import FieldError, integers
from memtrace.readers.lifetimes import ALLOC, FREE, lifetimes, slots
from memtrace.readers.tables import Array, Names, new_manifest

if TYPE_CHECKING:
    from memtrace.readers.registry import Rank

DEVICE: Final = "unknown"
_BASELINE: Final = np.int8(EVENT_KINDS.index("baseline"))
_PREEXISTING: Final = 1
_ACTIONS: Final = (1, 2, 3, 4)
_MAX_BYTES: Final = 1 << 48
_MAX_NS: Final = 1 << 62
# In torch's order. Details of autograd live and die within a backward.
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
    "it does not say which device it is of, has no addresses and no stacks",
    "its bytes are those of tensors where torch could tell them, else of the allocator's blocks",
    "what torch calls AUTOGRAD_DETAIL counts as temporary",
]


def timeline_tables(value: list[Any], content: Content) -> Rank:
    """Manifest and tables of a loaded timeline. TraceError where it is none."""
    try:
        if len(value) == 2 and isinstance(value[1], list) and all(isinstance(row, list) for row in value[1]):
            return _of_totals(*_totals(value), content)
        return _of_rows(_raw_rows(value), content)
    except FieldError as error:
        raise TraceError(f"{content.path} is no timeline that export_memory_timeline wrote: {error}.") from None


def _raw_rows(value: list[Any]) -> Array:
    """Columns time, action, bytes, category, one row of the array each."""
    if any(not isinstance(row, list) or len(row) != 4 for row in value):
        raise FieldError("a row has not the four fields time, action, bytes, category")
    flat = integers([number for row in value for number in row], "the value", "number {}")
    rows: Array = flat.reshape(-1, 4).T
    if not np.isin(rows[1], _ACTIONS).all():
        raise FieldError("a row has an action that is none of 1 to 4")
    if rows[3].min() < 0 or rows[3].max() >= len(_CATEGORIES):
        raise FieldError(f"a row has a category that is none of 0 to {len(_CATEGORIES) - 1}")
    if np.abs(rows[2]).max() > _MAX_BYTES or np.abs(rows[0]).max() > _MAX_NS:
        raise FieldError("a row has a size or a time that no machine has")
    return rows


def _of_rows(rows: Array, content: Content) -> Rank:
    time, action, size, category = rows[:, rows[2] != 0]
    before = (action == _PREEXISTING) | (time < 0)
    if not len(time):
        raise FieldError("it holds no allocation")
    t0 = int(time[~before].min()) if (~before).any() else 0
    order = np.lexsort((time, ~before))
    time, size, category, before = np.maximum(time[order], t0), size[order], category[order], before[order]
    kind = np.where(size > 0, ALLOC, FREE)
    size = np.abs(size)
    place = slots(category * (np.int64(1) << 50) + size, kind)
    lives = lifetimes(kind, np.zeros(len(kind), np.int8), place, size)
    rows_of_older = lives.first_row[~lives.allocated]
    # Blocks that the file says are older, then those that it only frees, then the others.
    first = np.concatenate(
        [rows_of_older, np.flatnonzero((kind == ALLOC) & before), np.flatnonzero((kind == ALLOC) & ~before)]
    )
    number = np.full(len(lives), -1, np.int64)
    number[lives.of_row[first]] = np.arange(len(first))
    older = len(rows_of_older)
    kind = np.where((kind == ALLOC) & before, _BASELINE, kind)
    manifest, tables = _rank(
        content,
        time=np.concatenate([np.full(older, t0), time]) - t0,
        kind=np.concatenate([np.full(older, _BASELINE), kind]),
        block=np.concatenate([np.arange(older), number[lives.of_row]]),
        size=np.concatenate([size[rows_of_older], size]),
        category=_CODES[category[first]],
        t0=t0,
    )
    manifest = manifest.with_notes(
        "a block here is one version of a tensor; which of several of one size and category ends is not told, and the "
        "youngest is assumed: totals by category are exact"
    )
    return manifest, tables


def _totals(value: list[Any]) -> tuple[Array, Array]:
    """Times (ns) and totals, a row a time, a column a category."""
    times, rows = value
    width = len(_CATEGORIES) + 1
    if not isinstance(times, list) or len(times) != len(rows) or not rows or any(len(row) != width for row in rows):
        raise FieldError(f"it has not one row of {width} totals for each time")
    if any(not isinstance(time, int | float) or not abs(time) < _MAX_NS / 1000 for time in times):
        raise FieldError("a time is no number")
    flat = integers([number for row in rows for number in row], "the value", "total {}")
    if np.abs(flat).max() > _MAX_BYTES:
        raise FieldError("a total is larger than any machine's memory")
    return np.array([round(time * 1000) for time in times], np.int64), flat.reshape(-1, width)[:, 1:]


def _of_totals(time: Array, totals: Array, content: Content) -> Rank:
    below = bool((totals < 0).any())
    totals = np.maximum(totals, 0)
    previous = np.vstack([np.zeros((1, totals.shape[1]), np.int64), totals[:-1]])
    row, category = np.nonzero(totals != previous)
    # At each time first all frees, then all allocations: in between there is never more than at either end.
    old, new = previous[row, category], totals[row, category]
    row = np.concatenate([row[old > 0], row[new > 0]])
    size = np.concatenate([old[old > 0], new[new > 0]])
    kind = np.concatenate([np.full(int((old > 0).sum()), FREE), np.full(int((new > 0).sum()), ALLOC)])
    category = np.concatenate([category[old > 0], category[new > 0]])
    order = np.lexsort((kind == ALLOC, row))
    row, size, kind, category = row[order], size[order], kind[order], category[order]
    # One block a category at a time: the category is the address.
    lives = lifetimes(kind, np.zeros(len(kind), np.int8), category, size)
    number = np.empty(len(lives), np.int64)
    number[lives.of_row[kind == ALLOC]] = np.arange(int((kind == ALLOC).sum()))
    manifest, tables = _rank(
        content,
        time=time[row] - time[0],
        kind=np.where((kind == ALLOC) & (row == 0), _BASELINE, kind),
        block=number[lives.of_row],
        size=size,
        category=_CODES[category[kind == ALLOC]],
        t0=int(time[0]),
    )
    manifest = replace(manifest, coverage=replace(manifest.coverage, has_blocks=False))
    manifest = manifest.with_notes(
        "it holds totals by category and no blocks: each category stands as one block, made anew whenever its total "
        "changes"
    )
    if below:
        manifest = manifest.with_notes("totals below 0 count as 0")
    return manifest, tables


def _rank(content: Content, *, time: Array, kind: Array, block: Array, size: Array, category: Array, t0: int) -> Rank:
    manifest = new_manifest("memory_timeline", content.path.name, t0 if t0 > 0 else None)
    manifest = manifest.with_notes(*_NOTES)
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
    return manifest, empty_tables() | {
        "events": make_table("events", len(kind), events),
        "labels": make_table("labels", len(category), labels),
        "names": Names().table(),
    }
