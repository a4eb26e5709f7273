"""How many versions of its weights a worker keeps under schedules without a flush."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memtrace.pipeline.schedules.actions import FORWARD, INPUT_BACKWARD
from memtrace.pipeline.schedules.schedule import STASH, TWO_BUFFERED, Schedule

Integers = npt.NDArray[np.int64]


def version_used(microbatch: int, update_every: int) -> int:
    """The version of the weights that micro-batch ``microbatch`` (from 0) sees under PipeDream-2BW.

    The paper's max(floor((k - 1) / m) - 1, 0) with k counted from 1. Version t + 1 is made when batch t,
    which saw version max(t - 1, 0), is done.
    """
    return max(microbatch // update_every - 1, 0)


def version_changes(schedule: Schedule, worker: int) -> tuple[Integers, Integers]:
    """By how many weight versions of its stage each action of ``worker`` changes what must be kept.

    Returns changes at the start and at the end of every action, 0 everywhere for schedules with a flush. A
    version is kept while it is the newest or a micro-batch in flight began with it.
    """
    row = schedule.rows[worker]
    at_start = np.zeros(len(row), dtype=np.int64)
    at_end = np.zeros(len(row), dtype=np.int64)
    if not schedule.asynchronous:
        return at_start, at_end
    newest: dict[int, int] = {}
    done: dict[int, int] = {}
    began_with: dict[tuple[int, int], int] = {}
    in_use: dict[int, dict[int, int]] = {}
    for index, action in enumerate(row):
        stage, microbatch = action.stage, action.microbatch
        users = in_use.setdefault(stage, {})
        before = _kept(newest.setdefault(stage, 0), users)
        if action.kind == FORWARD:
            version = newest[stage] if schedule.update == STASH else _two_buffered(schedule, microbatch)
            began_with[stage, microbatch] = version
            users[version] = users.get(version, 0) + 1
            at_start[index] = _kept(newest[stage], users) - before
        elif action.kind != INPUT_BACKWARD and action.half != 0:
            version = began_with[stage, microbatch]
            users[version] -= 1
            if not users[version]:
                del users[version]
            done[stage] = done.get(stage, 0) + 1
            newest[stage] = _newest(schedule, done[stage])
            at_end[index] = _kept(newest[stage], users) - before
    return at_start, at_end


def _kept(newest: int, users: dict[int, int]) -> int:
    return len(users) + (newest not in users)


def _two_buffered(schedule: Schedule, microbatch: int) -> int:
    assert schedule.update == TWO_BUFFERED and schedule.update_every is not None
    return version_used(microbatch, schedule.update_every)


def _newest(schedule: Schedule, done: int) -> int:
    """The newest version after ``done`` backwards of a stage."""
    return done if schedule.update_every is None else done // schedule.update_every
