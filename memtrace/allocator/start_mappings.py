"""Reconstructs which pages of expandable segments were mapped before the first entry of a history."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np

from memtrace.allocator.history import (
    ALLOC,
    FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    AllocatorHistory,
    Bools,
    Int64s,
    RecordedSegments,
)
from memtrace.allocator.rules import SMALL_SEGMENT_BYTES, Rules

RangeKey = tuple[int, int, bool]  # stream, pool, small
_MAX_RANGE_DISTANCE_BYTES: Final = 1 << 30
"""Addresses closer than this lie in one virtual range, because a range is longer than the device's memory."""


class StartMappings(NamedTuple):
    """Expandable segments before the first entry."""

    segments: RecordedSegments
    """The mapped parts."""
    range_starts: dict[RangeKey, int]
    """Lowest address seen in each virtual range that existed before the history."""
    num_contradictions: int
    """Entries that contradict the mappings at the end of the history."""


def mappings_at_start(history: AllocatorHistory, rules: Rules) -> StartMappings:
    """Undo the map and unmap entries of a history, whose pools must be resolved (`resolve_pools`)."""
    pages: dict[RangeKey, set[int]] = {}
    range_starts: dict[RangeKey, int] = {}
    final = history.segments.take(history.segments.expandable)
    for key, address, size in _rows(final):
        pages.setdefault(key, set()).update(_page_addresses(address, size))
    num_contradictions = 0
    requests, owner = _requests_by_address(history, rules), _owner_ids(history.stream, history.pool)
    rows = np.flatnonzero((history.kind == SEGMENT_MAP) | (history.kind == SEGMENT_UNMAP))
    for i in reversed(rows.tolist()):
        address, size = int(history.address[i]), int(history.size[i])
        small = requests.is_small(address, int(owner[i])) or size % history.settings.large_segment_bytes != 0
        key = (int(history.stream[i]), int(history.pool[i]), small)
        mapped, changed = pages.setdefault(key, set()), _page_addresses(address, size)
        if history.kind[i] == SEGMENT_MAP:
            num_contradictions += not changed <= mapped
            mapped -= changed
            range_starts[key] = min(address, range_starts.get(key, address))
            if not mapped:  # the range was created here: the allocator releases empty ranges
                del range_starts[key]
        else:
            num_contradictions += not changed.isdisjoint(mapped)
            mapped |= changed
    parts = [(key, *part) for key, mapped in pages.items() for part in _contiguous_parts(mapped)]
    return StartMappings(_as_segments(parts), range_starts, num_contradictions)


def _page_addresses(address: int, size: int) -> set[int]:
    return set(range(address, address + size, SMALL_SEGMENT_BYTES))


def _rows(segments: RecordedSegments) -> Iterator[tuple[RangeKey, int, int]]:
    for i in range(len(segments)):
        key = (int(segments.stream[i]), int(segments.pool[i]), bool(segments.small[i]))
        yield key, int(segments.address[i]), int(segments.size[i])


@dataclass(frozen=True, slots=True)
class _RequestsByAddress:
    """Requests with the pool that served them: pages that hold a small request belong to the small pool."""

    address: Int64s
    small: Bools
    owner: Int64s
    """Stream and pool as one number."""

    def is_small(self, address: int, owner: int) -> bool | None:
        """Return whether the request nearest to an address was small; None: no request in the same virtual range."""
        rows = np.flatnonzero((self.owner == owner) & (np.abs(self.address - address) < _MAX_RANGE_DISTANCE_BYTES))
        if not len(rows):
            return None
        return bool(self.small[rows[np.argmin(np.abs(self.address[rows] - address))]])


def _requests_by_address(history: AllocatorHistory, rules: Rules) -> _RequestsByAddress:
    rows = np.flatnonzero((history.kind == ALLOC) | (history.kind == FREE))
    final = history.blocks
    segment = history.segments.containing(final.address)
    address = np.concatenate([history.address[rows], final.address])
    size = np.concatenate([history.size[rows], final.requested])
    stream = np.concatenate([history.stream[rows], np.append(history.segments.stream, -1)[segment]])
    pool = np.concatenate([history.pool[rows], np.append(history.segments.pool, -1)[segment]])
    small = history.settings.round_sizes(size, rules) <= rules.small_request_bytes
    return _RequestsByAddress(address, small, _owner_ids(stream, pool))


def _owner_ids(stream: Int64s, pool: Int64s) -> Int64s:
    return stream * 1_000_003 + pool


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
