"""The memory curve against brute force: exact at its instants, and with the maximum of every interval."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import level_at, requested_bytes, reserved_bytes
from memtrace.analysis.timeline import compute_memory_curve
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace
from tests.builders import trace_of


def random_history(seed: int, num_events: int) -> Trace:
    """Allocations, frees and segments of a GPU in random order, with blocks older than the recording."""
    chance = random.Random(seed)
    events = []
    live, num_blocks = [], 0
    for row in range(num_events):
        kind = chance.choice(["alloc", "alloc", "free", "segment_alloc", "read", "baseline"])
        event = {"kind": kind, "device": "cuda:0", "time_ns": 10 * row, "size": chance.randrange(1, 10_000)}
        if kind == "segment_alloc":
            event |= {"address": row << 21, "size": 2 << 20}
        elif kind in ("free", "read"):
            if not live:
                continue
            event |= {"block_id": chance.choice(live), "size": None}
            if kind == "free":
                live.remove(event["block_id"])
        else:
            event |= {"block_id": num_blocks}
            live.append(num_blocks)
            num_blocks += 1
        events.append(event)
    return trace_of(
        events=[*events, {"kind": "alloc", "device": "cuda:0", "time_ns": 1 << 30, "size": 5, "block_id": num_blocks}]
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 150), st.integers(1, 80))
def test_a_curve_is_exact_at_its_instants_and_has_every_maximum(seed: int, num_events: int, max_instants: int) -> None:
    trace = random_history(seed, num_events)
    curve, table = compute_memory_curve(trace, "cuda:0", max_instants), blocks(trace)
    for place, row in enumerate(curve.row.tolist()):
        is_live = (table.alloc_event <= row) & ((table.free_event < 0) | (table.free_event > row))
        for code, name in enumerate(CATEGORIES):
            assert curve.by_category[name][place] == table.size[is_live & (table.category == code)].sum()
    rows = np.arange(-1, trace.num_rows("events"))
    for level, drawn in (
        (requested_bytes(trace, "cuda:0"), curve.requested),
        (reserved_bytes(trace, "cuda:0"), curve.reserved),
    ):
        if level is None:
            continue
        levels = level_at(level, rows)
        assert levels.max() == drawn.max()
        bounds = np.flatnonzero(np.isin(rows, curve.row))
        assert drawn.tolist() == levels[bounds].tolist()
        between = np.maximum.reduceat(levels, bounds)
        nearby = np.maximum(drawn, np.append(drawn[1:], drawn[-1:]))
        # The highest level of a bin is one of its instants; an interval between two of them has none above both ends,
        # unless a higher one of the same bin is drawn.
        width = max(1, -(-(curve.num_changes + 1) * 4 // max_instants))
        for place in np.flatnonzero(between > nearby).tolist():
            assert drawn[max(0, place - width) : place + width + 1].max() >= between[place]
    assert (np.diff(curve.row) > 0).all() and (np.diff(curve.time_ns) >= 0).all()


@pytest.mark.parametrize("max_instants", [10, 100, 1000])
def test_a_curve_has_about_as_many_instants_as_allowed(max_instants: int) -> None:
    curve = compute_memory_curve(random_history(1, 3000), "cuda:0", max_instants)
    assert len(curve.row) <= max_instants + 4
