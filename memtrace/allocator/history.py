"""The recorded history of one CUDA device: the allocator's trace entries, and the segments and blocks at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.device_memory import OOM as OOM
from memtrace.allocator.device_memory import SEGMENT_ALLOC as SEGMENT_ALLOC
from memtrace.allocator.device_memory import SEGMENT_FREE as SEGMENT_FREE
from memtrace.allocator.device_memory import SEGMENT_MAP as SEGMENT_MAP
from memtrace.allocator.device_memory import SEGMENT_UNMAP as SEGMENT_UNMAP
from memtrace.allocator.settings import AllocatorSettings
from memtrace.errors import TraceError
from memtrace.format.schema import EVENT_KINDS
from memtrace.units import format_bytes

ALLOC: Final = EVENT_KINDS.index("alloc")
FREE: Final = EVENT_KINDS.index("free")
FREE_REQUESTED: Final = EVENT_KINDS.index("free_requested")

MAX_BYTES: Final = 1 << 42
"""Largest plausible size: 4 TiB."""
MAX_ADDRESS: Final = 1 << 61
"""Largest plausible address."""

Int64s = NDArray[np.int64]
Int8s = NDArray[np.int8]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSegments:
    """Segments that the allocator holds, one per row; an expandable one has a row per mapped part. Sizes in bytes."""

    address: Int64s
    size: Int64s
    stream: Int64s
    pool: Int64s
    """0 for the default pool, else the number of a private pool; odd for a CUDA graph (`schema`, events.pool)."""
    small: Bools
    expandable: Bools

    def __len__(self) -> int:
        return len(self.address)

    def take(self, rows: Int64s | Bools) -> RecordedSegments:
        """Return the given rows, in that order."""
        return RecordedSegments(**{name: getattr(self, name)[rows] for name in _SEGMENT_COLUMNS})

    def containing(self, address: Int64s) -> Int64s:
        """Return the row of the segment that contains each address; -1: none."""
        if not len(self):
            return np.full(len(address), -1, np.int64)
        order = np.argsort(self.address, kind="stable")
        place = np.searchsorted(self.address[order], address, side="right") - 1
        row = order[np.maximum(place, 0)]
        inside = (place >= 0) & (address < self.address[row] + self.size[row])
        return np.where(inside, row, -1)


_SEGMENT_COLUMNS: Final = ("address", "size", "stream", "pool", "small", "expandable")


def concatenate_segments(first: RecordedSegments, second: RecordedSegments) -> RecordedSegments:
    """Return the rows of both tables."""
    columns = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in _SEGMENT_COLUMNS}
    return RecordedSegments(**columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBlocks:
    """Blocks that are in use, or waiting for a stream, at the end of the history. Sizes in bytes."""

    address: Int64s
    size: Int64s
    """Size of the block, rounding and slack included; -1: unknown."""
    requested: Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorHistory:
    """The trace entries of one device, oldest first, and the state after the last one.

    Arrays without a docstring have one element per entry. Sizes are in bytes; -1 means that an entry has no such value.
    """

    device: str
    kind: Int8s
    """Codes into `EVENT_KINDS`; `free` is the completed free."""
    address: Int64s
    size: Int64s
    """Bytes requested (alloc, free, oom), or size of the segment or pages (segment_*)."""
    stream: Int64s
    pool: Int64s
    """As in `RecordedSegments`; -1: unknown."""
    by_program: Int8s
    """For segment_free and segment_unmap: 1 if the program called `empty_cache`, 0 if the allocator released the memory
    to serve a request, -1 if unknown."""
    device_free: Int64s
    """For oom: bytes that the driver had free; -1: unknown."""
    time_ns: Int64s
    settings: AllocatorSettings
    segments: RecordedSegments
    """Segments after the last entry."""
    blocks: RecordedBlocks
    """Blocks after the last entry."""
    device_bytes: int | None = None
    """Memory of the device; None: unknown."""
    estimated_device_bytes: int | None = None
    """Most memory that the device can have by the distances between virtual ranges; None: unknown."""
    torch: str | None = None
    """Version of PyTorch that recorded the history; None: unknown."""

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def allowed_bytes(self) -> int | None:
        """Most that the allocator may reserve by the memory fraction; None: no limit, or unknown."""
        fraction = self.settings.memory_fraction
        return None if fraction is None or self.device_bytes is None else int(fraction * self.device_bytes)

    @property
    def range_device_bytes(self) -> int | None:
        """Memory of the device that determines the length of virtual ranges; None: unknown."""
        return self.estimated_device_bytes if self.device_bytes is None else self.device_bytes

    @property
    def reserved_at_start(self) -> int:
        """Bytes reserved before the first entry: those at the end less the net change of all entries."""
        return int(self.segments.size.sum()) - int(reserved_changes(self.kind, self.size).sum())

    def reserved(self) -> Int64s:
        """Return the bytes reserved after each entry."""
        return self.reserved_at_start + np.cumsum(reserved_changes(self.kind, self.size))

    @property
    def peak_reserved(self) -> int:
        """Largest number of bytes reserved, as the entries say."""
        return max(self.reserved_at_start, int(self.reserved().max(initial=0)))

    def request_numbers(self) -> Int64s:
        """Return the number of requests, failed ones included, up to and including each entry."""
        return np.cumsum((self.kind == ALLOC) | (self.kind == OOM))


def check_plausible(history: AllocatorHistory) -> None:
    """Raise TraceError where no device can have a size or an address of the history."""
    for what, sizes, smallest in (
        ("an entry", history.size[history.kind != OOM], 0),  # a wrong shape asks for any size
        ("a segment", history.segments.size, 1),
        ("a block", history.blocks.size, -1),
        ("a request", history.blocks.requested, 0),
    ):
        absurd = sizes[(sizes < smallest) | (sizes > MAX_BYTES)]
        if len(absurd):
            raise TraceError(
                f"{history.device}: the size of {what} is {int(absurd[0])} bytes, outside the plausible range up to "
                f"{format_bytes(MAX_BYTES)}. The file is damaged; record it again."
            )
    for address in (history.address, history.segments.address, history.blocks.address):
        absurd = address[(address > MAX_ADDRESS) | (address < -MAX_ADDRESS)]
        if len(absurd):
            raise TraceError(
                f"{history.device}: the address {int(absurd[0]) % (1 << 64):#x} is outside the plausible range. "
                "The file is damaged; record it again."
            )


def reserved_changes(kind: Int8s, size: Int64s) -> Int64s:
    """Return the bytes by which each entry changes the reserved memory."""
    taken = (kind == SEGMENT_ALLOC) | (kind == SEGMENT_MAP)
    released = (kind == SEGMENT_FREE) | (kind == SEGMENT_UNMAP)
    return np.where(taken, size, 0) - np.where(released, size, 0)


def resolve_pools(history: AllocatorHistory) -> Int64s:
    """Return the memory pool of each entry; where it is unknown, that of the final segment at its address, else 0."""
    row = history.segments.containing(history.address)
    pool_of_segment = np.append(history.segments.pool, 0)[row]
    return np.where(history.pool >= 0, history.pool, pool_of_segment)
