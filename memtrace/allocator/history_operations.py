"""Extracts the operations of the program from a history, without what the allocator did on its own."""

from __future__ import annotations

import numpy as np

from memtrace.allocator.device_capacity import CacheReleases
from memtrace.allocator.history import (
    ALLOC,
    FREE,
    FREE_REQUESTED,
    OOM,
    SEGMENT_FREE,
    SEGMENT_UNMAP,
    AllocatorHistory,
    Int64s,
    resolve_pools,
)
from memtrace.allocator.operations import (
    ABANDON_POOL,
    ALLOCATE,
    COMPLETE_FREE,
    DEFER_FREE,
    EMPTY_CACHE,
    FAILED_ALLOCATE,
    RELEASE_POOL,
    OperationSequence,
)
from memtrace.allocator.operations import FREE as FREE_BLOCK
from memtrace.allocator.rules import Rules
from memtrace.allocator.start_state import StartState
from memtrace.allocator.stream_waits import StreamWait, find_stream_waits


def extract_operations(
    history: AllocatorHistory,
    start: StartState,
    releases: CacheReleases,
    rules: Rules,
    *,
    frees_wait: bool = True,
    reversed_waits: frozenset[int] = frozenset(),
) -> OperationSequence:
    """Return the requests, frees and `empty_cache` calls of a history.

    Args:
        history: the history.
        start: the state before its first entry.
        releases: who released the cache.
        rules: the allocator's rules.
        frees_wait: how to read a free that completes directly before the allocator releases its cache: a stream still
            used the block, or the block was free at once.
        reversed_waits: requests whose ambiguous wait for the streams (`StreamWait`) is to be read the other way.
    """
    number = _block_numbers(history, start)
    pools = resolve_pools(history)
    waits = [
        wait
        for wait in find_stream_waits(history, releases, pools, _pending_until(history, number))
        if wait.is_likely != (wait.served in reversed_waits)
    ]
    deferred = _deferred_frees(history, waits if frees_wait else [])
    deferred = deferred[number[deferred] >= 0]
    completions = _completed_frees(history, deferred, number)
    allocs = np.flatnonzero(history.kind == ALLOC)
    frees = np.flatnonzero((history.kind == FREE) & (number >= 0))
    frees = frees[~np.isin(frees, completions)]
    failed = np.flatnonzero(history.kind == OOM)
    parts = [
        (allocs, ALLOCATE, number[allocs]),
        (frees, FREE_BLOCK, number[frees]),
        (failed, FAILED_ALLOCATE, len(start.address) + len(allocs) + np.arange(len(failed))),
        *_program_releases(releases, pools),
        _abandoned_pools(history, releases, pools),
    ]
    if rules.frees_at == "completion":
        parts += [(deferred, DEFER_FREE, number[deferred]), (completions, COMPLETE_FREE, number[completions])]
    else:
        parts.append((deferred, FREE_BLOCK, number[deferred]))
    entry = np.concatenate([rows for rows, _, _ in parts])
    operation = np.concatenate([np.full(len(rows), code, np.int8) for rows, code, _ in parts])
    moment = 4 * entry - (operation == ABANDON_POOL)
    completes = operation == COMPLETE_FREE
    moment[completes] = _completion_moments(waits, entry[completes])
    order = np.argsort(moment, kind="stable")
    requests = np.concatenate([allocs, failed])
    segment = start.segments.containing(start.address)
    return OperationSequence(
        operation=operation[order],
        number=np.concatenate([numbers for _, _, numbers in parts])[order],
        entry=entry[order],
        requested=np.concatenate([start.requested, history.size[requests]]),
        stream=np.concatenate([np.append(start.segments.stream, 0)[segment], history.stream[requests]]),
        pool=np.concatenate([np.append(start.segments.pool, 0)[segment], pools[requests]]),
        num_older=len(start.address),
    )


def find_waits(history: AllocatorHistory, start: StartState, releases: CacheReleases) -> list[StreamWait]:
    """Return the possible waits for the streams, in order of the requests that were refused."""
    pending_until = _pending_until(history, _block_numbers(history, start))
    return find_stream_waits(history, releases, resolve_pools(history), pending_until)


def _block_numbers(history: AllocatorHistory, start: StartState) -> Int64s:
    """Return the block of each alloc, free and free_requested entry; -1: none, or the entry contradicts others."""
    number = np.full(len(history), -1, np.int64)
    allocs = np.flatnonzero(history.kind == ALLOC)
    number[allocs] = len(start.address) + np.arange(len(allocs))
    frees = np.flatnonzero(history.kind == FREE)
    partner = start.pairs.partner[frees]
    number[frees[partner >= 0]] = number[partner[partner >= 0]]
    older = np.flatnonzero(start.freed_by >= 0)
    number[start.freed_by[older]] = older
    _number_free_requests(history, start, number)
    return number


