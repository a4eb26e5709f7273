"""Constants and rules of PyTorch's CUDA caching allocator. Every module that needs one of them imports it from here.

The constants and functions are the same in torch 2.0 to 2.13 unless a docstring says otherwise. The source of each is
named by its C++ function or constant, all of them in `c10/cuda/CUDACachingAllocator.cpp` (from torch 2.9 on the
constants are in `c10/core/AllocatorConfig.h`). This module imports nothing from memtrace, so that readers, analyses and
the recorder can use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]

MIB: Final = 1 << 20

MIN_BLOCK_BYTES: Final = 512
"""Block sizes are multiples of this (`kMinBlockSize`)."""
SMALL_REQUEST_BYTES: Final = MIB
"""Largest rounded request that the small pool serves (`kSmallSize`)."""
SMALL_SEGMENT_BYTES: Final = 2 * MIB
"""Segment of the small pool, and page of its expandable segments (`kSmallBuffer`)."""
LARGE_SEGMENT_BYTES: Final = 20 * MIB
"""Segment for requests above `SMALL_REQUEST_BYTES` and below `MIN_LARGE_ALLOC_BYTES`, and page of the large pool's
expandable segments (`kLargeBuffer`). The setting `large_segment_size_mb` of torch 2.11 and later replaces it."""
MIN_LARGE_ALLOC_BYTES: Final = 10 * MIB
"""Rounded requests of at least this size get a segment of their own size (`kMinLargeAlloc`)."""
ROUND_LARGE_BYTES: Final = 2 * MIB
"""Segments of that kind are multiples of this (`kRoundLarge`)."""
MAX_SLACK_BYTES: Final = SMALL_REQUEST_BYTES
"""Most by which a large block exceeds its rounded request: a larger remainder is split off (`should_split`).
Hence free blocks of the large pool are always larger than this, and a smaller gap behind a live block belongs to that
block."""
NO_LIMIT: Final = 1 << 62
"""Stands for an absent `max_split_size_mb`; larger than any block."""

_LARGEST_DEVICE_BYTES: Final = 512 << 30  # more than any device has: keeps virtual ranges apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The behaviour that no setting changes. The rules are fields so that a test can break one and show that recorded
    histories no longer replay."""

    min_block_bytes: int = MIN_BLOCK_BYTES
    """Requests are rounded up to multiples of this (`round_size`)."""
    small_request_bytes: int = SMALL_REQUEST_BYTES
    """Largest rounded request that the small pool serves (`get_pool`)."""
    small_segment_bytes: int = SMALL_SEGMENT_BYTES
    """Segment of the small pool (`get_allocation_size`)."""
    min_large_alloc_bytes: int = MIN_LARGE_ALLOC_BYTES
    """Smallest rounded request that gets a segment of its own size (`get_allocation_size`)."""
    round_large_bytes: int = ROUND_LARGE_BYTES
    """Multiple to which such a segment is rounded up (`get_allocation_size`)."""
    min_small_remainder_bytes: int = MIN_BLOCK_BYTES
    """Smallest remainder that is split off a block of the small pool (`should_split`)."""
    min_large_remainder_bytes: int = MAX_SLACK_BYTES + 1
    """Smallest remainder that is split off a block of the large pool (`should_split`)."""
    splits_expandable_like_small: bool = True
    """With expandable segments, blocks of the large pool are split like those of the small pool (`should_split`)."""
    splits_large: bool = True
    """Blocks of the large pool are split (`should_split`)."""
    merges_neighbours: bool = True
    """A freed block merges with its free neighbours (`try_merge_blocks`)."""
    fit: Literal["best", "first"] = "best"
    """A request gets the smallest free block that is large enough, not the first by address (`get_free_block`)."""
    tie_break: Literal["address", "segment_age", "highest_address"] = "address"
    """Choice among free blocks of equal size: the lowest address (`BlockComparatorSize`, up to torch 2.11), or the
    oldest segment and then the lowest address (`BlockComparatorSizeCounterAddress`, torch 2.13)."""
    separates_streams: bool = True
    """A block is reused only on the stream it was allocated for (`BlockComparatorSize`)."""
    releases_large_first: bool = True
    """`empty_cache` releases the large pool before the small pool (`release_cached_blocks`)."""
    frees_at: Literal["completion", "request"] = "completion"
    """A block becomes free when the streams that use it are done, not when the program frees it (`free`)."""
    infers_slack: bool = True
    """Blocks older than the history can be larger than their rounded request (`should_split`)."""


TORCH: Final = Rules()
"""Rules of torch 2.0 to 2.11."""
TORCH_2_13: Final = Rules(tie_break="segment_age")
"""Rules of torch 2.13."""


