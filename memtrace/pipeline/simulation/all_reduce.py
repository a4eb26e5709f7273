"""All-reduce of the gradients of stages that several workers hold: when it starts and how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Network, StageCosts
from memtrace.pipeline.schedules.actions import BACKWARD, WEIGHT_BACKWARD
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


def schedule_all_reduces(
    schedule: Schedule,
    stages: Sequence[StageCosts],
    start_s: Sequence[float],
    end_s: Sequence[float],
    *,
    network: Network,
    data_parallel: int,
    mode: str,
) -> tuple[AllReduce, ...]:
    """The all-reduces of one step by start time, at most one at a time on every worker; empty without second copies.

    All-reduces overlap computation without slowing it down. Copies of a stage on one worker count as one replica.

    Raises:
        MemtraceError: the mode is unknown.
    """
    if mode not in SYNC_MODES:
        raise MemtraceError(f"unknown synchronization {mode!r}; choose one of {', '.join(SYNC_MODES)}")
    last = last_backward_actions(schedule)
    done = _local_ends(schedule, end_s)
    ready: list[tuple[float, int, tuple[int, ...]]] = []
    for stage in range(schedule.num_stages):
        workers = stage_holders(schedule, stage)
        if len(workers) * data_parallel > 1:
            numbers = [last.get((worker, stage)) for worker in workers]
            eager = mode == EAGER or (
                mode == EAGER_OPT
                and any(
                    n is None or _bubble_follows(schedule, w, n, start_s, end_s)
                    for w, n in zip(workers, numbers, strict=True)
                )
            )
            ends = [
                (0.0 if n is None else end_s[n]) if eager else done[w] for w, n in zip(workers, numbers, strict=True)
            ]
            ready.append((max(ends), stage, workers))
    free = [0.0] * schedule.num_workers
    reductions = []
    for time, stage, workers in sorted(ready):
        start = max(time, *(free[worker] for worker in workers))
        end = start + network.all_reduce_s(stages[stage].gradient_bytes, len(workers) * data_parallel)
        for worker in workers:
            free[worker] = end
        reductions.append(AllReduce(stage, workers, start, end))
    return tuple(reductions)


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
    return any(start_s[n] > end_s[n - 1] for n in range(last + 1, first_of_next))
