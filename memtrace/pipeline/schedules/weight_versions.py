"""Weight versions of schedules without a flush: which version a micro-batch uses, and when a stage is updated.

The only home of these rules: the memory rules count the versions, and ``examples/pipeline/executor.py`` keeps them.

- PipeDream (weight stashing): every backward updates its stage. A micro-batch uses the version that is the newest one
  when its forward begins, for its backward as well.
- PipeDream-2BW (double-buffered weights): every ``update_every`` micro-batches are a batch with one update,
  W(t+1) = W(t) - lr * gradient(W(t-1)). Batch t uses version max(t - 1, 0), and its end creates version t + 1. A stage
  therefore keeps its two newest versions at any time, also between two micro-batches that use the older one.

Sources: PipeDream (Narayanan et al., SOSP 2019, section 3.3), PipeDream-2BW (Narayanan et al., ICML 2021, section 3.1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from memtrace.pipeline.schedules.actions import BACKWARD, FORWARD, WEIGHT_BACKWARD, Action
from memtrace.pipeline.schedules.schedule import FLUSH, STASH, TWO_BUFFERED, Schedule


def version_used(microbatch: int, update_every: int) -> int:
    """The version of the weights that micro-batch ``microbatch`` (from 0) uses under PipeDream-2BW.

    The paper's max(floor((k - 1) / m) - 1, 0) with k counted from 1.
    """
    return max(microbatch // update_every - 1, 0)


def microbatches_per_update(schedule: Schedule) -> int:
    """Micro-batches whose gradients one update of the weights is made of.

    The whole step for a schedule with a flush, 1 for PipeDream.
    """
    if schedule.update == STASH:
        return 1
    return schedule.update_every or schedule.num_microbatches


@dataclass(frozen=True, slots=True)
class VersionChanges:
    """The weight versions of one worker's stages. Lists have one entry per action of the worker."""

    at_start: list[int]
    """Change of the number of versions of the action's stage when the action starts."""
    at_end: list[int]
    """The same when the action, and the update that follows it, have ended."""
    is_update: list[bool]
    """Whether the end of the action completes the gradients of a batch, so that the weights are updated."""
    begins_batch: list[bool]
    """Whether the action is the first one to compute weight gradients of a batch on its copy of the stage."""


def resident_versions(schedule: Schedule) -> int:
    """Weight versions of every stage that exist between two steps."""
    return 2 if schedule.update == TWO_BUFFERED else 1


def version_changes(schedule: Schedule, worker: int) -> VersionChanges:
    """How the actions of ``worker`` change the number of weight versions that it keeps in the steady state.

    With a flush and under PipeDream-2BW the number is constant. Under PipeDream a version is kept while it is the
    newest or a micro-batch in flight began with it.
    """
    row = schedule.rows[worker]
    is_update = _updates(row, schedule)
    at_start, at_end = [0] * len(row), [0] * len(row)
    if schedule.update == STASH:
        stages = {action.stage: _Stash() for action in row}
        for index, action in enumerate(row):
            stash = stages[action.stage]
            before = stash.num_kept
            if action.kind == FORWARD:
                stash.begin(action.microbatch)
                at_start[index] = stash.num_kept - before
            elif is_update[index]:
                stash.update(action.microbatch)
                at_end[index] = stash.num_kept - before
    return VersionChanges(at_start, at_end, is_update, _batch_begins(row, is_update))


def _updates(row: Sequence[Action], schedule: Schedule) -> list[bool]:
    """Whether the end of each action completes the gradients of a batch; with a flush the end of the step does."""
    updates = []
    num_backwards: Counter[int] = Counter()
    every = microbatches_per_update(schedule)
    for action in row:
        completes = action.kind in (BACKWARD, WEIGHT_BACKWARD) and action.half != 0
        num_backwards[action.stage] += completes
        updates.append(schedule.update != FLUSH and completes and num_backwards[action.stage] % every == 0)
    return updates


def _batch_begins(row: Sequence[Action], is_update: Sequence[bool]) -> list[bool]:
    begins: list[bool] = []
    has_gradients: set[tuple[int, int]] = set()
    for action, updates in zip(row, is_update, strict=True):
        copy = action.stage, action.pipeline
        begins.append(action.kind in (BACKWARD, WEIGHT_BACKWARD) and copy not in has_gradients)
        if begins[-1]:
            has_gradients.add(copy)
        if updates:
            has_gradients = {other for other in has_gradients if other[0] != action.stage}
    return begins


class _Stash:
    """The versions of one stage under PipeDream."""

    def __init__(self) -> None:
        self._newest = 0
        self._version_of: dict[int, int] = {}

    @property
    def num_kept(self) -> int:
        return len({self._newest, *self._version_of.values()})

    def begin(self, microbatch: int) -> None:
        self._version_of[microbatch] = self._newest

    def update(self, microbatch: int) -> None:
        del self._version_of[microbatch]
        self._newest += 1