def round_size(requested: int, divisions: tuple[int, ...] = (), rules: Rules = TORCH) -> int:
    """Return the bytes that a request counts for (`round_size`, `roundup_power2_next_division`).

    Args:
        requested: bytes that the program asked for.
        divisions: `AllocatorSettings.roundup_power2_divisions`: one count for each power of two from 1 MiB; (): off.
        rules: the allocator's rules.
    """
    unit = rules.min_block_bytes
    if divisions and requested >= unit:
        count = divisions[min(max(0, requested.bit_length() - 21), len(divisions) - 1)]
        if count > 1 and requested > unit * count:
            power = 1 << (requested.bit_length() - 1)
            step = power >> (count.bit_length() - 1)
            if step == 0:
                return requested if requested == power else 2 * power
            return -(-requested // step) * step
    return (requested + unit - 1) // unit * unit or unit


def round_sizes(requested: Int64Array, divisions: tuple[int, ...] = (), rules: Rules = TORCH) -> Int64Array:
    """Apply `round_size` to an array of requests."""
    if divisions:
        return np.array([round_size(size, divisions, rules) for size in requested.tolist()], np.int64)
    return np.maximum(-(-requested // rules.min_block_bytes), 1) * rules.min_block_bytes


def uses_small_pool(rounded: int, rules: Rules = TORCH) -> bool:
    """Return whether the small pool serves a rounded request (`get_pool`)."""
    return rounded <= rules.small_request_bytes


def segment_size(rounded: int, *, large_segment_bytes: int = LARGE_SEGMENT_BYTES, rules: Rules = TORCH) -> int:
    """Return the size of the new segment for a rounded request (`get_allocation_size`)."""
    if uses_small_pool(rounded, rules):
        return rules.small_segment_bytes
    if rounded < rules.min_large_alloc_bytes:
        return large_segment_bytes
    return round_up(rounded, rules.round_large_bytes)


def page_size(small: bool, *, large_segment_bytes: int = LARGE_SEGMENT_BYTES, rules: Rules = TORCH) -> int:
    """Return the page size of the expandable segments of a pool (`ExpandableSegment::segment_size_`)."""
    return rules.small_segment_bytes if small else large_segment_bytes


def device_request_size(
    rounded: int, *, expandable_segments: bool, large_segment_bytes: int = LARGE_SEGMENT_BYTES, rules: Rules = TORCH
) -> int:
    """Return the bytes that the device must give for a rounded request that no free block serves.

    With expandable segments this is an upper limit: free memory at the end of the mapped range counts too.
    """
    if expandable_segments:
        page = page_size(uses_small_pool(rounded, rules), large_segment_bytes=large_segment_bytes, rules=rules)
        return round_up(rounded, page)
    return segment_size(rounded, large_segment_bytes=large_segment_bytes, rules=rules)


class SplitRule(NamedTuple):
    """When a free block of one pool is split for a request (`should_split`)."""

    min_remainder_bytes: int
    """Smallest remainder that is split off."""
    request_limit_bytes: int
    """Only rounded requests below this size cause a split."""

    def should_split(self, block_bytes: int, rounded: int) -> bool:
        """Return whether a block of `block_bytes` is split for a rounded request."""
        return block_bytes - rounded >= self.min_remainder_bytes and rounded < self.request_limit_bytes


NEVER_SPLIT: Final = SplitRule(NO_LIMIT, 0)
"""Rule of a memory pool created with `no_split=True`."""


def split_rule(small: bool, *, expandable_segments: bool, max_split_bytes: int, rules: Rules = TORCH) -> SplitRule:
    """Return the rule by which blocks of the small or the large pool are split (`should_split`)."""
    if small or (expandable_segments and rules.splits_expandable_like_small):
        return SplitRule(rules.min_small_remainder_bytes, NO_LIMIT)
    return SplitRule(rules.min_large_remainder_bytes, max_split_bytes) if rules.splits_large else NEVER_SPLIT


def block_size_limit(rounded: int, max_split_bytes: int, max_rounding_bytes: int) -> int:
    """Return the size from which on a free block is too large to serve a rounded request (`get_free_block`).

    Args:
        rounded: the rounded request.
        max_split_bytes: the setting `max_split_size_mb`; `NO_LIMIT` when it is unset.
        max_rounding_bytes: the setting `max_non_split_rounding_mb`; the large segment size when it is unset.
    """
    return rounded + max_rounding_bytes if rounded >= max_split_bytes else max_split_bytes


def virtual_range_size(device_bytes: int | None, page: int) -> int:
    """Return the length of an expandable segment's address range: 9/8 of the device's memory in whole pages.

    Source: `ExpandableSegment::ExpandableSegment`. `device_bytes` is None where the device's size is unknown.
    """
    return round_up((_LARGEST_DEVICE_BYTES if device_bytes is None else device_bytes) * 9 // 8, page)


def device_size_of_range(length: int, page: int) -> int:
    """Return the memory of a device whose virtual ranges are at most `length` long (`virtual_range_size`)."""
    return length // page * page * 8 // 9


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple
