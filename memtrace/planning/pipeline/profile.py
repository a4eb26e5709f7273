"""What of a schedule's memory does not depend on time: how much each worker keeps at once, at the worst.

Every worker keeps the order of its row, so how many micro-batches are in flight is known without durations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtrace.planning.pipeline.actions import BACKWARD, FORWARD, INPUT_BACKWARD
from memtrace.planning.pipeline.table import Schedule
from memtrace.planning.pipeline.versions import version_changes

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class WorkerProfile:
    """What one worker holds."""

    stages: tuple[int, ...]
    """The stages it holds, each once, in rising order."""
    copies: tuple[int, ...]
    """Parameter copies of each stage: pipelines, times the most versions kept at once."""
    replicas: tuple[int, ...]
    """Pipelines through this worker for each stage: copies of gradients and optimizer state."""
    load: Floats
    """The worst moments, one row each: for every stage the micro-batches whose activations are kept, then for
    every stage those of which only what weight gradients need is kept. No row is below another everywhere."""


def profiles(schedule: Schedule) -> list[WorkerProfile]:
    """The profile of every worker."""
    return [_profile(schedule, worker) for worker in range(schedule.num_workers)]


def _profile(schedule: Schedule, worker: int) -> WorkerProfile:
    held = {stage: pipes for (holder, stage), pipes in schedule.replicas.items() if holder == worker}
    stages = tuple(sorted(held))
    column = {stage: index for index, stage in enumerate(stages)}
    row = schedule.rows[worker]
    deltas = np.zeros((2, len(row) + 1, 2 * len(stages)))
    for index, action in enumerate(row):
        whole, weight = column[action.stage], len(stages) + column[action.stage]
        share = 1.0 if action.half is None else 0.5
        if action.kind == FORWARD:
            deltas[0, index, whole] = 1
        elif action.kind in (BACKWARD, INPUT_BACKWARD):
            deltas[1, index, whole] = -share
            deltas[1, index, weight] = share if action.kind == INPUT_BACKWARD else 0
        else:
            deltas[1, index, weight] = -share
    # Of an overlapped pair the second starts before the first ends; a forward frees nothing at its end.
    starts, ends = np.cumsum(deltas[0], axis=0), np.cumsum(deltas[1], axis=0)
    before = np.concatenate([np.zeros((1, 2 * len(stages))), ends[:-1]])
    starts_change, ends_change = version_changes(schedule, worker)
    versions = 1 + max(
        int((np.cumsum(starts_change + ends_change) - ends_change).max(initial=0)),
        int(np.cumsum(starts_change + ends_change).max(initial=0)),
    )
    replicas = tuple(len(held[stage]) for stage in stages)
    return WorkerProfile(
        stages,
        tuple(count * versions for count in replicas),
        replicas,
        _undominated(np.unique(starts + before, axis=0)),
    )


def _undominated(points: Floats) -> Floats:
    """The points that no other exceeds or equals in every coordinate."""
    kept: list[Floats] = []
    for point in points[np.argsort(-points.sum(axis=1), kind="stable")]:
        if not any(np.all(other >= point) for other in kept):
            kept.append(point)
    return np.array(kept)
