"""All-reduce of the gradients of stages that several workers hold: when it starts, how long it takes, what it costs.

An all-reduce beside computation is not free: its progress needs a part of the processor or of the GPU, and launching it
takes time (Chimera, section 3.2; ``Network.all_reduce_share`` and ``all_reduce_launch_s``). An all-reduce in a bubble,
or after all work of the worker, costs only its own duration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Network, StageCosts
from memtrace.pipeline.schedules.actions import BACKWARD, WEIGHT_BACKWARD
from memtrace.pipeline.schedules.dependencies import earliest_times
from memtrace.pipeline.schedules.schedule import Schedule

AFTER: Final = "after"
"""All-reduce when every worker of the stage has done all its work."""
EAGER: Final = "eager"
"""All-reduce as soon as the last backward of the stage is done."""
EAGER_OPT: Final = "eager-opt"
"""Eager where a bubble follows on one of the workers, else after (Chimera)."""
SYNC_MODES: Final = (AFTER, EAGER, EAGER_OPT)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """One all-reduce of gradients over all workers that hold the stage."""

    stage: int
    workers: tuple[int, ...]
    start_s: float
    end_s: float
    is_eager: bool
    """Whether it was launched as soon as the gradients were complete, beside computation that was still to be done."""


def stage_holders(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """The workers that hold a copy of the stage, ascending."""
    return tuple(sorted({workers[stage] for workers in schedule.placement}))


def last_backward_actions(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(worker, stage) -> number of the action that completes the worker's gradients of the stage.

    Actions are numbered worker by worker. A copy that no micro-batch passes through has no entry.
    """
    last: dict[tuple[int, int], int] = {}
    number = 0
    for worker, row in enumerate(schedule.rows):
        for action in row:
            if action.kind in (BACKWARD, WEIGHT_BACKWARD):
                last[worker, action.stage] = number
            number += 1
    return last


def reduced_stages(schedule: Schedule, data_parallel: int) -> list[int]:
    """The stages whose gradients are all-reduced: those that several workers hold."""
    return [stage for stage in range(schedule.num_stages) if len(stage_holders(schedule, stage)) * data_parallel > 1]


def choose_eager_stages(schedule: Schedule, mode: str) -> frozenset[int]:
    """The stages whose all-reduce is launched as soon as the last backward of the stage is done.

    Bubbles are those of the schedule with equal stages, whose backward takes twice as long as their forward. Shorter
    waits, which unequal stages cause anywhere, leave no room for an all-reduce.

    Raises:
        MemtraceError: the mode is unknown.
    """
    if mode not in SYNC_MODES:
        raise MemtraceError(f"unknown synchronization {mode!r}; choose one of {', '.join(SYNC_MODES)}")
    if mode == AFTER:
        return frozenset()
    if mode == EAGER:
        return frozenset(range(schedule.num_stages))
    durations = [
        (1.0 if action.kind != BACKWARD else 2.0) / (1 + (action.half is not None)) for action in schedule.actions()
    ]
    start, end = earliest_times(schedule.rows, schedule.num_stages, durations, [0.0] * len(durations))
    last = last_backward_actions(schedule)

    def has_bubble(worker: int, stage: int) -> bool:
        number = last.get((worker, stage))
        return number is None or _bubble_follows(schedule, worker, number, start, end)

    return frozenset(
        stage
        for stage in range(schedule.num_stages)
        if any(has_bubble(worker, stage) for worker in stage_holders(schedule, stage))
    )


def schedule_all_reduces(
    schedule: Schedule,
    stages: Sequence[StageCosts],
    end_s: Sequence[float],
    *,
    network: Network,
    data_parallel: int,
    eager_stages: frozenset[int],
) -> tuple[AllReduce, ...]:
    """The all-reduces of one step by start time, at most one at a time on every worker; empty without second copies.

    Copies of a stage on one worker count as one replica.
    """
    last, done = last_backward_actions(schedule), _local_ends(schedule, end_s)
    ready: list[tuple[float, int, tuple[int, ...]]] = []
    for stage in reduced_stages(schedule, data_parallel):
        workers = stage_holders(schedule, stage)
        if stage in eager_stages:
            numbers = [last.get((worker, stage)) for worker in workers]
            ends = [0.0 if number is None else end_s[number] for number in numbers]
        else:
            ends = [done[worker] for worker in workers]
        ready.append((max(ends), stage, workers))
    free = [0.0] * schedule.num_workers
    reductions = []
    for time, stage, workers in sorted(ready):
        start = max(time, *(free[worker] for worker in workers))
        end = start + network.all_reduce_s(stages[stage].gradient_bytes, len(workers) * data_parallel)
        for worker in workers:
            free[worker] = end
        reductions.append(AllReduce(stage, workers, start, end, stage in eager_stages))
    return tuple(reductions)


def all_reduce_delays(
    schedule: Schedule,
    start_s: Sequence[float],
    end_s: Sequence[float],
    reductions: Sequence[AllReduce],
    network: Network,
) -> list[float]:
    """How much longer every action takes because of all-reduces beside it: their share and their launches."""
    delays = [0.0] * len(end_s)
    last = last_backward_actions(schedule)
    offsets = [0]
    for row in schedule.rows:
        offsets.append(offsets[-1] + len(row))
    for reduction in reductions:
        if not reduction.is_eager:
            continue
        for worker in reduction.workers:
            behind = last.get((worker, reduction.stage), offsets[worker] - 1) + 1
            if behind < offsets[worker + 1]:
                delays[behind] += network.all_reduce_launch_s
            for number in range(behind, offsets[worker + 1]):
                both = min(end_s[number], reduction.end_s) - max(start_s[number], reduction.start_s)
                delays[number] += network.all_reduce_share * max(0.0, both)
    return delays


def _local_ends(schedule: Schedule, end_s: Sequence[float]) -> list[float]:
    ends, number = [], 0
    for row in schedule.rows:
        number += len(row)
        ends.append(end_s[number - 1] if row else 0.0)
    return ends


def _bubble_follows(
    schedule: Schedule, worker: int, last: int, start_s: Sequence[float], end_s: Sequence[float]
) -> bool:
    """Whether the worker is idle between action ``last`` and the end of its work."""
    first_of_next = sum(map(len, schedule.rows[: worker + 1]))
    return any(start_s[number] > end_s[number - 1] for number in range(last + 1, first_of_next))
