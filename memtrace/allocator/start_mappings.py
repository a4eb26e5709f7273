"""Reconstructs which pages of expandable segments were mapped before the first entry of a history."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from memtrace.allocator.history import AllocatorHistory, RecordedSegments
from memtrace.allocator.rules import SMALL_SEGMENT_BYTES, Rules
from memtrace.allocator.virtual_ranges import RangeKey, walk_back


class StartMappings(NamedTuple):
    """Expandable segments before the first entry."""

    segments: RecordedSegments
    """The mapped parts."""
    range_starts: dict[RangeKey, tuple[int, ...]]
    """Lowest address seen in each virtual range that existed before the history, in rising order."""
    num_contradictions: int
    """Entries that contradict the mappings at the end of the history."""


def mappings_at_start(history: AllocatorHistory, rules: Rules) -> StartMappings:
    """Undo the map and unmap entries of a history, whose pools must be resolved (`resolve_pools`)."""
    ranges, num_contradictions = walk_back(history, rules)
    older = sorted((owner for owner in ranges if owner.first < 0), key=lambda owner: owner.low)
    starts: dict[RangeKey, tuple[int, ...]] = {}
    for owner in older:
        starts[owner.key] = (*starts.get(owner.key, ()), owner.low)
    parts = [(owner.key, *part) for owner in older for part in _contiguous_parts(owner.pages)]
    return StartMappings(_as_segments(parts), starts, num_contradictions)


def _contiguous_parts(pages: set[int]) -> Iterator[tuple[int, int]]:
    """Yield address and size of each run of adjacent pages."""
    start = end = -1
    for page in sorted(pages):
        if page != end:
            if start >= 0:
                yield start, end - start
            start = page
        end = page + SMALL_SEGMENT_BYTES
    if start >= 0:
        yield start, end - start


def _as_segments(parts: list[tuple[RangeKey, int, int]]) -> RecordedSegments:
    return RecordedSegments(
        address=np.array([address for _, address, _ in parts], np.int64),
        size=np.array([size for _, _, size in parts], np.int64),
        stream=np.array([key[0] for key, _, _ in parts], np.int64),
        pool=np.array([key[1] for key, _, _ in parts], np.int64),
        small=np.array([key[2] for key, _, _ in parts], np.bool_),
        expandable=np.ones(len(parts), np.bool_),
    )
