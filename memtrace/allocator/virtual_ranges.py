"""Virtual ranges of expandable segments: which there were, which pages each had mapped, and how long a range is.

A range belongs to one pool and stream. Its length follows from the memory of the device, which files of other tools do
not contain. Ranges that existed at the same time do not overlap, so the distances between them bound the length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from memtrace.allocator.history import ALLOC, FREE, SEGMENT_MAP, SEGMENT_UNMAP, AllocatorHistory, Bools, Int64s
from memtrace.allocator.rules import SMALL_SEGMENT_BYTES, Rules, device_size_of_range, page_size, virtual_range_size

RangeKey = tuple[int, int, bool]  # stream, pool, small
_MAX_RANGE_DISTANCE_BYTES = 1 << 30
"""Addresses closer than this lie in one virtual range, because a range is longer than the device's memory."""


@dataclass(slots=True)
class VirtualRange:
    """One virtual range, from its first mapping to the release of its last page."""

    key: RangeKey
    low: int
    """Lowest address at which pages were ever mapped: the start of the range, unless it is older than the history."""
    high: int
    """Highest end of pages that were ever mapped."""
    first: int = -1
    """Entry that mapped its first pages; -1: older than the history."""
    end: int = 1 << 62
    """Entry that unmapped its last pages; larger than any entry: mapped at the end."""
    pages: set[int] = field(default_factory=set)
    """Small pages that are mapped: after `walk_back`, those mapped before the first entry."""

    def could_hold(self, low: int, high: int, length: int) -> bool:
        """Return whether a range of a length can contain other pages besides its own."""
        return max(self.high, high) - min(self.low, low) <= length


class _RangeWalk:
    """The ranges of a device while the entries of its history are undone, the last one first."""

    def __init__(self, history: AllocatorHistory, rules: Rules) -> None:
        self.ranges: list[VirtualRange] = []
        self.num_contradictions = 0
        large = history.settings.large_segment_bytes
        self._lengths = {
            small: virtual_range_size(
                history.range_device_bytes, page_size(small, large_segment_bytes=large, rules=rules)
            )
            for small in (False, True)
        }
        self._live: dict[RangeKey, list[VirtualRange]] = {}

    def add_final(self, key: RangeKey, address: int, size: int) -> None:
        """Add pages that are mapped after the last entry."""
        self._find(key, address, size, 1 << 62).pages |= _page_addresses(address, size)

    def undo_map(self, entry: int, key: RangeKey, address: int, size: int) -> None:
        """Undo an entry that mapped pages. A range that has no pages before it was created by it."""
        changed, owner = _page_addresses(address, size), self._find(key, address, size, entry)
        self.num_contradictions += not changed <= owner.pages
        owner.pages -= changed
        if not owner.pages:
            owner.first = entry
            self._live[key].remove(owner)

    def undo_unmap(self, entry: int, key: RangeKey, address: int, size: int) -> None:
        """Undo an entry that unmapped pages. A range that has no other pages was given up by it."""
        changed, owner = _page_addresses(address, size), self._find(key, address, size, entry)
        self.num_contradictions += not changed.isdisjoint(owner.pages)
        owner.pages |= changed

    def _find(self, key: RangeKey, address: int, size: int, entry: int) -> VirtualRange:
        """Return the range of a key that contains pages, a new one if need be; `entry` is the last that changed it."""
        live = self._live.setdefault(key, [])
        nearest = sorted(live, key=lambda other: abs(other.low - address))
        for other in nearest:
            if other.could_hold(address, address + size, self._lengths[key[2]]):
                other.low, other.high = min(other.low, address), max(other.high, address + size)
                return other
        added = VirtualRange(key, address, address + size, end=entry)
        live.append(added)
        self.ranges.append(added)
        return added


def walk_back(history: AllocatorHistory, rules: Rules) -> tuple[list[VirtualRange], int]:
    """Undo the map and unmap entries of a history, whose pools must be resolved (`resolve_pools`).

    Returns:
        The virtual ranges, and the number of entries that contradict the mappings at the end of the history.
    """
    walk = _RangeWalk(history, rules)
    final = history.segments.take(history.segments.expandable)
    columns = (final.stream, final.pool, final.small, final.address, final.size)
    for stream, pool, small, address, size in sorted(zip(*(c.tolist() for c in columns), strict=True)):
        walk.add_final((stream, pool, small), address, size)
    rows = np.flatnonzero((history.kind == SEGMENT_MAP) | (history.kind == SEGMENT_UNMAP))
    if not len(rows):
        return walk.ranges, walk.num_contradictions
    is_small = _find_pools(history, rows, rules)
    for i, small in zip(reversed(rows.tolist()), reversed(is_small), strict=True):
        key = (int(history.stream[i]), int(history.pool[i]), small)
        undo = walk.undo_map if history.kind[i] == SEGMENT_MAP else walk.undo_unmap
        undo(i, key, int(history.address[i]), int(history.size[i]))
    return walk.ranges, walk.num_contradictions


