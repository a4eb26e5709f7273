"""When the cache was given back and why, and what that tells of the device's capacity.

A run of segment_free and segment_unmap entries is either the program's `empty_cache`, whose moment nothing
else tells, or the allocator's own doing: the device refused, it gave back what it could and asked again. The
second kind follows from one number, the bytes the device would give; the history brackets it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.allocator.blocks import NO_LIMIT
from memtrace.allocator.history import (
    ALLOC,
    OOM,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Bools,
    History,
    Int64s,
)
from memtrace.allocator.model import segment_size
from memtrace.allocator.rules import TORCH, round_size


@dataclass(frozen=True, slots=True)
class Releases:
    """Runs of segments given back, one row each."""

    first: Int64s
    """First entry of the run."""
    end: Int64s
    """Entry after its last."""
    by_program: Bools
    """The program called `empty_cache`; else the allocator needed the memory for the request that follows."""


@dataclass(frozen=True, slots=True)
class Bracket:
    """What the history tells of the bytes the allocator could get from the device."""

    low: int
    """It held as many."""
    high: int | None
    """It was refused when it would have held as many; None: it never was."""
    estimate: int | None
    """Held and, by the driver's word, still free, when a request failed for good; None: none did."""

    @property
    def is_consistent(self) -> bool:
        """Whether any capacity explains the history; where none does, others took and gave back memory
        meanwhile."""
        return self.high is None or self.low < self.high

    @property
    def ends(self) -> tuple[int, int] | None:
        """The least and the largest capacity that explain every refusal; None: there was none."""
        return None if self.high is None or not self.is_consistent else (self.low, self.high - 1)


def releases(history: History) -> Releases:
    """The runs of a history, each told apart by its stack, its place, and where both leave it open by the
    bracket."""
    given = (history.kind == SEGMENT_FREE) | (history.kind == SEGMENT_UNMAP)
    said = np.concatenate([[-2], np.where(given, history.by_program, -2), [-2]])
    changes = said[1:] != said[:-1]
    first, end = np.flatnonzero(changes & (said[1:] != -2)), np.flatnonzero(changes & (said[:-1] != -2))
    following = np.append(history.kind, -1)[end]
    needed = np.isin(following, (SEGMENT_ALLOC, SEGMENT_MAP, OOM))
    told = history.by_program[first]
    last_request = np.flatnonzero((history.kind == ALLOC) | (history.kind == OOM)).max(initial=-1)
    told = np.where(((told == -1) & ~needed) | (end > last_request), 1, told)
    open_runs = Releases(first, end, told == 1)
    low = history.peak_reserved
    before, asked = _refusals(history, open_runs)
    would_serve = np.array(
        [_would_serve(history, *run) for run in zip(first.tolist(), end.tolist(), strict=True)], bool
    )
    return Releases(first, end, (told == 1) | ((told == -1) & ((before + asked <= low) | would_serve)))


def _would_serve(history: History, first: int, end: int) -> bool:
    """Whether memory given back in a run would have served the request after it: then it was not for its
    sake."""
    kinds = history.kind[end:]
    requests = np.flatnonzero((kinds == ALLOC) | (kinds == OOM))
    if not len(requests):
        return True
    row, settings = end + int(requests[0]), history.settings
    size = round_size(int(history.size[row]), settings.roundup_power2_divisions, TORCH)
    limit = settings.max_split_bytes or NO_LIMIT
    rounding = settings.max_non_split_rounding_bytes or settings.large_segment_bytes
    given = history.size[first:end][history.stream[first:end] == history.stream[row]]
    if size <= TORCH.small_limit_bytes:
        return bool((given == TORCH.small_segment_bytes).any())
    usable = (given >= size) & (given != TORCH.small_segment_bytes)
    usable &= (given < size + rounding) if size >= limit else (given < limit)
    return bool(usable.any())


def bracket(history: History, runs: Releases) -> Bracket:
    """The capacities under which exactly the requests that were refused are refused."""
    high: list[int] = []
    if not history.settings.collects_garbage:
        before, asked = _refusals(history, runs)
        # A request can release twice, and asks again only after the second time: its first release counts.
        own = np.flatnonzero(~runs.by_program)
        _, first = np.unique(refused_requests(history, runs), return_index=True)
        high = (before + asked)[own[first]].tolist()
    reserved = history.reserved()
    failed = np.flatnonzero(history.kind == OOM)
    for row in failed.tolist():
        high.append(int(reserved[row]) + _wanted(history, row))
    free = history.device_free[failed]
    estimates = (reserved[failed] + free)[free >= 0]
    estimate = int(estimates.max()) if len(estimates) else None
    return Bracket(history.peak_reserved, min(high, default=None), estimate)


def _refusals(history: History, runs: Releases) -> tuple[Int64s, Int64s]:
    """Bytes reserved before each run, and bytes the request after it took or asked for."""
    reserved = np.concatenate([[history.reserved_at_start], history.reserved()])
    asked = [_wanted(history, row) for row in runs.end.tolist()]
    return reserved[runs.first], np.array(asked, np.int64)


def _wanted(history: History, row: int) -> int:
    """Bytes the request served after `row` asks of the device: its segment, or the most pages it can need.

    0 where no request follows.
    """
    settings = history.settings
    kinds = history.kind[row:]
    requests = np.flatnonzero((kinds == ALLOC) | (kinds == OOM))
    if not len(requests):
        return 0
    segments = np.flatnonzero(kinds[: requests[0]] == SEGMENT_ALLOC)
    if len(segments):
        return int(history.size[row + segments[0]])
    size = round_size(int(history.size[row + requests[0]]), settings.roundup_power2_divisions, TORCH)
    if settings.expandable_segments:
        page = TORCH.small_segment_bytes if size <= TORCH.small_limit_bytes else settings.large_segment_bytes
        return -(-size // page) * page
    return segment_size(size, settings, TORCH)


def refused_requests(history: History, runs: Releases) -> Int64s:
    """The request (counted from 1, failed ones too) that each release by the allocator was for."""
    number = np.cumsum((history.kind == ALLOC) | (history.kind == OOM))
    return np.append(number, 0)[runs.end[~runs.by_program] - 1] + 1


def failed_requests(history: History) -> Int64s:
    """The requests that failed for good."""
    number = np.cumsum((history.kind == ALLOC) | (history.kind == OOM))
    failed: Int64s = number[history.kind == OOM]
    return failed
