"""In which order segments older than a history were taken from the device.

torch 2.13 orders blocks of one size by the age of their segments, which no file tells. The choices in the
history do: where several free blocks of the best size lie in older segments, the one taken lies in the oldest
of them; and equal segments given back together leave in the order of their age. All such pairs together,
sorted, give an order; a replay by it shows whether it is right.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from memtrace.allocator.blocks import Block, FreeList, Pool
from memtrace.allocator.history import ALLOC, OOM, SEGMENT_FREE, History, Int64s
from memtrace.allocator.layout import lay_out
from memtrace.allocator.program import run
from memtrace.allocator.replay import Prepared, fresh_allocator
from memtrace.allocator.rules import Rules
from memtrace.allocator.settings import Settings
from memtrace.allocator.start_state import StartState

Pairs = set[tuple[int, int]]  # (earlier, later): places in `StartState.created`


class _Watched(FreeList):
    """A list that gives, among blocks of one size, the one the history took, and notes what that tells."""

    __slots__ = ("expected", "pairs")

    def __init__(
        self, expected: Iterator[int], pairs: Pairs, pool: Pool, stream: int, settings: Settings, rules: Rules
    ) -> None:
        super().__init__(pool, stream, settings, rules)
        self.expected = expected
        self.pairs = pairs

    def take(self, size: int) -> Block | None:
        """As torch would, but for the choice among equal blocks."""
        address = next(self.expected)
        block = super().take(size)
        if block is None:
            return None
        begin = bisect_left(self.entries, (block.size,))
        end = bisect_left(self.entries, (block.size + 1,))
        equal = [block, *(entry[2] for entry in self.entries[begin:end])]
        chosen = next((other for other in equal if other.address == address), None)
        if chosen is None:
            return block
        self.pairs.update((chosen.rank, other.rank) for other in equal if other.rank != chosen.rank)
        if chosen is not block:
            self.insert(block)
            self.remove(chosen)
        return chosen


def creation_order(prepared: Prepared) -> Int64s:
    """Rows of the start state's segments, oldest first, as the history tells; as they were where it
    contradicts itself."""
    history, start = prepared.history, prepared.start
    requests = (history.kind == ALLOC) | (history.kind == OOM)
    expected = np.where(history.kind == ALLOC, history.address, -1)[requests]
    pairs: Pairs = set()
    allocator = fresh_allocator(prepared, make_list=partial(_Watched, iter(expected.tolist()), pairs))
    run(prepared.program, allocator, lay_out(allocator, start))
    older = len(start.segments)
    places = {(a >> 64, b >> 64) for a, b in pairs}
    edges = {(a - 1, b - 1) for a, b in places if 1 <= a <= older and 1 <= b <= older}
    order = _sorted_places(older, edges | _release_pairs(history, start))
    return start.created if order is None else start.created[order]


def _release_pairs(history: History, start: StartState) -> Pairs:
    """Older segments of one size that left one right after the other."""
    place = {int(start.segments.address[row]): i for i, row in enumerate(start.created.tolist())}
    pairs: Pairs = set()
    rows = np.flatnonzero(history.kind == SEGMENT_FREE).tolist()
    for row, following in pairwise(rows):
        here, there = place.pop(int(history.address[row]), None), place.get(int(history.address[following]))
        alike = history.size[row] == history.size[following] and history.stream[row] == history.stream[following]
        if here is not None and there is not None and following == row + 1 and alike:
            pairs.add((here, there))
    return pairs


def _sorted_places(count: int, edges: Pairs) -> list[int] | None:
    """A topological order, lowest place first where pairs leave a choice; None: they go in a circle."""
    later: dict[int, list[int]] = {}
    waiting = [0] * count
    for before, after in edges:
        later.setdefault(before, []).append(after)
        waiting[after] += 1
    ready = [place for place in range(count) if not waiting[place]]
    order = []
    while ready:
        place = heapq.heappop(ready)
        order.append(place)
        for after in later.get(place, []):
            waiting[after] -= 1
            if not waiting[after]:
                heapq.heappush(ready, after)
    return order if len(order) == count else None
