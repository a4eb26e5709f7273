"""Slices of time on tracks, as timeline viewers draw them: steps, phases, module calls, operators and ranges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.attribution import SPAN, step_rows, steps_are_marked
from memtrace.format.arrays import Array
from memtrace.trace import Trace

OPERATORS: Final = "operators"
_SPAN_TRACKS: Final = {
    "phase": "phases",
    "module": "modules",
    "data_wait": "data waits",
    "range": "ranges",
    "action": "pipeline actions",
}
_OF_PROCESS: Final = ("phase", "data_wait", "action")
"""Kinds of spans that are drawn once for the process, whichever thread they are of."""


@dataclass(frozen=True)
class SliceTrack:
    """Slices that are drawn on one track."""

    name: str
    """What the slices are: steps, phases, data waits, ranges, pipeline actions, modules or operators."""
    thread: int
    """Number of the host thread; -1: the slices belong to the process."""
    texts: list[str]
    """The distinct names of the slices."""
    text: Array
    """Index into ``texts``, for each slice."""
    start_ns: Array
    duration_ns: Array

    def __len__(self) -> int:
        return len(self.start_ns)


def slice_tracks(trace: Trace) -> Iterator[SliceTrack]:
    """Return the tracks of a single-rank trace that have slices, outermost kind first."""
    yield from _step_tracks(trace)
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns", "thread")
    for kind, track in _SPAN_TRACKS.items():
        thread = np.full_like(spans["thread"], -1) if kind in _OF_PROCESS else spans["thread"]
        yield from _tracks_by_thread(trace, track, spans, spans["kind"] == SPAN[kind], thread)
    ops = trace.columns("ops", "name", "start_ns", "duration_ns", "thread")
    # Calls without a time are those of a file that has none. Calls before a window allocated blocks that are live.
    is_timed = (ops["start_ns"] >= window_start_ns(trace)) & (ops["duration_ns"] >= 0)
    yield from _tracks_by_thread(trace, OPERATORS, ops, is_timed, ops["thread"])


def window_start_ns(trace: Trace) -> int:
    """Return the time at which a trace begins; that of a window is the start of its first step."""
    if trace.surroundings is None:
        return 0
    steps = step_rows(trace)
    return int(steps.start_ns[0]) if len(steps.number) else 0


def _step_tracks(trace: Trace) -> Iterator[SliceTrack]:
    steps = step_rows(trace)
    if len(steps.number):
        prefix = "step" if steps_are_marked(trace) else "detected step"
        texts = [f"{prefix} {number}" for number in steps.number.tolist()]
        yield SliceTrack("steps", -1, texts, np.arange(len(texts)), steps.start_ns, steps.duration_ns)


def _tracks_by_thread(
    trace: Trace, track: str, columns: dict[str, Array], is_chosen: Array, thread: Array
) -> Iterator[SliceTrack]:
    for number in np.unique(thread[is_chosen]).tolist():
        rows = np.flatnonzero(is_chosen & (thread == number))
        names, text = np.unique(columns["name"][rows], return_inverse=True)
        texts = [trace.name(int(name)) or track.removesuffix("s") for name in names]
        yield SliceTrack(track, number, texts, text, columns["start_ns"][rows], columns["duration_ns"][rows])


def assign_lanes(start_ns: Array, duration_ns: Array) -> Array:
    """Return for each slice the number of a lane in which slices are disjoint or contain one another.

    Viewers draw the slices of a track as a stack. Calls nest, so they need one lane; ranges of several threads, or of a
    file whose times are rounded, can overlap.
    """
    end_ns = start_ns + duration_ns
    order = np.lexsort((-end_ns, start_ns))
    lane = np.zeros(len(order), np.int64)
    if _is_nested(start_ns[order], end_ns[order]):
        return lane
    open_ends: list[list[int]] = []
    for row, start, end in zip(order.tolist(), start_ns[order].tolist(), end_ns[order].tolist(), strict=True):
        lane[row] = _place(open_ends, start, end)
    return lane


def _place(open_ends: list[list[int]], start: int, end: int) -> int:
    """Put a slice into the first lane where it fits and return the number of the lane.

    Args:
        open_ends: for each lane the ends of its open slices, the innermost last.
        start: start of the slice, not before that of any earlier one.
        end: end of the slice.
    """
    for number, ends in enumerate(open_ends):
        while ends and ends[-1] <= start:
            ends.pop()
        if not ends or ends[-1] >= end:
            ends.append(end)
            return number
    open_ends.append([end])
    return len(open_ends) - 1


def _is_nested(start_ns: Array, end_ns: Array) -> bool:
    """Return whether slices in order of start (longest first) are disjoint or contain one another."""
    times = bracket_order(start_ns, end_ns)
    # In a sequence of brackets, the n-th opening of a depth matches the n-th closing of that depth.
    depth = np.cumsum(np.where(times.is_end, -1, 1)) + times.is_end
    by_depth = np.argsort(depth, kind="stable")
    is_end, row = times.is_end[by_depth], times.row[by_depth]
    return bool(np.array_equal(row[~is_end], row[is_end]))


@dataclass(frozen=True)
class Brackets:
    """Starts and ends of slices in the order in which a viewer must see them."""

    row: Array
    """The slice."""
    is_end: Array


def bracket_order(start_ns: Array, end_ns: Array) -> Brackets:
    """Return the starts and ends of nested slices in order of time.

    At one time, slices end before others start, inner ones first; a slice without duration ends where it starts.
    """
    order = np.lexsort((-end_ns, start_ns))
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    is_empty = end_ns <= start_ns
    time = np.concatenate([start_ns, end_ns])
    starts_or_empty = np.concatenate([np.ones(len(order), bool), is_empty])
    position = np.concatenate([2 * rank, np.where(is_empty, 2 * rank + 1, -rank)])
    sequence = np.lexsort((position, starts_or_empty, time))
    return Brackets(sequence % max(len(order), 1), sequence >= len(order))
