"""Mapped stretches of expandable segments before the first entry."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.allocator.history import (
    ALLOC,
    FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    Bools,
    History,
    Int64s,
    Segments,
)
from memtrace.allocator.rules import Rules, round_sizes

Key = tuple[int, int, bool]  # stream, pool, small
PAGE: Final = 2 << 20  # every mapping is a multiple of this
NEAR_BYTES: Final = 1 << 30  # virtual ranges lie further apart: each is longer than the device's memory


def expandable_at_start(history: History, rules: Rules) -> tuple[Segments, dict[Key, int], int]:
    """The stretches mapped before the first entry, the lowest address seen of each range, and contradictions.

    The last counts the entries that exclude what was mapped at the end. The pools of `history` must be
    resolved.
    """
    pages: dict[Key, set[int]] = {}
    lowest: dict[Key, int] = {}
    final = history.segments.take(history.segments.expandable)
    for key, address, size in _rows(final):
        pages.setdefault(key, set()).update(_pages(address, size))
    contradictions = 0
    evidence, owner = _evidence(history, rules), _owner(history.stream, history.pool)
    rows = np.flatnonzero((history.kind == SEGMENT_MAP) | (history.kind == SEGMENT_UNMAP))
    for i in reversed(rows.tolist()):
        address, size = int(history.address[i]), int(history.size[i])
        small = evidence.is_small(address, int(owner[i])) or size % history.settings.large_segment_bytes != 0
        key = (int(history.stream[i]), int(history.pool[i]), small)
        held, touched = pages.setdefault(key, set()), _pages(address, size)
        if history.kind[i] == SEGMENT_MAP:
            contradictions += not touched <= held
            held -= touched
            lowest[key] = min(address, lowest.get(key, address))
            if not held:  # the range began here: an empty one is given up
                del lowest[key]
        else:
            contradictions += not touched.isdisjoint(held)
            held |= touched
    stretches = [(key, *stretch) for key, held in pages.items() for stretch in _stretches(held)]
    return _as_segments(stretches), lowest, contradictions


def _pages(address: int, size: int) -> set[int]:
    return set(range(address, address + size, PAGE))


def _rows(segments: Segments) -> Iterator[tuple[Key, int, int]]:
    for i in range(len(segments)):
        key = (int(segments.stream[i]), int(segments.pool[i]), bool(segments.small[i]))
        yield key, int(segments.address[i]), int(segments.size[i])


@dataclass(frozen=True, slots=True)
class _Evidence:
    """Requests by address: those in the pages of the small pool are small, all others large."""

    address: Int64s
    small: Bools
    owner: Int64s
    """Stream and pool, as one number."""

    def is_small(self, address: int, owner: int) -> bool | None:
        """What the request nearest to an address says of the pages there; None: there is none in the same
        range."""
        rows = np.flatnonzero((self.owner == owner) & (np.abs(self.address - address) < NEAR_BYTES))
        if not len(rows):
            return None
        return bool(self.small[rows[np.argmin(np.abs(self.address[rows] - address))]])


def _evidence(history: History, rules: Rules) -> _Evidence:
    rows = np.flatnonzero((history.kind == ALLOC) | (history.kind == FREE))
    held = history.blocks
    place = history.segments.containing(held.address)
    address = np.concatenate([history.address[rows], held.address])
    size = np.concatenate([history.size[rows], held.requested])
    stream = np.concatenate([history.stream[rows], np.append(history.segments.stream, -1)[place]])
    pool = np.concatenate([history.pool[rows], np.append(history.segments.pool, -1)[place]])
    small = round_sizes(size, history.settings, rules) <= rules.small_limit_bytes
    return _Evidence(address, small, _owner(stream, pool))


def _owner(stream: Int64s, pool: Int64s) -> Int64s:
    return stream * 1_000_003 + pool


def _stretches(pages: set[int]) -> Iterator[tuple[int, int]]:
    begin = end = -1
    for page in sorted(pages):
        if page != end:
            if begin >= 0:
                yield begin, end - begin
            begin = page
        end = page + PAGE
    if begin >= 0:
        yield begin, end - begin


def _as_segments(stretches: list[tuple[Key, int, int]]) -> Segments:
    def column(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        return np.array(values, np.int64)

    return Segments(
        address=column([address for _, address, _ in stretches]),
        size=column([size for _, _, size in stretches]),
        stream=column([key[0] for key, _, _ in stretches]),
        pool=column([key[1] for key, _, _ in stretches]),
        small=np.array([key[2] for key, _, _ in stretches], np.bool_),
        expandable=np.ones(len(stretches), np.bool_),
    )