def _number_free_requests(history: AllocatorHistory, start: StartState, number: Int64s) -> None:
    """Fill in the blocks of free_requested entries: the last allocation at the address, or an older block there."""
    rows = np.flatnonzero((history.kind == ALLOC) | (history.kind == FREE_REQUESTED))
    order = rows[np.lexsort((rows, history.address[rows]))]
    address = history.address[order]
    # The last allocation at or before each place of the sorted order, provided it has the same address.
    last = np.maximum.accumulate(np.where(history.kind[order] == ALLOC, np.arange(len(order)), -1))
    has_alloc = (last >= 0) & (address[np.maximum(last, 0)] == address)
    place = np.searchsorted(start.address, address)
    is_older = np.append(start.address, -1)[np.minimum(place, len(start.address))] == address
    block = np.where(has_alloc, number[order[np.maximum(last, 0)]], np.where(is_older, place, -1))
    is_request = history.kind[order] == FREE_REQUESTED
    number[order[is_request]] = block[is_request]


def _deferred_frees(history: AllocatorHistory, waits: list[StreamWait]) -> Int64s:
    """Return the free_requested entries of blocks that a stream still used.

    Their completed free does not follow directly, unless the allocator waited for the streams just then.
    """
    requested = np.flatnonzero(history.kind == FREE_REQUESTED)
    after = np.minimum(requested + 1, len(history) - 1)
    same_address = history.address[after] == history.address[requested]
    completed = (history.kind[after] == FREE) & same_address & (after > requested)
    completed &= ~np.isin(after, [wait.begin for wait in waits if wait.begin < wait.first])
    deferred: Int64s = requested[~completed]
    return deferred


def _pending_until(history: AllocatorHistory, number: Int64s) -> Int64s:
    """Return `find_stream_waits`' argument of this name; `number` is the block of each entry."""
    until = np.arange(len(history))
    deferred = _deferred_frees(history, [])
    deferred = deferred[number[deferred] >= 0]
    completed = _completed_frees(history, deferred, number)
    free_of = np.full(int(number.max(initial=-1)) + 1, len(history))
    free_of[number[completed]] = completed
    until[deferred] = free_of[number[deferred]]
    return until


def _completed_frees(history: AllocatorHistory, deferred: Int64s, number: Int64s) -> Int64s:
    """Return the free entries of deferred blocks."""
    frees = np.flatnonzero(history.kind == FREE)
    return frees[np.isin(number[frees], number[deferred])]


def _completion_moments(waits: list[StreamWait], entry: Int64s) -> Int64s:
    """Return the moment, four per entry, at which each completed free takes effect.

    Completed frees directly before a release by the allocator belong to that release. The allocator waits for the
    streams only after it has searched its free blocks and the device has refused, so these blocks must not be free
    during the search; the release itself frees them in the model.
    """
    moment = 4 * entry
    for begin, first, served, *_ in waits if len(entry) else ():
        moment = np.where((entry >= begin) & (entry < first), 4 * served + 1, moment)
    return moment


def _program_releases(releases: CacheReleases, pools: Int64s) -> list[tuple[Int64s, int, Int64s]]:
    """Return entries, operation code and numbers of the releases by the program.

    `empty_cache` begins with the default pool. A release that begins with a private pool is that of a pool that lost
    its owner.
    """
    emptied, released, numbers = list[int](), list[int](), list[int]()
    by_program = releases.by_program
    for first, end in zip(releases.first[by_program].tolist(), releases.end[by_program].tolist(), strict=True):
        in_default = np.flatnonzero(pools[first:end] <= 0)
        whole = first + int(in_default[0]) if len(in_default) else end
        emptied += [whole] * bool(len(in_default))
        private, place = np.unique(pools[first:whole], return_index=True)
        order = np.argsort(place)
        released += (first + place[order]).tolist()
        numbers += private[order].tolist()
    return [
        (np.array(emptied, np.int64), EMPTY_CACHE, np.zeros(len(emptied), np.int64)),
        (np.array(released, np.int64), RELEASE_POOL, np.array(numbers, np.int64)),
    ]


def _abandoned_pools(history: AllocatorHistory, releases: CacheReleases, pools: Int64s) -> tuple[Int64s, int, Int64s]:
    """Return entries, operation code and numbers of the private pools that lost their owner.

    A pool has no owner any more when a release takes memory from it for a request of another pool.
    """
    rows = np.flatnonzero(((history.kind == SEGMENT_FREE) | (history.kind == SEGMENT_UNMAP)) & (pools > 0))
    run = np.searchsorted(releases.first, rows, side="right") - 1
    requests = np.flatnonzero((history.kind == ALLOC) | (history.kind == OOM))
    following = np.searchsorted(requests, releases.end[run])
    requesting_pool = np.append(pools[requests], -1)[following]
    is_foreign = releases.by_program[run] | (requesting_pool != pools[rows])
    abandoned, first = np.unique(pools[rows[is_foreign]], return_index=True)
    return releases.first[run[is_foreign][first]], ABANDON_POOL, abandoned
