"""Mapped stretches of expandable segments before the first entry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from memtrace.planning.allocator.history import (
    ALLOC,
    FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    History,
    Segments,
)
from memtrace.planning.allocator.rules import Rules

Key = tuple[int, int, bool]  # stream, pool, small
PAGE: Final = 2 << 20  # every mapping is a multiple of this


def expandable_at_start(history: History, rules: Rules) -> tuple[Segments, int]:
    """The stretches mapped before the first entry, and how many entries contradict those at the end.

    The pools of `history` must be resolved.
    """
    pages: dict[Key, set[int]] = {}
    final = history.segments.take(history.segments.expandable)
    for key, address, size in _rows(final):
        pages.setdefault(key, set()).update(range(address, address + size, PAGE))
    contradictions = 0
    rows = np.flatnonzero((history.kind == SEGMENT_MAP) | (history.kind == SEGMENT_UNMAP))
    for i in reversed(rows.tolist()):
        address, size = int(history.address[i]), int(history.size[i])
        small = _is_small(history, i, final, rules)
        held = pages.setdefault((int(history.stream[i]), int(history.pool[i]), small), set())
        touched = set(range(address, address + size, PAGE))
        if history.kind[i] == SEGMENT_MAP:
            contradictions += not touched <= held
            held -= touched
        else:
            contradictions += not touched.isdisjoint(held)
            held |= touched
    stretches = [(key, *stretch) for key, held in pages.items() for stretch in _stretches(held)]
    return _as_segments(stretches), contradictions


def _rows(segments: Segments) -> Iterator[tuple[Key, int, int]]:
    for i in range(len(segments)):
        key = (int(segments.stream[i]), int(segments.pool[i]), bool(segments.small[i]))
        yield key, int(segments.address[i]), int(segments.size[i])


def _is_small(history: History, i: int, final: Segments, rules: Rules) -> bool:
    """Whether pages belong to the small pool: by their size, else by the requests inside, else by what is near."""
    address, size = int(history.address[i]), int(history.size[i])
    if size % history.settings.large_segment_bytes:
        return True
    inside = (history.address >= address) & (history.address < address + size)
    requests = history.size[inside & ((history.kind == ALLOC) | (history.kind == FREE))]
    if len(requests):
        return bool(requests.max() <= rules.small_limit_bytes)
    near = final.take(final.stream == history.stream[i])
    return bool(near.small[np.argmin(np.abs(near.address - address))]) if len(near) else False


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
