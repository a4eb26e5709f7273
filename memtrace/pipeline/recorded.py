"""The actions that the ranks of a pipeline were recorded at, on one clock, and the schedule they amount to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from memtrace.analysis.attribution import SPAN, rows_at
from memtrace.errors import MemtraceError, TraceError
from memtrace.format.arrays import Array
from memtrace.format.manifest import Manifest
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, Action, parse_action
from memtrace.pipeline.schedules.dependencies import times
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.trace import Trace

_TORCH = "torch.distributed.pipelining."  # what memtrace.recording.pipelining calls the range of a step
NO_ACTIONS = (
    "it has no actions of a pipeline. Those of torch.distributed.pipelining are marked by themselves; in a "
    "hand-written pipeline mark them with rec.stage(...) and rec.microbatch(...)"
)


@dataclass(frozen=True)
class RankActions:
    """The actions of one rank in order; arrays are indexed by action.

    Two neighbouring ranges of the same action (torch computes the loss behind the last stage's forward) are one.
    """

    rank: int
    actions: tuple[Action, ...]
    start_ns: Array
    """On the clock of the reference rank."""
    end_ns: Array
    first_row: Array
    """Where the rows of events begin that are for this action: behind the action before it, whose messages it waits
    for, or in a new round at its own start."""
    start_row: Array
    end_row: Array
    round: Array
    """How often the same action had been done before: the steps of the pipeline, from 0."""

    @property
    def kinds(self) -> Array:
        """The kind of every action, as text."""
        return np.array([action.kind for action in self.actions])

    @property
    def places(self) -> frozenset[tuple[int, int]]:
        """The (pipeline, stage) pairs that it works for."""
        return frozenset((action.pipeline, action.stage) for action in self.actions)

    @property
    def in_flight_change(self) -> tuple[Array, Array]:
        """By how much micro-batches in flight change at the start and at the end of every action."""
        begins = np.array([action.kind == FORWARD for action in self.actions], np.int64)
        ends = np.array(
            [action.kind in (BACKWARD, INPUT_BACKWARD) and action.half != 0 for action in self.actions], np.int64
        )
        return begins, -ends

    def in_flight(self) -> Array:
        """(stage, micro-batch) pairs in flight: entries 2i and 2i + 1 hold from the start and the end of action i."""
        level = np.cumsum(np.stack(self.in_flight_change, axis=1).ravel())
        return level - min(0, int(level.min(initial=0)))


def recorded_actions(trace: Trace) -> list[RankActions]:
    """The actions of every rank that has any; TraceError where none has."""
    reference = trace.rank(trace.ranks[0]).manifest
    found = [_of_rank(trace.rank(number), number, reference) for number in trace.ranks]
    present = [one for one in found if one is not None]
    if not present:
        raise TraceError(f"{trace.path or 'the trace'} is not of a pipeline: {NO_ACTIONS}.")
    return present


def torch_schedule(trace: Trace) -> str | None:
    """The class of torch.distributed.pipelining that ran the pipeline of a single-rank trace; None: another program."""
    spans = trace.columns("spans", "kind", "name")
    names = np.unique(spans["name"][spans["kind"] == SPAN["range"]])
    texts = [trace.name(int(name)) or "" for name in names]
    return next((text.removeprefix(_TORCH) for text in texts if text.startswith(_TORCH)), None)


def torch_steps(trace: Trace) -> Array:
    """Start and end of every step of torch.distributed.pipelining in a single-rank trace, by its own clock."""
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    chosen = np.flatnonzero(spans["kind"] == SPAN["range"])
    ours = [int(name) for name in np.unique(spans["name"][chosen]) if (trace.name(int(name)) or "").startswith(_TORCH)]
    chosen = chosen[np.isin(spans["name"][chosen], ours)]
    start = spans["start_ns"][chosen]
    steps = np.stack([start, start + spans["duration_ns"][chosen]], axis=1)
    return steps[np.argsort(start, kind="stable")]


def clock_shift_ns(manifest: Manifest, reference: Manifest) -> int:
    """What to add to the times of one rank for those of the reference rank.

    The offset that was measured while recording; else the difference of the wall clocks, 0 where they are unknown.
    """
    clocks = [one.clock.offset_ns if one.clock else None for one in (manifest, reference)]
    if clocks[0] is not None and clocks[1] is not None:
        return int(clocks[0]) - int(clocks[1])
    begins = [one.t0_epoch_ns for one in (manifest, reference)]
    return int(begins[0]) - int(begins[1]) if begins[0] is not None and begins[1] is not None else 0


def _of_rank(trace: Trace, number: int, reference: Manifest) -> RankActions | None:
    spans = trace.columns("spans", "kind", "name", "start_ns", "duration_ns")
    rows = np.flatnonzero(spans["kind"] == SPAN["action"])
    if not len(rows):
        return None
    rows = rows[np.argsort(spans["start_ns"][rows], kind="stable")]
    names, start = spans["name"][rows], spans["start_ns"][rows]
    end = start + spans["duration_ns"][rows]
    first = np.flatnonzero(np.append(True, names[1:] != names[:-1]))
    names, start, end = names[first], start[first], end[np.append(first[1:], len(rows)) - 1]
    parsed = {int(name): _parsed(trace, int(name)) for name in np.unique(names)}
    rounds = _occurrence(names)
    start_row, end_row = rows_at(trace, start), rows_at(trace, end)
    behind = np.append(start_row[0], end_row[:-1])
    new_round = np.append(True, rounds[1:] != rounds[:-1])
    shift = clock_shift_ns(trace.manifest, reference)
    return RankActions(
        number,
        tuple(parsed[int(name)] for name in names),
        start + shift,
        end + shift,
        np.where(new_round, start_row, np.minimum(behind, start_row)),
        start_row,
        end_row,
        rounds,
    )


def _parsed(trace: Trace, name: int) -> Action:
    try:
        return parse_action(trace.name(name) or "")
    except MemtraceError as error:
        raise TraceError(f"{trace.path or 'the trace'} has an action that is none: {error}") from error


def _occurrence(names: Array) -> Array:
    """How many equal values come before each."""
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    begins = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
    count = np.arange(len(names)) - np.repeat(begins, np.diff(np.append(begins, len(names))))
    found = np.empty(len(names), np.int64)
    found[order] = count
    return found


def last_complete_round(ranks: Sequence[RankActions]) -> int:
    """The last round in which every rank did all that it did in the first."""
    sizes = [np.bincount(one.round) for one in ranks]
    whole = [int(np.flatnonzero(size == size[0])[-1]) for size in sizes]
    return min(whole)


def one_pipeline(ranks: Sequence[RankActions]) -> list[RankActions]:
    """The first rank of each place: of several pipelines side by side (data parallelism) they make one."""
    return list({one.places: one for one in reversed(ranks)}.values())[::-1]


def recorded_schedule(ranks: Sequence[RankActions], name: str = "recorded") -> Schedule:
    """The schedule that the ranks ran in their last complete round; worker i is the i-th of ``one_pipeline``."""
    chosen = last_complete_round(ranks)
    rows = tuple(
        tuple(action for action, one in zip(rank.actions, rank.round, strict=True) if one == chosen)
        for rank in one_pipeline(ranks)
    )
    actions = [action for row in rows for action in row]
    num_stages = 1 + max(action.stage for action in actions)
    placement = [[-1] * num_stages for _ in range(1 + max(action.pipeline for action in actions))]
    for worker, row in enumerate(rows):
        for action in row:
            placement[action.pipeline][action.stage] = worker
    if any(worker < 0 for workers in placement for worker in workers):
        raise TraceError("the trace lacks stages of the pipeline: some rank is missing, or marked no actions.")
    start, _ = times(rows, num_stages, [1.0] * len(actions), [0.0] * len(actions))
    offsets = np.cumsum([0, *map(len, rows)])
    slots = tuple(tuple(map(int, start[begin:end])) for begin, end in pairwise(offsets))
    microbatches = 1 + max(action.microbatch for action in actions)
    return Schedule(name, num_stages, microbatches, tuple(map(tuple, placement)), rows, slots)
