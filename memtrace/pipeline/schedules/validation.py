"""Validation of schedules: whether a table runs, and trains the model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from memtrace.errors import MemtraceError
from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD, WEIGHT_BACKWARD, Action
from memtrace.pipeline.schedules.dependencies import ResultProducers
from memtrace.pipeline.schedules.schedule import Schedule

_BACKWARDS = (
    [(BACKWARD, None)],
    [(BACKWARD, 0), (BACKWARD, 1)],
    [(INPUT_BACKWARD, None), (WEIGHT_BACKWARD, None)],
)


def validate_schedule(schedule: Schedule) -> Schedule:
    """Return the schedule if it is valid.

    Raises:
        MemtraceError: the schedule is invalid; the message lists the first faults.
    """
    faults = find_faults(schedule)
    if faults:
        more = f" (and {len(faults) - 5} more)" if len(faults) > 5 else ""
        raise MemtraceError(f"invalid schedule {schedule.name}: {'; '.join(faults[:5])}{more}")
    return schedule


def find_faults(schedule: Schedule) -> list[str]:
    """Find everything that is wrong with the table, one sentence per fault.

    Checks that slots ascend along every row (at most one action per slot); that each action is on the worker that holds
    its stage; that every micro-batch passes through one pipeline, and through every stage once forward and once
    backward (whole, in two halves, or split into I and W); that a schedule without a flush has one pipeline; that an
    action's inputs are computed in earlier slots; and that an overlapped action is a forward directly followed by a
    backward.
    """
    faults = list(_misplaced(schedule))
    # Dependencies are defined only in a table that has every action once.
    return faults or list(_incomplete(schedule)) or list(_too_early(schedule))


def _misplaced(schedule: Schedule) -> Iterator[str]:
    if schedule.asynchronous and len(schedule.placement) > 1:
        yield f"update {schedule.update} needs one pipeline, but there are {len(schedule.placement)}"
    for pipeline, workers in enumerate(schedule.placement):
        if len(workers) != schedule.num_stages or not set(workers) <= set(range(schedule.num_workers)):
            yield f"pipeline {pipeline} does not place {schedule.num_stages} stages on the workers"
            return
    for worker, (row, slots) in enumerate(zip(schedule.rows, schedule.slots, strict=True)):
        if any(later <= earlier for earlier, later in itertools.pairwise(slots)):
            yield f"worker {worker} has two actions in one slot, or slots out of order"
        for index, action in enumerate(row):
            yield from _faults_of(schedule, worker, action)
            following = row[index + 1] if index + 1 < len(row) else None
            if action.overlapped and (
                action.kind != FORWARD or following is None or following.kind == FORWARD or following.overlapped
            ):
                yield f"{action} on worker {worker} is not followed by a backward to overlap with"


def _faults_of(schedule: Schedule, worker: int, action: Action) -> Iterator[str]:
    if not (
        action.stage < schedule.num_stages
        and action.microbatch < schedule.num_microbatches
        and action.pipeline < len(schedule.placement)
    ):
        yield f"{action} on worker {worker}: no such stage, micro-batch or pipeline"
        return
    home = schedule.placement[action.pipeline][action.stage]
    if home != worker:
        yield f"{action} is on worker {worker}, but worker {home} holds its stage"


def _incomplete(schedule: Schedule) -> Iterator[str]:
    forwards: dict[tuple[int, int], int] = {}
    backwards: dict[tuple[int, int], list[tuple[str, int | None]]] = {}
    pipelines: dict[int, set[int]] = {}
    for action in schedule.actions():
        key = action.stage, action.microbatch
        pipelines.setdefault(action.microbatch, set()).add(action.pipeline)
        if action.kind == FORWARD:
            forwards[key] = forwards.get(key, 0) + 1
        else:
            backwards.setdefault(key, []).append((action.kind, action.half))
    for microbatch, taken in pipelines.items():
        if len(taken) > 1:
            yield f"micro-batch {microbatch} passes through {len(taken)} pipelines instead of one"
    for microbatch in range(schedule.num_microbatches):
        for stage in range(schedule.num_stages):
            key = stage, microbatch
            if forwards.get(key) != 1:
                yield f"micro-batch {microbatch} has {forwards.get(key, 0)} forwards on stage {stage} instead of one"
            parts = backwards.get(key, [])
            if sorted(parts, key=str) not in _BACKWARDS:
                named = ", ".join(kind for kind, _ in parts) or "no backward"
                yield f"micro-batch {microbatch} has {named} on stage {stage} instead of one whole backward"


def _too_early(schedule: Schedule) -> Iterator[str]:
    """Actions in a slot before that of an input; an overlapped unit begins and ends as one."""
    first: list[int] = []
    last: list[int] = []
    for row, slots in zip(schedule.rows, schedule.slots, strict=True):
        for index, (action, slot) in enumerate(zip(row, slots, strict=True)):
            behind = index > 0 and row[index - 1].overlapped
            first.append(slots[index - 1] if behind else slot)
            last.append(slots[index + 1] if action.overlapped else slot)
    producers = ResultProducers(schedule.rows)
    for number, action in enumerate(schedule.actions()):
        for needed in producers.inputs_of(action, schedule.num_stages):
            if last[needed] >= first[number]:
                yield f"{action} in slot {first[number]} needs a result that is ready after slot {last[needed]} only"
