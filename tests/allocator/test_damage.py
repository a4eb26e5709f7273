"""Damaged histories: whatever the columns contain, the plan gives an answer or one clear error."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from memtrace.allocator.history import AllocatorHistory
from memtrace.allocator.plan import plan_device
from memtrace.allocator.settings import AllocatorSettings
from memtrace.errors import MemtraceError
from memtrace.format.schema import EVENT_KINDS
from tests.allocator.test_golden import CASES, history

EXTREME_VALUES = (0, 1, -1, 511, 1 << 20, 1 << 21, 1 << 40, 1 << 62, -(1 << 62), (1 << 63) - 1)
ENTRY_COLUMNS = ("address", "size", "stream", "pool", "by_program", "kind")
STATE_COLUMNS = ("address", "size", "stream", "pool", "small", "expandable")


def damage(whole: AllocatorHistory, rng: random.Random) -> AllocatorHistory:
    """Return the history with one to five values changed, in the entries or in the final state."""
    for _ in range(rng.randint(1, 5)):
        name = rng.choice(ENTRY_COLUMNS)
        if rng.random() < 0.3 and len(whole.segments):
            name = rng.choice(STATE_COLUMNS)
            whole = replace(
                whole, segments=replace(whole.segments, **{name: change_value(getattr(whole.segments, name), rng)})
            )
        elif rng.random() < 0.2 and len(whole.blocks.address):
            name = rng.choice(("address", "size", "requested"))
            whole = replace(
                whole, blocks=replace(whole.blocks, **{name: change_value(getattr(whole.blocks, name), rng)})
            )
        else:
            whole = replace(whole, **{name: change_value(getattr(whole, name), rng)})
    return whole


def change_value(column: np.ndarray, rng: random.Random) -> np.ndarray:  # type: ignore[type-arg]
    column = column.copy()
    place = rng.randrange(len(column))
    if column.dtype == np.bool_:
        column[place] = not column[place]
    elif column.dtype == np.int8:
        column[place] = rng.randrange(-1, len(EVENT_KINDS))
    else:
        column[place] = rng.choice((*EXTREME_VALUES, int(column[rng.randrange(len(column))]), int(column[place]) + 512))
    return column


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
def test_damaged_histories_give_a_plan_or_a_clear_error(seed: int) -> None:
    rng = random.Random(seed)
    refused = 0
    for _ in range(40):
        whole = damage(history(rng.choice(CASES)), rng)
        try:
            plan = plan_device(whole, [AllocatorSettings.parse("expandable_segments:True")])
        except MemtraceError:
            refused += 1
            continue
        assert plan.replay is not None
        assert plan.predictions or plan.replay.reason
    assert refused < 40
