"""Finds where the allocator waited for the streams because the device, or the memory fraction, had refused a request.

Frees complete for two reasons: at the beginning of a request the allocator frees the blocks whose streams are done
(`process_events`), and where a request is refused it waits for the streams before it releases its cache
(`synchronize_and_free_events`). Only blocks of the first kind are free while the allocator searches for a block. The
history shows completed frees directly before a release in both cases; what was released, and when, tells them apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memtrace.allocator.device_capacity import CacheReleases, exceeds_limit, first_of_frees
from memtrace.allocator.history import ALLOC, FREE, FREE_REQUESTED, OOM, AllocatorHistory, Bools, Int64s
from memtrace.allocator.rules import SMALL_SEGMENT_BYTES


class StreamWait(NamedTuple):
    """A wait of the allocator for the streams, as entries of the history."""

    begin: int
    """The first completed free of the wait, if there is any."""
    first: int
    """The entry after the completed frees."""
    served: int
    """The request that was refused."""
    is_likely: bool = True
    """The entries suggest that the allocator waited; otherwise the frees completed at the beginning of the request."""
    is_ambiguous: bool = False
    """The entries do not rule out the contrary."""


def find_stream_waits(
    history: AllocatorHistory, releases: CacheReleases, pools: Int64s, pending_until: Int64s
) -> list[StreamWait]:
    """Return the possible waits for the streams, in order of the requests that were refused.

    Args:
        history: the history.
        releases: who released the cache.
        pools: memory pool of each entry.
        pending_until: for each free_requested entry the completed free, if a stream still used the block for certain;
            otherwise the entry itself.
    """
    requests = np.flatnonzero((history.kind == ALLOC) | (history.kind == OOM))
    runs_of: dict[int, list[tuple[int, int]]] = {row: [] for row in requests[history.kind[requests] == OOM].tolist()}
    by_allocator = ~releases.by_program
    # The program releases what no request follows, so a request follows each of these.
    for first, end in zip(releases.first[by_allocator].tolist(), releases.end[by_allocator].tolist(), strict=True):
        served = int(requests[np.searchsorted(requests, end)])
        runs_of.setdefault(served, []).append((first, end))
    requested = np.flatnonzero(history.kind == FREE_REQUESTED)
    waits = []
    for served, runs in sorted(runs_of.items()):
        end = runs[0][0] if runs else served
        later = np.flatnonzero(history.kind[end:served] == FREE) + end
        if len(later):
            waits.append(StreamWait(int(later[0]), int(later[-1]) + 1, served))
        elif not pools[served] % 2:  # while a graph is captured, the allocator never waits
            begin = first_of_frees(history, end)
            is_pending = (requested < begin) & (pending_until[requested] > served)
            is_likely = _waited_first(history, served, runs, pools) and not (runs and is_pending.any())
            waits.append(StreamWait(begin, end, served, is_likely, is_ambiguous=begin < end))
    return waits


def released_from_largest(history: AllocatorHistory, pools: Int64s, first: int, end: int, served: int) -> Int64s:
    """Return the first entries of a release that took the largest blocks of the request's stream and pool.

    Under `max_split_size_mb` the allocator releases as many large blocks as the request needs, the largest first. Only
    then does it wait for the streams and release its whole cache (`release_available_cached_blocks`).
    """
    limit = history.settings.max_split_bytes
    rows = np.arange(first, end)
    if limit is None:
        return rows[:0]
    wanted = max(limit, history.settings.round_size(int(history.size[served])))
    sizes = history.size[rows]
    fits = (sizes >= limit) & (history.stream[rows] == history.stream[served]) & (pools[rows] == pools[served])
    fits &= np.concatenate([[True], np.diff(sizes) <= 0])
    fits &= np.concatenate([[0], np.cumsum(sizes)[:-1]]) < wanted
    return rows[: int(np.argmin(np.append(fits, False)))]


def _waited_first(history: AllocatorHistory, served: int, runs: list[tuple[int, int]], pools: Int64s) -> bool:
    """Return whether the allocator probably waited for the streams before everything that it released for a request."""
    if not runs:
        return True
    first, end = runs[0][0], runs[-1][1]
    largest = released_from_largest(history, pools, first, end, served)
    if len(largest):
        # Either the release of large blocks suffices, or it leaves none of them to the release of the whole cache.
        settings, sizes = history.settings, history.size[first:end]
        wanted = max(settings.max_split_bytes or 0, settings.round_size(int(history.size[served])))
        if sizes[: len(largest)].sum() >= wanted:
            return len(largest) < len(sizes)
        rest = np.arange(first + len(largest), end)
        is_large = (history.size[rest] >= (settings.max_split_bytes or 0)) & (pools[rest] == pools[served])
        return bool((is_large & (history.stream[rest] == history.stream[served])).any())
    if not history.settings.collects_garbage or history.allowed_bytes is None:
        return True
    before = history.reserved()[first] + history.size[first]
    was_refused = exceeds_limit(history, np.array([first]), np.array([before]))[0]
    return bool(was_refused and _is_in_order_of_cache(history, np.arange(first, end)).all())


def _is_in_order_of_cache(history: AllocatorHistory, rows: Int64s) -> Bools:
    """Return for all but the first entry whether `release_cached_blocks` can release it after the one before it."""
    small, stream, size = history.size[rows] == SMALL_SEGMENT_BYTES, history.stream[rows], history.size[rows]
    same_pool, same_stream = np.diff(small.astype(np.int8)) == 0, np.diff(stream) == 0
    in_order: Bools = (np.diff(small.astype(np.int8)) > 0) | (
        same_pool & ((np.diff(stream) > 0) | (same_stream & (np.diff(size) >= 0)))
    )
    return in_order