def estimate_device_bytes(ranges: Iterable[tuple[VirtualRange, int, int]], page: int) -> int | None:
    """Return the most memory that the devices can have by the distances between virtual ranges; None: unknown.

    Args:
        ranges: the ranges of all devices of a process, which share one address space, each with the times between which
            it existed.
        page: the largest page of the ranges.
    """
    distances = [
        abs(one.low - other.low)
        for (one, begin, end), (other, other_begin, other_end) in combinations(ranges, 2)
        if begin < other_end and other_begin < end
    ]
    return device_size_of_range(min(distances), page) if distances else None


def _page_addresses(address: int, size: int) -> set[int]:
    return set(range(address, address + size, SMALL_SEGMENT_BYTES))


def _find_pools(history: AllocatorHistory, rows: Int64s, rules: Rules) -> list[bool]:
    """Return for map and unmap entries whether they belong to the small pool, which they do not say.

    Pages of the small pool are mapped one by one, but unmapped together. The pool of unmapped pages is that of the
    entry that mapped them. A whole number of large pages that are older than the history may be of either pool.
    """
    requests, owner = _requests(history, rules), _owner_ids(history.stream, history.pool)
    maps = rows[history.kind[rows] == SEGMENT_MAP]
    start, end = history.address[maps], history.address[maps] + history.size[maps]
    pools: dict[int, bool | None] = {}
    for i in rows.tolist():
        address, size = int(history.address[i]), int(history.size[i])
        mapped = maps[(maps <= i) & (owner[maps] == owner[i]) & (start <= address) & (address < end)]
        if len(mapped):
            pools[i] = bool(history.size[mapped[-1]] == rules.small_segment_bytes)
        elif size % history.settings.large_segment_bytes:
            pools[i] = True
        else:
            pools[i] = requests.nearest_is_small(address, int(owner[i]), before=i)
    for i in [i for i, small in pools.items() if small is None]:
        pools[i] = _pool_by_order(pools, history.stream, i)
        if pools[i] is None:
            pools[i] = requests.nearest_is_small(int(history.address[i]), int(owner[i]), before=len(history) + 1)
    return [bool(small) for small in pools.values()]


def _pool_by_order(pools: dict[int, bool | None], streams: Int64s, entry: int) -> bool | None:
    """Return the pool of pages of the default pool that were unmapped in one release with others; None: unknown.

    `release_cached_blocks` empties the large pool, stream by stream in the order of their handles, then the small pool.
    """
    following = entry + 1
    while following in pools:
        if pools[following] is False or streams[following] < streams[following - 1]:
            return False
        following += 1
    previous = entry
    while previous in pools:
        if pools[previous] or (previous - 1 in pools and streams[previous] < streams[previous - 1]):
            return True
        previous -= 1
    return None


@dataclass(frozen=True, slots=True)
class _Requests:
    """Requests with the pool that served them: pages that hold a small request belong to the small pool."""

    entry: Int64s
    address: Int64s
    small: Bools
    owner: Int64s
    """Stream and pool as one number."""

    def nearest_is_small(self, address: int, owner: int, *, before: int) -> bool | None:
        """Return whether the request nearest to an address before an entry was small; None: there is none."""
        is_near = (self.owner == owner) & (np.abs(self.address - address) < _MAX_RANGE_DISTANCE_BYTES)
        rows = np.flatnonzero(is_near & (self.entry < before))
        return bool(self.small[rows[np.argmin(np.abs(self.address[rows] - address))]]) if len(rows) else None


def _requests(history: AllocatorHistory, rules: Rules) -> _Requests:
    rows = np.flatnonzero((history.kind == ALLOC) | (history.kind == FREE))
    final = history.blocks
    segment = history.segments.containing(final.address)
    size = np.concatenate([history.size[rows], final.requested])
    stream = np.concatenate([history.stream[rows], np.append(history.segments.stream, -1)[segment]])
    pool = np.concatenate([history.pool[rows], np.append(history.segments.pool, -1)[segment]])
    return _Requests(
        entry=np.concatenate([rows, np.full(len(final.address), len(history))]),
        address=np.concatenate([history.address[rows], final.address]),
        small=history.settings.round_sizes(size, rules) <= rules.small_request_bytes,
        owner=_owner_ids(stream, pool),
    )


def _owner_ids(stream: Int64s, pool: Int64s) -> Int64s:
    return stream * 1_000_003 + pool
