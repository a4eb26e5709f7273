"""Which combinations of memory components can be the peak of a worker, whatever the stages cost.

Every worker runs its actions in the order of its row, so what it holds after n actions does not depend on durations.
The partition search multiplies these counts with the bytes of every possible stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memtrace.pipeline.memory_rules import (
    COMPONENTS,
    COST_FIELDS,
    PAPER,
    WHOLE,
    MemoryModel,
    change_order,
    worker_changes,
)
from memtrace.pipeline.schedules.schedule import Schedule

Floats = npt.NDArray[np.float64]

_FIELD_OF_COMPONENT = np.array(
    [[component.costs_field == field for field in COST_FIELDS] for component in COMPONENTS], dtype=np.int64
)
"""``[component, field]``: 1 where the component has the bytes of the field."""


@dataclass(frozen=True)
class PeakMoments:
    """The moments at which one worker may reach its peak."""

    stages: tuple[int, ...]
    """The stages that the worker holds, ascending."""
    counts: Floats
    """``[moment, stage, field]``: how many times the worker holds the bytes of each of ``COST_FIELDS`` for each of
    ``stages``. No moment exceeds another one in every count."""


def find_peak_moments(
    schedule: Schedule,
    model: MemoryModel = PAPER,
    *,
    recompute: bool = False,
    fields: Sequence[str] = COST_FIELDS,
) -> list[PeakMoments]:
    """Find the moments at which every worker may reach its peak.

    Args:
        schedule: the schedule.
        model: what counts as memory.
        recompute: stages keep only their inputs and repeat their forward before the backward.
        fields: the cost fields that are not zero for every layer; the others are ignored.
    """
    ignored = [column for column, field in enumerate(COST_FIELDS) if field not in fields]
    return [_worker_moments(schedule, worker, model, recompute, ignored) for worker in range(schedule.num_workers)]


def _worker_moments(
    schedule: Schedule, worker: int, model: MemoryModel, recompute: bool, ignored: Sequence[int]
) -> PeakMoments:
    row = schedule.rows[worker]
    changes = worker_changes(schedule, worker, model, recompute=recompute)
    shape = len(changes.stages), len(COST_FIELDS)
    deltas = np.zeros((2 * len(row), *shape), dtype=np.int64)
    of_action = np.stack([changes.at_start, changes.at_end], axis=1).reshape(2 * len(row), len(COMPONENTS))
    deltas[np.arange(2 * len(row)), np.repeat(changes.stage_of_action, 2)] = of_action @ _FIELD_OF_COMPONENT
    resident = (changes.resident @ _FIELD_OF_COMPONENT)[None]
    order = change_order(row)
    levels = resident + np.cumsum(deltas[order], axis=0)
    during_updates = levels[np.argsort(order)[2 * changes.updates + 1]]
    places = changes.stage_of_action[changes.updates]
    during_updates[np.arange(len(places)), places] += changes.during_updates @ _FIELD_OF_COMPONENT
    counts = np.concatenate(
        [
            resident,
            levels,
            during_updates,
            (changes.output_merge @ _FIELD_OF_COMPONENT)[None],
            changes.optimizer_steps @ _FIELD_OF_COMPONENT,
        ]
    ) / WHOLE  # fmt: skip
    counts[:, :, ignored] = 0
    largest = _undominated(np.unique(counts.reshape(len(counts), -1), axis=0))
    return PeakMoments(changes.stages, largest.reshape(-1, *shape))


def _undominated(points: Floats) -> Floats:
    """The points that no other point equals or exceeds in every coordinate."""
    kept = points[:0]
    for point in points[np.argsort(-points.sum(axis=1), kind="stable")]:
        if not (kept >= point).all(axis=1).any():
            kept = np.append(kept, point[None], axis=0)
    return kept
