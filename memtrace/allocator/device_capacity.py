"""Releases of the cache, and what they reveal about the capacity of the device.

A run of segment_free and segment_unmap entries is either an `empty_cache` call of the program, which nothing else
announces, or the allocator's reaction to a refusal: the device had no memory left, so the allocator released what it
could and asked again. Releases of the second kind follow from one number, the bytes that the device gives. The history
bounds that number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.allocator.history import (
    ALLOC,
    FREE,
    FREE_REQUESTED,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    AllocatorHistory,
    Bools,
    Int64s,
)
from memtrace.allocator.rules import NO_LIMIT, SMALL_SEGMENT_BYTES, block_size_limit, uses_small_pool


@dataclass(frozen=True, slots=True)
class CacheReleases:
    """Runs of released segments, one row each."""

    first: Int64s
    """First entry of the run."""
    end: Int64s
    """Entry after the last of the run."""
    by_program: Bools
    """The program called `empty_cache`; otherwise the allocator needed the memory for the request that follows."""
    by_garbage_collection: Bools
    """The allocator released segments that were long unused, before it asked the device."""


@dataclass(frozen=True, slots=True)
class CapacityBounds:
    """What the history reveals about the bytes that the allocator could take from the device."""

    low_bytes: int
    """The allocator held as much."""
    refused_bytes: int | None
    """The device refused when the allocator would have held as much; None: it never refused."""
    estimate_bytes: int | None
    """Bytes held plus bytes that the driver reported free when a request failed; None: none failed."""

    @property
    def is_consistent(self) -> bool:
        """Whether one capacity explains all refusals. Where none does, other processes used the device for a while."""
        return self.refused_bytes is None or self.low_bytes < self.refused_bytes

    @property
    def interval(self) -> tuple[int, int] | None:
        """The smallest and the largest capacity that explain all refusals; None: unknown."""
        if self.refused_bytes is None or not self.is_consistent:
            return None
        return self.low_bytes, self.refused_bytes - 1


def find_cache_releases(history: AllocatorHistory) -> CacheReleases:
    """Return the runs of released segments and who caused each.

    The cause is read from the stack; without a stack from what follows the run; and failing that from the capacity.
    """
    released = (history.kind == SEGMENT_FREE) | (history.kind == SEGMENT_UNMAP)
    cause = np.concatenate([[-2], np.where(released, history.by_program, -2), [-2]])
    changes = cause[1:] != cause[:-1]
    first, end = np.flatnonzero(changes & (cause[1:] != -2)), np.flatnonzero(changes & (cause[:-1] != -2))
    following = np.append(history.kind, -1)[end]
    is_followed_by_need = np.isin(following, (SEGMENT_ALLOC, SEGMENT_MAP, OOM))
    is_first_of_two = _is_first_of_two(history, first, end)
    is_followed_by_need |= is_first_of_two
    by_program = history.by_program[first]
    last_request = np.flatnonzero((history.kind == ALLOC) | (history.kind == OOM)).max(initial=-1)
    by_program = np.where(((by_program == -1) & ~is_followed_by_need) | (end > last_request), 1, by_program)
    before, asked = _refusals(history, first, end)
    # The device, or the limit, refused the request before the first of the two releases.
    before[1:] = np.where(is_first_of_two[:-1], before[:-1], before[1:])
    within_known_capacity = before + asked <= history.peak_reserved
    runs = zip(first.tolist(), end.tolist(), strict=True)
    would_serve = np.array([_would_serve(history, *run) for run in runs], bool)
    was_unneeded = (by_program == -1) & (within_known_capacity | would_serve)
    is_garbage = _could_be_garbage_collection(history, first, end, before)
    if history.settings.collects_garbage and history.allowed_bytes is not None:
        # Releases that neither the threshold nor the limit explains are those of the program.
        was_unneeded |= (by_program == -1) & ~exceeds_limit(history, end, before)
    by_program = (by_program == 1) | (was_unneeded & ~is_garbage)
    return CacheReleases(first, end, by_program, is_garbage & ~by_program)


def _is_first_of_two(history: AllocatorHistory, first: Int64s, end: Int64s) -> Bools:
    """Return which runs are the first of the two releases that one request can cause under `max_split_size_mb`.

    The first releases large blocks, the largest first. Before the second, the allocator waits for the streams, so only
    completed frees lie between the two.
    """
    limit, is_first = history.settings.max_split_bytes, np.zeros(len(first), np.bool_)
    if limit is None:
        return is_first
    for i, (begin, stop) in enumerate(zip(first[:-1].tolist(), end[:-1].tolist(), strict=True)):
        sizes, between = history.size[begin:stop], history.kind[stop : first[i + 1]]
        is_first[i] = (sizes >= limit).all() and (np.diff(sizes) <= 0).all() and (between == FREE).all()
    return is_first


def _could_be_garbage_collection(history: AllocatorHistory, first: Int64s, end: Int64s, before: Int64s) -> Bools:
    """Return which runs released only ordinary segments of the large pool, with more than the threshold reserved."""
    settings, is_garbage = history.settings, np.zeros(len(first), np.bool_)
    if not settings.collects_garbage or history.allowed_bytes is None:
        return is_garbage
    for i, (begin, stop) in enumerate(zip(first.tolist(), end.tolist(), strict=True)):
        is_garbage[i] = _may_be_garbage(history, np.arange(begin, stop)).all()
    is_garbage &= before > int(settings.garbage_collection_threshold * history.allowed_bytes)
    return is_garbage


def _may_be_garbage(history: AllocatorHistory, rows: Int64s) -> Bools:
    """Return which entries released an ordinary segment of the large pool, and so can be garbage collection."""
    if not history.settings.collects_garbage:
        return np.zeros(len(rows), np.bool_)
    is_large = (history.kind[rows] == SEGMENT_FREE) & (history.size[rows] != SMALL_SEGMENT_BYTES)
    may_be: Bools = is_large & (history.pool[rows] <= 0)
    return may_be


def _would_serve(history: AllocatorHistory, first: int, end: int) -> bool:
    """Return whether memory released in a run would have served the next request, which then did not cause the run."""
    kinds = history.kind[end:]
    requests = np.flatnonzero((kinds == ALLOC) | (kinds == OOM))
    if not len(requests):
        return True
    row, settings = end + int(requests[0]), history.settings
    rounded = settings.round_size(int(history.size[row]))
    rows = np.arange(first, end)
    rows = rows[(history.stream[rows] == history.stream[row]) & ~_was_freed_by_wait(history, first, end)]
    released = history.size[rows]
    if uses_small_pool(rounded):
        return bool((released == SMALL_SEGMENT_BYTES).any())
    limit = block_size_limit(rounded, settings.max_split_bytes or NO_LIMIT, settings.effective_max_rounding_bytes)
    return bool(((released >= rounded) & (released != SMALL_SEGMENT_BYTES) & (released < limit)).any())


def _was_freed_by_wait(history: AllocatorHistory, first: int, end: int) -> Bools:
    """Return which entries of a run released memory that was in use until the allocator waited for the streams.

    Such memory could not serve the request that caused the run: the allocator had searched its free blocks before.
    """
    begin = first_of_frees(history, first)
    before = slice(max(begin - 1, 0), begin)
    is_immediate = (history.kind[before] == FREE_REQUESTED) & (history.address[before] == history.address[begin])
    freed = history.address[begin + int(is_immediate.sum()) : first]
    address, size = history.address[first:end, None], history.size[first:end, None]
    was_freed: Bools = np.any((address <= freed) & (freed < address + size), axis=1)
    return was_freed


def first_of_frees(history: AllocatorHistory, row: int) -> int:
    """Return the first of the completed frees directly before an entry; the entry itself where there is none."""
    while row > 0 and history.kind[row - 1] == FREE:
        row -= 1
    return row


def bound_capacity(history: AllocatorHistory, releases: CacheReleases) -> CapacityBounds:
    """Return the capacities under which exactly the recorded refusals happen."""
    before, asked = _refusals(history, releases.first, releases.end)
    # A request can release twice and asks the device again only after the second time: the first release counts.
    by_allocator = np.flatnonzero(~releases.by_program)
    _, first = np.unique(_releasing_requests(history, releases), return_index=True)
    runs = by_allocator[first]
    runs = runs[~exceeds_limit(history, releases.end[runs], before[runs])]
    # Garbage collection comes first, and the request is then refused with less reserved than before the run.
    runs = runs[~_may_be_garbage(history, releases.first[runs])]
    refused: list[int] = (before + asked)[runs].tolist()
    reserved = history.reserved()
    failed = np.flatnonzero(history.kind == OOM)
    refused_rows = failed[~exceeds_limit(history, failed, reserved[failed])].tolist()
    refused += [int(reserved[row]) + _bytes_from_device(history, row) for row in refused_rows]
    free = history.device_free[failed]
    estimates = (reserved[failed] + free)[free >= 0]
    estimate = int(estimates.max()) if len(estimates) else None
    return CapacityBounds(history.peak_reserved, min(refused, default=None), estimate)


def _refusals(history: AllocatorHistory, first: Int64s, end: Int64s) -> tuple[Int64s, Int64s]:
    """Return the bytes reserved before each run, and the bytes that the request after it needed from the device."""
    reserved = np.concatenate([[history.reserved_at_start], history.reserved()])
    asked = [_bytes_from_device(history, row) for row in end.tolist()]
    return reserved[first], np.array(asked, np.int64)


def _bytes_from_device(history: AllocatorHistory, row: int) -> int:
    """Return the bytes that the first request from entry `row` on needs from the device; 0 where no request follows."""
    kinds = history.kind[row:]
    requests = np.flatnonzero((kinds == ALLOC) | (kinds == OOM))
    if not len(requests):
        return 0
    segments = np.flatnonzero(kinds[: requests[0]] == SEGMENT_ALLOC)
    if len(segments):
        return int(history.size[row + segments[0]])
    return history.settings.device_request_size(int(history.size[row + requests[0]]))


def exceeds_limit(history: AllocatorHistory, rows: Int64s, reserved: Int64s) -> Bools:
    """Return whether the memory fraction, and not the device, refused the first request from each entry on.

    Args:
        history: the history.
        rows: entries.
        reserved: bytes reserved when each request was refused.
    """
    if history.allowed_bytes is None:
        return np.zeros(len(rows), np.bool_)
    requests = np.flatnonzero((history.kind == ALLOC) | (history.kind == OOM))
    place = np.searchsorted(requests, rows)
    requested = np.append(history.size[requests], 0)[place]
    segment = np.array([history.settings.segment_size(size) for size in requested.tolist()], np.int64)
    exceeds: Bools = reserved + segment > history.allowed_bytes
    return exceeds


def _releasing_requests(history: AllocatorHistory, releases: CacheReleases) -> Int64s:
    """Return the number of the request (from 1, failed ones included) that each release by the allocator was for."""
    number = history.request_numbers()
    return np.append(number, 0)[releases.end[~releases.by_program] - 1] + 1


def refused_requests(history: AllocatorHistory, releases: CacheReleases) -> Int64s:
    """Return the numbers of the requests that the device refused, whether they failed or the cache was released."""
    runs = np.flatnonzero(~releases.by_program)
    before, _ = _refusals(history, releases.first, releases.end)
    released = _releasing_requests(history, releases)[~exceeds_limit(history, releases.end[runs], before[runs])]
    failed = np.flatnonzero(history.kind == OOM)
    failed = failed[~exceeds_limit(history, failed, history.reserved()[failed])]
    return np.union1d(released, history.request_numbers()[failed])
