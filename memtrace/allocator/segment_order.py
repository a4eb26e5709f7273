"""Infers in which order the segments older than a history were allocated.

torch 2.13 orders free blocks of equal size by the age of their segments, which no file records. The choices in the
history reveal it. Among free blocks of the best size in older segments, the allocator takes the one in the oldest
segment; and segments of equal size that are released together are released by age. A topological sort of all these
pairs gives an order; a replay under this order shows whether it is right.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from memtrace.allocator.blocks import Block, FreeList, Pool
from memtrace.allocator.device_capacity import CacheReleases
from memtrace.allocator.history import ALLOC, OOM, SEGMENT_FREE, AllocatorHistory, Int64s, resolve_pools
from memtrace.allocator.replay import PreparedHistory, run_history
from memtrace.allocator.rules import Rules
from memtrace.allocator.settings import AllocatorSettings
from memtrace.allocator.stream_waits import released_from_largest

_OrderedPairs = set[tuple[int, int]]  # (older, younger): places in `StartState.segment_order`


class _ObservingFreeList(FreeList):
    """A free list that takes the block of the history among equal ones, and notes which segments are older."""

    __slots__ = ("age_key_pairs", "expected_addresses")

    def __init__(
        self,
        expected_addresses: Iterator[int],
        age_key_pairs: _OrderedPairs,
        pool: Pool,
        stream: int,
        settings: AllocatorSettings,
        rules: Rules,
    ) -> None:
        super().__init__(pool, stream, settings, rules)
        self.expected_addresses = expected_addresses
        self.age_key_pairs = age_key_pairs

    def take(self, size: int) -> Block | None:
        """Remove and return a block as PyTorch does, except for the choice among blocks of equal size."""
        address = next(self.expected_addresses)
        block = super().take(size)
        if block is None:
            return None
        begin = bisect_left(self.entries, (block.size,))
        end = bisect_left(self.entries, (block.size + 1,))
        equal = [block, *(entry[2] for entry in self.entries[begin:end])]
        chosen = next((other for other in equal if other.address == address), None)
        if chosen is None:
            return block
        self.age_key_pairs.update((chosen.age_key, other.age_key) for other in equal if other.age_key != chosen.age_key)
        if chosen is not block:
            self.insert(block)
            self.remove(chosen)
        return chosen


def infer_segment_order(prepared: PreparedHistory) -> Int64s:
    """Return the rows of the start state's segments, oldest first; unchanged where the history contradicts itself."""
    history, start = prepared.history, prepared.start
    is_request = (history.kind == ALLOC) | (history.kind == OOM)
    expected = np.where(history.kind == ALLOC, history.address, -1)[is_request]
    age_key_pairs: _OrderedPairs = set()
    make_list = partial(_ObservingFreeList, iter(expected.tolist()), age_key_pairs)
    run_history(prepared, make_list=make_list)
    num_older = len(start.segments)
    ages = {(older >> 64, younger >> 64) for older, younger in age_key_pairs}
    pairs = {(a - 1, b - 1) for a, b in ages if 1 <= a <= num_older and 1 <= b <= num_older}
    order = _topological_order(num_older, pairs | _pairs_from_releases(prepared))
    return start.segment_order if order is None else start.segment_order[order]


def _pairs_from_releases(prepared: PreparedHistory) -> _OrderedPairs:
    """Return the pairs of older segments of equal size that were released one directly after the other."""
    history, start = prepared.history, prepared.start
    largest_first = _released_largest_first(history, prepared.releases)
    place = {int(start.segments.address[row]): i for i, row in enumerate(start.segment_order.tolist())}
    pairs: _OrderedPairs = set()
    rows = np.flatnonzero(history.kind == SEGMENT_FREE).tolist()
    for row, following in pairwise(rows):
        older, younger = place.pop(int(history.address[row]), None), place.get(int(history.address[following]))
        alike = history.size[row] == history.size[following] and history.stream[row] == history.stream[following]
        if older is not None and younger is not None and following == row + 1 and alike:
            pairs.add((younger, older) if {row, following} <= largest_first else (older, younger))
    return pairs


def _released_largest_first(history: AllocatorHistory, releases: CacheReleases) -> set[int]:
    """Return the entries of blocks released under `max_split_size_mb` from the end of the free list."""
    requests, rows = np.flatnonzero((history.kind == ALLOC) | (history.kind == OOM)), set[int]()
    by_allocator, pools = ~releases.by_program, resolve_pools(history)
    for first, end in zip(releases.first[by_allocator].tolist(), releases.end[by_allocator].tolist(), strict=True):
        served = int(requests[np.searchsorted(requests, end)])
        rows.update(released_from_largest(history, pools, first, end, served).tolist())
    return rows


def _topological_order(num_places: int, pairs: _OrderedPairs) -> list[int] | None:
    """Return an order that respects all pairs, else the lowest place first; None where the pairs form a cycle."""
    successors: dict[int, list[int]] = {}
    num_predecessors = [0] * num_places
    for older, younger in pairs:
        successors.setdefault(older, []).append(younger)
        num_predecessors[younger] += 1
    ready = [place for place in range(num_places) if not num_predecessors[place]]
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for younger in successors.get(place, []):
            num_predecessors[younger] -= 1
            if not num_predecessors[younger]:
                heapq.heappush(ready, younger)
    return order if len(order) == num_places else None
