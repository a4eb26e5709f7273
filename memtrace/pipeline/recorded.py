"""Recorded pipeline actions of all ranks on one clock, and the schedule that they form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np

from memtrace.analysis.attribution import SPAN, rows_at
from memtrace.analysis.rank_clocks import clock_shift_ns
from memtrace.errors import MemtraceError, TraceError
from memtrace.format.arrays import Array
from memtrace.pipeline.memory_rules import in_flight_changes
from memtrace.pipeline.schedules.actions import Action, parse_action
from memtrace.pipeline.schedules.dependencies import earliest_times
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.trace import Trace

TORCH_RANGE_PREFIX: Final = "torch.distributed.pipelining."
"""Prefix of the range that ``memtrace.recording.pipelining`` records for every step of a schedule of torch."""


@dataclass(frozen=True)
class RankActions:
    """The actions of one rank in order of time; arrays have one entry per action.

    Neighbouring ranges of the same action count as one: torch computes the loss after the last stage's forward.
    """

    rank: int
    actions: tuple[Action, ...]
    start_ns: Array
    """On the clock of the reference rank, as ``end_ns``."""
    end_ns: Array
    first_row: Array
    """First row of events that belongs to the action: after the previous action, because the rank then waits for the
    messages of this one; in the first action of a step its own start."""
    start_row: Array
    end_row: Array
    step: Array
    """Step of the pipeline, from 0: how many times the rank has run the same action before."""
    clock_shift_ns: int
    """What was added to times of the rank's own clock."""

    @property
    def kinds(self) -> Array:
        """The kind of every action, as text."""
        return np.array([action.kind for action in self.actions])

    @property
    def stage_copies(self) -> frozenset[tuple[int, int]]:
        """The (pipeline, stage) pairs of which the rank holds a copy."""
        return frozenset((action.pipeline, action.stage) for action in self.actions)

    def in_flight(self) -> Array:
        """(stage, micro-batch) pairs in flight after the start (entry 2i) and the end (entry 2i + 1) of action i."""
        return running_in_flight(self.actions)


def running_in_flight(actions: Sequence[Action]) -> Array:
    """Number of micro-batches in flight after the start and the end of every action, never below 0.

    A recording that began in mid-step has backwards without a forward: these micro-batches were in flight before.
    """
    level = np.cumsum(np.stack(in_flight_changes(actions), axis=1).ravel())
    running: Array = level - min(0, int(level.min(initial=0)))
    return running


def action_of_rows(rank: RankActions, rows: Array) -> Array:
    """The action that each row of events belongs to; -1: none."""
    place = np.searchsorted(rank.end_row, rows, side="right")
    inside = np.minimum(place, len(rank.end_row) - 1)
    return np.where((rows >= 0) & (place < len(rank.end_row)) & (rows >= rank.first_row[inside]), inside, -1)


def recorded_actions(trace: Trace) -> list[RankActions]:
    """The actions of every rank that has any.

    Raises:
        TraceError: no rank has actions.
    """
    return trace.cached(_recorded_actions)


def _recorded_actions(trace: Trace) -> list[RankActions]:
    of_ranks = {number: trace.rank_result(number, own_actions) for number in trace.ranks}
    recorded = [shift_actions(actions, rank_shift_ns(trace, number))
                for number, actions in of_ranks.items() if actions is not None]  # fmt: skip
    if not recorded:
        raise TraceError(
            f"{trace.path or 'trace'}: no pipeline actions were recorded. memtrace records the actions of "
            "torch.distributed.pipelining automatically; in a hand-written pipeline mark them with rec.stage(...) and "
            "rec.microbatch(...)."
        )
    return recorded


def rank_shift_ns(trace: Trace, number: int) -> int:
    """Return what to add to the times of a rank to get times of the reference rank, the first one of the trace."""
    return clock_shift_ns(trace.rank_to_read(number).manifest, trace.rank_to_read(trace.ranks[0]).manifest)


def shift_actions(actions: RankActions, shift_ns: int) -> RankActions:
    """Return actions on the clock of the reference rank.

    Args:
        actions: those of a rank by its own clock.
        shift_ns: what to add to its times.
    """
    return replace(
        actions,
        start_ns=actions.start_ns + shift_ns,
        end_ns=actions.end_ns + shift_ns,
        clock_shift_ns=shift_ns,
    )


def torch_schedule(trace: Trace) -> str | None:
    """The class of torch.distributed.pipelining that ran the pipeline of a single-rank trace; None: another program."""
    spans = trace.columns("spans", "kind", "name")
    names = np.unique(spans["name"][spans["kind"] == SPAN["range"]])
    texts = [trace.name(int(name)) or "" for name in names]
    return next((text.removeprefix(TORCH_RANGE_PREFIX) for text in texts if text.startswith(TORCH_RANGE_PREFIX)), None)


