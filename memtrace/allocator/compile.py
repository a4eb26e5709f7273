"""From a history to the program behind it."""

from __future__ import annotations

import numpy as np

from memtrace.allocator.capacity import Releases
from memtrace.allocator.history import (
    ALLOC,
    FREE,
    FREE_REQUESTED,
    OOM,
    SEGMENT_FREE,
    SEGMENT_UNMAP,
    History,
    Int64s,
    resolve_pools,
)
from memtrace.allocator.program import (
    ALLOCATE,
    COMPLETE,
    DEFER,
    EMPTY_CACHE,
    GIVE_UP_POOL,
    TRY,
    Program,
)
from memtrace.allocator.program import FREE as FREE_BLOCK
from memtrace.allocator.rules import Rules
from memtrace.allocator.start_state import StartState


def compile_history(history: History, start: StartState, runs: Releases, rules: Rules) -> Program:
    """The requests, frees and `empty_cache` calls of a history. What the allocator does by itself is left
    out."""
    number = _block_numbers(history, start)
    deferred = _deferred_rows(history)
    deferred = deferred[number[deferred] >= 0]
    late = _completions(history, deferred, number)
    pools = resolve_pools(history)
    allocs = np.flatnonzero(history.kind == ALLOC)
    frees = np.flatnonzero((history.kind == FREE) & (number >= 0))
    failed = np.flatnonzero(history.kind == OOM)
    tries = len(start.address) + len(allocs) + np.arange(len(failed))
    parts = [
        (allocs, ALLOCATE, number[allocs]),
        (frees[~np.isin(frees, late)], FREE_BLOCK, number[frees[~np.isin(frees, late)]]),
        (failed, TRY, tries),
        (runs.first[runs.by_program], EMPTY_CACHE, np.zeros(int(runs.by_program.sum()), np.int64)),
        _given_up_pools(history, runs, pools),
    ]
    if rules.free_at == "completed":
        parts += [(deferred, DEFER, number[deferred]), (late, COMPLETE, number[late])]
    else:
        parts.append((deferred, FREE_BLOCK, number[deferred]))
    entry = np.concatenate([rows for rows, _, _ in parts])
    operation = np.concatenate([np.full(len(rows), code, np.int8) for rows, code, _ in parts])
    moment = 4 * entry - (operation == GIVE_UP_POOL)
    moment[operation == COMPLETE] = _after_release(history, runs, entry[operation == COMPLETE])
    order = np.argsort(moment, kind="stable")
    requests = np.concatenate([allocs, failed])
    older_pool = np.append(start.segments.pool, 0)[start.segments.containing(start.address)]
    older_stream = np.append(start.segments.stream, 0)[start.segments.containing(start.address)]
    return Program(
        operation=operation[order],
        number=np.concatenate([numbers for _, _, numbers in parts])[order],
        entry=entry[order],
        requested=np.concatenate([start.requested, history.size[requests]]),
        stream=np.concatenate([older_stream, history.stream[requests]]),
        pool=np.concatenate([older_pool, pools[requests]]),
        num_older=len(start.address),
    )


def _block_numbers(history: History, start: StartState) -> Int64s:
    """The block each alloc, free and free_requested entry is about; -1: none, or a contradicted one."""
    number = np.full(len(history), -1, np.int64)
    allocs = np.flatnonzero(history.kind == ALLOC)
    number[allocs] = len(start.address) + np.arange(len(allocs))
    frees = np.flatnonzero(history.kind == FREE)
    partner = start.pairing.partner[frees]
    number[frees[partner >= 0]] = number[partner[partner >= 0]]
    older = np.flatnonzero(start.freed_by >= 0)
    number[start.freed_by[older]] = older
    _number_requested(history, start, number)
    return number


def _number_requested(history: History, start: StartState, number: Int64s) -> None:
    """A free_requested is about the block last allocated at its address, or an older one there."""
    rows = np.flatnonzero((history.kind == ALLOC) | (history.kind == FREE_REQUESTED))
    order = rows[np.lexsort((rows, history.address[rows]))]
    address = history.address[order]
    # The last allocation at or before each place of the sorted order, if it is of the same address.
    last = np.maximum.accumulate(np.where(history.kind[order] == ALLOC, np.arange(len(order)), -1))
    found = (last >= 0) & (address[np.maximum(last, 0)] == address)
    at = np.searchsorted(start.address, address)
    older = np.append(start.address, -1)[np.minimum(at, len(start.address))] == address
    value = np.where(found, number[order[np.maximum(last, 0)]], np.where(older, at, -1))
    asked = history.kind[order] == FREE_REQUESTED
    number[order[asked]] = value[asked]


def _deferred_rows(history: History) -> Int64s:
    """free_requested entries that no completed free of the same block follows at once."""
    asked = np.flatnonzero(history.kind == FREE_REQUESTED)
    after = np.minimum(asked + 1, len(history) - 1)
    done = (history.kind[after] == FREE) & (history.address[after] == history.address[asked]) & (after > asked)
    deferred: Int64s = asked[~done]
    return deferred


def _completions(history: History, deferred: Int64s, number: Int64s) -> Int64s:
    """The free entries of deferred blocks."""
    frees = np.flatnonzero(history.kind == FREE)
    return frees[np.isin(number[frees], number[deferred])]


def _after_release(history: History, runs: Releases, entry: Int64s) -> Int64s:
    """When a completed free takes effect: those just before a release the allocator made belong to that
    release.

    The allocator waits for the streams only after it searched its free blocks and the device refused, so the
    block must not be free for the search; the release itself frees it in the model.
    """
    moment = 4 * entry
    if not len(entry):
        return moment
    for first, end in zip(runs.first[~runs.by_program].tolist(), runs.end[~runs.by_program].tolist(), strict=True):
        begin = first
        while begin > 0 and history.kind[begin - 1] == FREE:
            begin -= 1
        served = end
        while served < len(history) and history.kind[served] not in (ALLOC, OOM):
            served += 1
        moment = np.where((entry >= begin) & (entry < first), 4 * served + 1, moment)
    return moment


def _given_up_pools(history: History, runs: Releases, pools: Int64s) -> tuple[Int64s, int, Int64s]:
    """The first release that takes memory from each private pool for somebody else: its owner is gone by
    then."""
    rows = np.flatnonzero(((history.kind == SEGMENT_FREE) | (history.kind == SEGMENT_UNMAP)) & (pools > 0))
    run = np.searchsorted(runs.first, rows, side="right") - 1
    requests = np.flatnonzero((history.kind == ALLOC) | (history.kind == OOM))
    following = np.searchsorted(requests, runs.end[run])
    asking = np.append(pools[requests], -1)[following]
    foreign = runs.by_program[run] | (asking != pools[rows])
    found, first = np.unique(pools[rows[foreign]], return_index=True)
    return runs.first[run[foreign][first]], GIVE_UP_POOL, found
