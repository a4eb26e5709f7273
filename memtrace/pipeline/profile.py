"""What of a schedule's memory does not depend on time: all that each worker holds together at some moment.

Every worker keeps the order of its row, so what it holds after how many actions is known without durations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, INPUT_BACKWARD
from memtrace.pipeline.schedules.schedule import Schedule
from memtrace.pipeline.simulation.memory import PAPER, MemoryModel, input_comes
from memtrace.pipeline.simulation.versions import version_changes

Floats = npt.NDArray[np.float64]

PARTS: Final = (
    "activation", "weight_activation", "input", "unsaved_output", "output", "forward_temporary", "backward_temporary",
    "input_backward_temporary", "first_gradients", "parameter", "gradient", "optimizer", "optimizer_temporary",
    "largest_optimizer_temporary",
)  # fmt: skip
"""What the bytes of a stage are made of; as the fields of StageCosts, but for ``first_gradients``: by how much the
temporaries of the backward that allocates gradients exceed those of the others."""
_PART: Final = {name: number for number, name in enumerate(PARTS)}


@dataclass(frozen=True)
class WorkerProfile:
    """What one worker holds."""

    stages: tuple[int, ...]
    """The stages it holds, each once, in rising order."""
    moments: Floats
    """How many of each part it holds: entry [moment, stage, part], by places in ``stages`` and ``PARTS``. No moment
    has less of everything than another."""


def profiles(
    schedule: Schedule,
    model: MemoryModel = PAPER,
    *,
    recompute: bool = False,
    parts: Sequence[str] = PARTS,
) -> list[WorkerProfile]:
    """The profile of every worker; parts that are not among ``parts`` have no bytes and count as none."""
    absent = [_PART[name] for name in PARTS if name not in parts]
    return [_profile(schedule, worker, model, recompute, absent) for worker in range(schedule.num_workers)]


def _profile(
    schedule: Schedule, worker: int, model: MemoryModel, recompute: bool, absent: Sequence[int]
) -> WorkerProfile:
    held = {stage: len(pipes) for (holder, stage), pipes in schedule.replicas.items() if holder == worker}
    stages = tuple(sorted(held))
    row = schedule.rows[worker]
    at_start, at_end = (np.zeros((len(row), len(stages), len(PARTS))) for _ in range(2))
    version_start, version_end = version_changes(schedule, worker)
    with_gradients: set[tuple[int, int]] = set()
    order = np.arange(2 * len(row))
    for index, action in enumerate(row):
        start, end = (changes[index, stages.index(action.stage)] for changes in (at_start, at_end))
        share = 1.0 if action.half is None else 0.5
        boundaries = {
            "input": float(recompute or (model.boundaries and input_comes(schedule, action))),
            "unsaved_output": float(model.boundaries and not recompute),
        }
        gradient = share * model.boundaries
        if action.kind == FORWARD:
            start[_PART["activation"]] += 1
            end[_PART["activation"]] -= recompute
            _add(start, boundaries, 1)
            _for_now(start, end, "forward_temporary", 1)
        else:
            _for_now(
                start,
                end,
                "input_backward_temporary" if action.kind == INPUT_BACKWARD else "backward_temporary",
                1 if action.kind == INPUT_BACKWARD else share,
            )
        if action.kind in (BACKWARD, INPUT_BACKWARD):
            start[_PART["activation"]] += share * recompute
            end[_PART["activation"]] -= share
            _add(end, boundaries, -share)
            start[_PART["output"]] += gradient
        if action.kind == INPUT_BACKWARD:
            end[_PART["weight_activation"]] += share
        elif action.kind != FORWARD:
            end[_PART["output"]] -= gradient
            end[_PART["weight_activation"]] -= share if action.kind != BACKWARD else 0
            copy = action.stage, action.pipeline
            if model.fresh_gradients and copy not in with_gradients:
                with_gradients.add(copy)
                _for_now(start, end, "first_gradients", 1)
                end[_PART["gradient"]] += 1
        start[_PART["parameter"]] += version_start[index]
        end[_PART["parameter"]] += version_end[index]
        if action.overlapped:  # Both start before the first ends.
            order[[2 * index + 1, 2 * index + 2]] = order[[2 * index + 2, 2 * index + 1]]
    always = np.zeros((len(stages), len(PARTS)))
    for place, stage in enumerate(stages):
        always[place, [_PART["parameter"], _PART["optimizer"]]] = held[stage]
        always[place, _PART["gradient"]] = 0 if model.fresh_gradients else held[stage]
    changes = np.stack([at_start, at_end], axis=1).reshape(2 * len(row), *always.shape)[order]
    moments = always + np.concatenate([np.zeros((1, *always.shape)), np.cumsum(changes, axis=0)])
    if model.optimizer_step:
        moments = np.concatenate([moments, _optimizer_moments(moments[-1], [held[stage] for stage in stages])])
    moments[:, :, absent] = 0
    flat = _undominated(np.unique(moments.reshape(len(moments), -1), axis=0))
    return WorkerProfile(stages, flat.reshape(-1, *always.shape))


def _add(change: Floats, parts: dict[str, float], times: float) -> None:
    for name, count in parts.items():
        change[_PART[name]] += times * count


def _for_now(start: Floats, end: Floats, part: str, count: float) -> None:
    """A part that is there during one action only."""
    start[_PART[part]] += count
    end[_PART[part]] -= count


def _optimizer_moments(last: Floats, copies: Sequence[int]) -> Floats:
    """The optimizer's step once for each stage whose largest parameter it may be at."""
    moments = np.repeat(last[None], len(copies), axis=0)
    moments[:, :, _PART["optimizer_temporary"]] = copies
    for place in range(len(copies)):
        moments[place, place, _PART["largest_optimizer_temporary"]] = 1
    return moments


def _undominated(points: Floats) -> Floats:
    """The points that no other exceeds or equals in every coordinate."""
    kept = points[:0]
    for point in points[np.argsort(-points.sum(axis=1), kind="stable")]:
        if not (kept >= point).all(axis=1).any():
            kept = np.append(kept, point[None], axis=0)
    return kept
