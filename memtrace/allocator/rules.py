"""The fixed rules of CUDA's caching allocator: its numbers and its choices.

Source of each: `c10/cuda/CUDACachingAllocator.cpp` of torch 2 (constants `kMinBlockSize`, `kSmallSize`,
`kSmallBuffer`, `kMinLargeAlloc`, `kRoundLarge`; functions `round_size`, `get_allocation_size`,
`should_split`, `get_free_block`, `try_merge_blocks`, `release_cached_blocks`), the same in torch 2.0 to 2.13.
They are fields so that a test can break one and see that real histories no longer replay.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.settings import MIB, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What settings cannot change. Bytes throughout."""

    round_bytes: int = 512
    """Requests are rounded up to multiples of this, at least one (`round_size`)."""
    small_limit_bytes: int = MIB
    """Rounded requests up to this are served by the small pool (`get_pool`)."""
    small_segment_bytes: int = 2 * MIB
    """Segment, and expandable page, of the small pool (`get_allocation_size`)."""
    own_segment_bytes: int = 10 * MIB
    """Rounded requests from this on get a segment of their own size (`get_allocation_size`)."""
    segment_round_bytes: int = 2 * MIB
    """... rounded up to this (`get_allocation_size`)."""
    min_small_remainder_bytes: int = 512
    """Least remainder for which a block of the small pool is split (`should_split`)."""
    min_large_remainder_bytes: int = MIB + 1
    """The same in the large pool: strictly more than 1 MiB (`should_split`)."""
    expandable_splits_as_small: bool = True
    """With expandable segments the large pool splits as the small one does (`should_split`)."""
    split_large: bool = True
    """Blocks of the large pool are split at all (`should_split`)."""
    merge: bool = True
    """A freed block merges with its free neighbours (`try_merge_blocks`)."""
    fit: Literal["best", "first"] = "best"
    """The smallest block that is large enough is taken, not the first by address (`get_free_block`)."""
    tie: Literal["address", "creation", "highest"] = "address"
    """Among blocks of one size the lowest address (`BlockComparatorSize`, to torch 2.11) or the segment taken
    first, then the lowest address (`BlockComparatorSizeCounterAddress`, torch 2.13); the highest address
    never."""
    separate_streams: bool = True
    """A block stays with the stream it was allocated for (`BlockComparatorSize`)."""
    release_large_first: bool = True
    """The cache is given back large pool first (`release_cached_blocks`)."""
    free_at: Literal["completed", "requested"] = "completed"
    """A block is free once the streams that use it are done, not when the program gives it back (`free`)."""
    start_slack: bool = True
    """Blocks older than the history may be longer than their request (`should_split`, seen from behind)."""


TORCH = Rules()
"""The rules of torch 2.0 to 2.11."""
TORCH_2_13 = Rules(tie="creation")
"""The rules of torch 2.13, where addresses no longer decide."""


def round_size(requested: int, divisions: tuple[int, ...], rules: Rules) -> int:
    """Bytes a request counts as (`round_size`, `roundup_power2_next_division`); `Settings` has divisions."""
    unit = rules.round_bytes
    if divisions and requested >= unit:
        count = divisions[min(max(0, requested.bit_length() - 21), len(divisions) - 1)]
        if count > 1 and requested > unit * count:
            power = 1 << (requested.bit_length() - 1)
            step = power >> (count.bit_length() - 1)
            if step == 0:
                return requested if requested == power else 2 * power
            return -(-requested // step) * step
    return (requested + unit - 1) // unit * unit or unit


def round_sizes(requested: NDArray[np.int64], settings: Settings, rules: Rules) -> NDArray[np.int64]:
    """`round_size` of many requests."""
    divisions = settings.roundup_power2_divisions
    if divisions:
        return np.array([round_size(size, divisions, rules) for size in requested.tolist()], np.int64)
    return np.maximum(-(-requested // rules.round_bytes), 1) * rules.round_bytes