def torch_steps(trace: Trace) -> Array:
    """``[step, 2]``: start and end of every torch.distributed.pipelining step of a single-rank trace, by its clock."""
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    ranges = np.flatnonzero(spans["kind"] == SPAN["range"])
    step_names = [
        int(name)
        for name in np.unique(spans["name"][ranges])
        if (trace.name(int(name)) or "").startswith(TORCH_RANGE_PREFIX)
    ]
    ranges = ranges[np.isin(spans["name"][ranges], step_names)]
    start = spans["start_ns"][ranges]
    steps = np.stack([start, start + spans["duration_ns"][ranges]], axis=1)
    return steps[np.argsort(start, kind="stable")]


def own_actions(trace: Trace) -> RankActions | None:
    """Return the actions of a single-rank trace by its own clock; None without actions (cached)."""
    return trace.cached(_own_actions)


def _own_actions(trace: Trace) -> RankActions | None:
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    rows = np.flatnonzero(spans["kind"] == SPAN["action"])
    if not len(rows):
        return None
    rows = rows[np.argsort(spans["start_ns"][rows], kind="stable")]
    names, start = spans["name"][rows], spans["start_ns"][rows]
    end = start + spans["duration_ns"][rows]
    first = np.flatnonzero(np.append(True, names[1:] != names[:-1]))
    names, start, end = names[first], start[first], end[np.append(first[1:], len(rows)) - 1]
    parsed = {int(name): _parse_name(trace, int(name)) for name in np.unique(names)}
    step = _count_earlier_equal(names)
    start_row, end_row = rows_at(trace, start), rows_at(trace, end)
    previous_end = np.append(start_row[0], end_row[:-1])
    begins_step = np.append(True, step[1:] != step[:-1])
    return RankActions(
        rank=trace.ranks[0],
        actions=tuple(parsed[int(name)] for name in names),
        start_ns=start,
        end_ns=end,
        first_row=np.where(begins_step, start_row, np.minimum(previous_end, start_row)),
        start_row=start_row,
        end_row=end_row,
        step=step,
        clock_shift_ns=0,
    )


def _parse_name(trace: Trace, name: int) -> Action:
    try:
        return parse_action(trace.name(name) or "")
    except MemtraceError as error:
        raise TraceError(f"{trace.path or 'trace'}: a recorded pipeline action is invalid: {error}") from error


def _count_earlier_equal(values: Array) -> Array:
    """For every value how many equal values come before it."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    rank_in_group = np.arange(len(values)) - np.repeat(begins, np.diff(np.append(begins, len(values))))
    counts = np.empty(len(values), np.int64)
    counts[order] = rank_in_group
    return counts


def last_complete_step(ranks: Sequence[RankActions]) -> int:
    """The last step in which every rank ran as many actions as in its first step."""
    sizes = [np.bincount(rank.step) for rank in ranks]
    return min(int(np.flatnonzero(size == size[0])[-1]) for size in sizes)


def step_interval_ns(ranks: Sequence[RankActions], step: int) -> tuple[int, int]:
    """Start of the first and end of the last action of a step, over all ranks."""
    of_step = [rank.step == step for rank in ranks]
    begin = min(int(rank.start_ns[mask].min()) for rank, mask in zip(ranks, of_step, strict=True))
    end = max(int(rank.end_ns[mask].max()) for rank, mask in zip(ranks, of_step, strict=True))
    return begin, end


def first_pipeline(ranks: Sequence[RankActions]) -> list[RankActions]:
    """The ranks of one pipeline: of ranks that hold the same stages (data parallelism) only the first."""
    return list({rank.stage_copies: rank for rank in reversed(ranks)}.values())[::-1]


def recorded_schedule(ranks: Sequence[RankActions], name: str = "recorded") -> Schedule:
    """The schedule of the last complete step; worker i is the i-th rank of ``first_pipeline``.

    Raises:
        TraceError: no rank has actions of some stage.
    """
    step = last_complete_step(ranks)
    rows = tuple(
        tuple(action for action, of_step in zip(rank.actions, rank.step == step, strict=True) if of_step)
        for rank in first_pipeline(ranks)
    )
    actions = [action for row in rows for action in row]
    num_stages = 1 + max(action.stage for action in actions)
    placement = [[-1] * num_stages for _ in range(1 + max(action.pipeline for action in actions))]
    for worker, row in enumerate(rows):
        for action in row:
            placement[action.pipeline][action.stage] = worker
    missing = sorted({stage for workers in placement for stage, worker in enumerate(workers) if worker < 0})
    if missing:
        raise TraceError(
            f"no recorded actions of pipeline stage {', '.join(map(str, missing))}: a rank is missing from the trace, "
            "or did not mark its actions."
        )
    start, _ = earliest_times(rows, num_stages, [1.0] * len(actions), [0.0] * len(actions))
    offsets = np.cumsum([0, *map(len, rows)])
    slots = tuple(tuple(map(int, start[begin:end])) for begin, end in pairwise(offsets))
    num_microbatches = 1 + max(action.microbatch for action in actions)
    return Schedule(name, num_stages, num_microbatches, tuple(map(tuple, placement)), rows, slots)
