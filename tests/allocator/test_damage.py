"""Histories that no allocator wrote: whatever the columns hold, there is an answer or one clear error."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from memtrace.allocator.history import History
from memtrace.allocator.plan import plan_device
from memtrace.allocator.settings import Settings
from memtrace.errors import MemtraceError
from memtrace.format.schema import EVENT_KINDS
from tests.allocator.test_golden import CASES, history

WILD = (0, 1, -1, 511, 1 << 20, 1 << 21, 1 << 40, 1 << 62, -(1 << 62), (1 << 63) - 1)
ENTRY_COLUMNS = ("address", "size", "stream", "pool", "by_program", "kind")
STATE_COLUMNS = ("address", "size", "stream", "pool", "small", "expandable")


def damaged(whole: History, rng: random.Random) -> History:
    """One to five values changed, of the entries or of the state at the end."""
    for _ in range(rng.randint(1, 5)):
        name = rng.choice(ENTRY_COLUMNS)
        if rng.random() < 0.3 and len(whole.segments):
            name = rng.choice(STATE_COLUMNS)
            whole = replace(
                whole, segments=replace(whole.segments, **{name: changed(getattr(whole.segments, name), rng)})
            )
        elif rng.random() < 0.2 and len(whole.blocks.address):
            name = rng.choice(("address", "size", "requested"))
            whole = replace(whole, blocks=replace(whole.blocks, **{name: changed(getattr(whole.blocks, name), rng)}))
        else:
            whole = replace(whole, **{name: changed(getattr(whole, name), rng)})
    return whole


def changed(column: np.ndarray, rng: random.Random) -> np.ndarray:  # type: ignore[type-arg]
    column = column.copy()
    place = rng.randrange(len(column))
    if column.dtype == np.bool_:
        column[place] = not column[place]
    elif column.dtype == np.int8:
        column[place] = rng.randrange(-1, len(EVENT_KINDS))
    else:
        column[place] = rng.choice((*WILD, int(column[rng.randrange(len(column))]), int(column[place]) + 512))
    return column


@pytest.mark.parametrize("seed", range(8))
def test_damage_is_answered(seed: int) -> None:
    rng = random.Random(seed)
    refused = 0
    for _ in range(40):
        whole = damaged(history(rng.choice(CASES)), rng)
        try:
            plan = plan_device(whole, [Settings.parse("expandable_segments:True")])
        except MemtraceError:
            refused += 1
            continue
        assert plan.replay is not None
        assert plan.predictions or plan.replay.reason
    assert refused < 40
