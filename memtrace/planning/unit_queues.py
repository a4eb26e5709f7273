"""The order in which policies take idle models: each queue holds the models whose next shard unit is eligible."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol


class UnitQueue(Protocol):
    """Idle models; ``take`` removes the one that runs next."""

    def __len__(self) -> int: ...

    def add(self, model: int, remaining_s: float) -> None:
        """Add an idle model, which has ``remaining_s`` seconds to compute."""

    def take(self) -> int:
        """Remove and return the model that the policy chooses."""

    def prefers(self, model: int, remaining_s: float) -> bool:
        """Return whether the policy chooses ``model``, which a device runs now, before all models of the queue."""


class LongestRemainingFirst:
    """Sharded-LRTF; of equal models the one that became idle first, and before it the one on the device."""

    def __init__(self, seed: int) -> None:
        del seed
        self._heap: list[tuple[float, int, int]] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, model: int, remaining_s: float) -> None:
        """See ``UnitQueue.add``."""
        self._num_added += 1
        heapq.heappush(self._heap, (-remaining_s, self._num_added, model))

    def take(self) -> int:
        """See ``UnitQueue.take``."""
        return heapq.heappop(self._heap)[2]

    def prefers(self, model: int, remaining_s: float) -> bool:
        """See ``UnitQueue.prefers``."""
        del model
        return remaining_s >= -self._heap[0][0]


class FirstComeFirstServed:
    """The order in which models were given, for policies that finish one model before the next."""

    def __init__(self, seed: int) -> None:
        del seed
        self._models: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._models)

    def add(self, model: int, remaining_s: float) -> None:
        """See ``UnitQueue.add``."""
        del remaining_s
        # A model that has begun has a place before those that have not.
        if self._models and model < self._models[0]:
            self._models.appendleft(model)
        else:
            self._models.append(model)

    def take(self) -> int:
        """See ``UnitQueue.take``."""
        return self._models.popleft()

    def prefers(self, model: int, remaining_s: float) -> bool:
        """See ``UnitQueue.prefers``."""
        del model, remaining_s
        return True


class RandomOrder:
    """Any of the idle models, each with the same probability."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._models: list[int] = []

    def __len__(self) -> int:
        return len(self._models)

    def add(self, model: int, remaining_s: float) -> None:
        """See ``UnitQueue.add``."""
        del remaining_s
        self._models.append(model)

    def take(self) -> int:
        """See ``UnitQueue.take``."""
        place = self._random.randrange(len(self._models))
        self._models[place], self._models[-1] = self._models[-1], self._models[place]
        return self._models.pop()

    def prefers(self, model: int, remaining_s: float) -> bool:
        """See ``UnitQueue.prefers``."""
        del model, remaining_s
        return self._random.randrange(len(self._models) + 1) == 0


QUEUES: Final[Mapping[str, Callable[[int], UnitQueue]]] = {
    "sharded-lrtf": LongestRemainingFirst,
    "random": RandomOrder,
    "task-parallel": FirstComeFirstServed,
    "model-parallel": FirstComeFirstServed,
}
"""For each policy the queue of its idle models; the argument is the seed."""
