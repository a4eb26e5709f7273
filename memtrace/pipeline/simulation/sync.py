"""When the gradients of a stage that lies on several workers are summed, and how long that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from memtrace.errors import MemtraceError
from memtrace.pipeline.costs import Network, StageCosts
from memtrace.pipeline.schedules.actions import BACKWARD, WEIGHT_BACKWARD
from memtrace.pipeline.schedules.schedule import Schedule

AFTER: Final = "after"  # when all local work is done
EAGER: Final = "eager"  # as soon as a stage's last backward is done
EAGER_OPT: Final = "eager-opt"  # eager only where a bubble follows on one of the workers, else after (Chimera)
MODES: Final = (AFTER, EAGER, EAGER_OPT)


@dataclass(frozen=True, slots=True)
class AllReduce:
    """One sum of gradients over all workers that hold the stage."""

    stage: int
    workers: tuple[int, ...]
    start_s: float
    end_s: float


def holders(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """The workers that hold a copy of the stage, each once."""
    return tuple(sorted({workers[stage] for workers in schedule.placement}))


def last_backwards(schedule: Schedule) -> dict[tuple[int, int], int]:
    """(worker, stage) -> number of the action after which the worker's gradient of that stage is whole.

    Actions are numbered worker by worker. A copy that no micro-batch passes is absent.
    """
    last: dict[tuple[int, int], int] = {}
    number = 0
    for worker, row in enumerate(schedule.rows):
        for action in row:
            if action.kind in (BACKWARD, WEIGHT_BACKWARD):
                last[worker, action.stage] = number
            number += 1
    return last


def all_reduces(
    schedule: Schedule,
    stages: Sequence[StageCosts],
    start_s: Sequence[float],
    end_s: Sequence[float],
    *,
    network: Network,
    width: int,
    mode: str,
) -> tuple[AllReduce, ...]:
    """The all-reduces of one step in the order of their starts, one at a time on every worker.

    They run beside the computation and take nothing from it; a copy of several pipelines on one worker counts
    once. Empty where no stage has a second copy. MemtraceError for an unknown mode.
    """
    if mode not in MODES:
        raise MemtraceError(f"unknown synchronisation {mode!r}: choose {', '.join(MODES)}")
    last = last_backwards(schedule)
    done = _local_ends(schedule, end_s)
    ready: list[tuple[float, int, tuple[int, ...]]] = []
    for stage in range(schedule.num_stages):
        workers = holders(schedule, stage)
        if len(workers) * width > 1:
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
    found = []
    for time, stage, workers in sorted(ready):
        start = max(time, *(free[worker] for worker in workers))
        end = start + network.all_reduce_s(stages[stage].gradient_bytes, len(workers) * width)
        for worker in workers:
            free[worker] = end
        found.append(AllReduce(stage, workers, start, end))
    return tuple(found)


def _local_ends(schedule: Schedule, end_s: Sequence[float]) -> list[float]:
    ends, number = [], 0
    for row in schedule.rows:
        number += len(row)
        ends.append(end_s[number - 1] if row else 0.0)
    return ends


def _bubble_follows(
    schedule: Schedule, worker: int, last: int, start_s: Sequence[float], end_s: Sequence[float]
) -> bool:
    """Whether the worker idles between action ``last`` and the end of its own work."""
    first_of_next = sum(map(len, schedule.rows[: worker + 1]))
    return any(start_s[n] > end_s[n - 1] for n in range(last + 1, first_of_next))
