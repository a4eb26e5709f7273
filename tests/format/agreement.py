"""Compares a window or a trace in parts with the whole trace, row by row."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak, level_at, live_after, requested_bytes, reserved_bytes
from memtrace.trace import Trace

JUDGED = ("category", "phase", "module", "stack", "op_name", "name", "size", "allocated_size", "address", "alloc_ns")


def num_head_rows(window: Trace, num_rows: int) -> int:
    """Rows of a window's events before its first own event."""
    return window.num_rows("events") - num_rows


def ids_of(trace: Trace) -> np.ndarray[Any, Any]:
    return trace.block_ids if trace.block_ids is not None else np.arange(len(blocks(trace)))


def described(trace: Trace, row: int) -> dict[int, tuple[Any, ...]]:
    """What is known of every block that is live after a row, by the block's id."""
    columns, ids = blocks(trace), ids_of(trace)
    live = [block for code in range(len(trace.devices)) for block in live_after(columns, code, row).tolist()]
    return {int(ids[block]): tuple(int(getattr(columns, name)[block]) for name in JUDGED) for block in live}


def assert_agrees(window: Trace, whole: Trace, first: int, end: int) -> None:
    """Assert that a window of the rows from ``first`` up to ``end`` of the whole agrees with it at every row."""
    head = num_head_rows(window, end - first)
    assert head >= 0
    for row in range(first - 1, end):
        assert described(window, row - first + head) == described(whole, row)
    rows = np.arange(first, end)
    for device in window.devices:
        expected = level_at(requested_bytes(whole, device), rows)
        assert level_at(requested_bytes(window, device), rows - first + head).tolist() == expected.tolist()
        before = level_at(requested_bytes(whole, device), np.array([first - 1]))
        assert find_peak(window, device).requested.bytes == max([*before, *expected])
        reserved = reserved_bytes(whole, device)
        if reserved is not None and (window_reserved := reserved_bytes(window, device)) is not None:
            assert level_at(window_reserved, rows - first + head).tolist() == level_at(reserved, rows).tolist()


def random_starts(random: Random, num_events: int) -> list[int]:
    return [0, *sorted(random.sample(range(1, num_events), min(num_events - 1, random.randint(0, 6))))]


def end_of_part(starts: list[int], num_events: int, row: int) -> int:
    """The end of the part in which the first row outside a window lies."""
    return next((start for start in starts if start > row), num_events)
