"""When the cache was given back and why, and what that tells of the device's capacity.

A run of segment_free and segment_unmap entries is either the program's `empty_cache`, whose moment nothing else tells,
or the allocator's own doing: the device refused, it gave back what it could and asked again. The second kind follows
from one number, the bytes the device would give; the history brackets it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memtrace.planning.allocator.history import (
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
from memtrace.planning.allocator.model import segment_size
from memtrace.planning.allocator.rules import TORCH


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
        """Whether any capacity explains the history; where none does, others took and gave back memory meanwhile."""
        return self.high is None or self.low < self.high

    @property
    def ends(self) -> tuple[int, int] | None:
        """The least and the largest capacity that explain every refusal; None: there was none."""
        return None if self.high is None or not self.is_consistent else (self.low, self.high - 1)


def releases(history: History) -> Releases:
    """The runs of a history, each told apart by its stack, its place, and where both leave it open by the bracket."""
    given = (history.kind == SEGMENT_FREE) | (history.kind == SEGMENT_UNMAP)
    edges = np.diff(np.concatenate([[0], given.astype(np.int8), [0]]))
    first, end = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    following = np.append(history.kind, -1)[end] if len(first) else np.zeros(0, np.int8)
    needed = np.isin(following, (SEGMENT_ALLOC, SEGMENT_MAP, OOM))
    told = np.maximum.reduceat(history.by_program, first) if len(first) else np.zeros(0, np.int8)
    told = np.where(needed, told, 1)
    open_runs = Releases(first, end, told == 1)
    low = history.peak_reserved
    before, asked = _refusals(history, open_runs)
    return Releases(first, end, (told == 1) | ((told == -1) & (before + asked <= low)))


def bracket(history: History, runs: Releases) -> Bracket:
    """The capacities under which exactly the requests that were refused are refused."""
    high: list[int] = []
    if not history.settings.collects_garbage:
        before, asked = _refusals(history, runs)
        high = (before + asked)[~runs.by_program].tolist()
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
    asked = [_wanted(history, row) if row < len(history) else 0 for row in runs.end.tolist()]
    return reserved[runs.first], np.array(asked, np.int64)


def _wanted(history: History, row: int) -> int:
    """Bytes a request needs from the device: the segment or pages it got, or would have needed."""
    kind, size = int(history.kind[row]), int(history.size[row])
    if kind != OOM:
        total = 0
        while row < len(history) and history.kind[row] in (SEGMENT_ALLOC, SEGMENT_MAP):
            total += int(history.size[row])
            row += 1
        return total
    settings = history.settings
    if settings.expandable_segments:
        page = TORCH.small_segment_bytes if size <= TORCH.small_limit_bytes else settings.large_segment_bytes
        return -(-size // page) * page
    return segment_size(size, settings, TORCH)


def refused_mallocs(history: History, runs: Releases) -> frozenset[int]:
    """The requests (numbered from 1, failed ones counted) that the device refused at first."""
    number = np.cumsum((history.kind == ALLOC) | (history.kind == OOM))
    rows = runs.end[~runs.by_program]
    failed = np.flatnonzero(history.kind == OOM)
    return frozenset((np.append(0, number)[rows] + 1).tolist()) | frozenset(number[failed].tolist())
