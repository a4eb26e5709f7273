"""What was recorded of one CUDA device: the allocator's entries and what it held at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from memtrace.allocator.settings import Settings
from memtrace.errors import TraceError
from memtrace.format.schema import EVENT_KINDS

ALLOC: Final = EVENT_KINDS.index("alloc")
FREE: Final = EVENT_KINDS.index("free")
FREE_REQUESTED: Final = EVENT_KINDS.index("free_requested")
SEGMENT_ALLOC: Final = EVENT_KINDS.index("segment_alloc")
SEGMENT_FREE: Final = EVENT_KINDS.index("segment_free")
SEGMENT_MAP: Final = EVENT_KINDS.index("segment_map")
SEGMENT_UNMAP: Final = EVENT_KINDS.index("segment_unmap")
OOM: Final = EVENT_KINDS.index("oom")

MAX_BYTES: Final = 1 << 42
MAX_ADDRESS: Final = 1 << 61

Int64s = NDArray[np.int64]
Int8s = NDArray[np.int8]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segments:
    """Segments the allocator holds, one row each; an expandable one is a stretch of mapped pages. Bytes."""

    address: Int64s
    size: Int64s
    stream: Int64s
    pool: Int64s
    """0 the default pool, else a private one; odd: of a CUDA graph (`schema`, events.pool)."""
    small: Bools
    expandable: Bools

    def __len__(self) -> int:
        return len(self.address)

    def take(self, rows: Int64s | Bools) -> Segments:
        """The rows named, in that order."""
        return Segments(**{name: getattr(self, name)[rows] for name in _SEGMENT_COLUMNS})

    def containing(self, address: Int64s) -> Int64s:
        """Row of the segment each address lies in; -1: in none."""
        order = np.argsort(self.address, kind="stable")
        at = np.searchsorted(self.address[order], address, side="right") - 1
        row = order[np.maximum(at, 0)] if len(self) else np.zeros(len(address), np.int64)
        if not len(self):
            return np.full(len(address), -1, np.int64)
        inside = (at >= 0) & (address < self.address[row] + self.size[row])
        return np.where(inside, row, -1)


_SEGMENT_COLUMNS: Final = ("address", "size", "stream", "pool", "small", "expandable")


def concatenate(first: Segments, second: Segments) -> Segments:
    """The rows of both."""
    columns = {name: np.concatenate([getattr(first, name), getattr(second, name)]) for name in _SEGMENT_COLUMNS}
    return Segments(**columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks in use, or waiting for a stream, at the end of the history. Bytes."""

    address: Int64s
    size: Int64s
    """True length; -1: not told."""
    requested: Int64s


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The entries of one device, oldest first, and the state they lead to.

    Columns run over the entries; bytes; -1 stands for what an entry does not have.
    """

    device: str
    kind: Int8s
    """Codes into `EVENT_KINDS`; `free` is the completed free."""
    address: Int64s
    size: Int64s
    """Bytes asked for (alloc, free, oom), bytes of the segment or pages (segment_*)."""
    stream: Int64s
    pool: Int64s
    """As in `Segments`; -1: not told."""
    by_program: Int8s
    """segment_free, segment_unmap: 1 the program called `empty_cache`, 0 the allocator did it alone, -1 not
    told."""
    device_free: Int64s
    """oom: bytes the driver had free; -1: not told."""
    time_ns: Int64s
    settings: Settings
    segments: Segments
    blocks: Blocks
    device_bytes: int | None = None
    """Memory of the device; None: not told."""
    torch: str | None = None
    """Version of torch that recorded it; None: not told."""

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def reserved_at_start(self) -> int:
        """Bytes reserved before the first entry: those at the end less what the entries took."""
        return int(self.segments.size.sum()) - int(segment_change(self.kind, self.size).sum())

    def reserved(self) -> Int64s:
        """Bytes reserved after each entry."""
        return self.reserved_at_start + np.cumsum(segment_change(self.kind, self.size))

    @property
    def peak_reserved(self) -> int:
        """Largest number of bytes ever reserved, by the entries' own account."""
        return max(self.reserved_at_start, int(self.reserved().max(initial=0)))


def check(history: History) -> None:
    """TraceError where a size or an address is one that no device can have."""
    for what, sizes, least in (
        ("an entry", history.size, 0),
        ("a segment", history.segments.size, 1),
        ("a block's length", history.blocks.size, -1),
        ("a block's request", history.blocks.requested, 0),
    ):
        absurd = sizes[(sizes < least) | (sizes > MAX_BYTES)]
        if len(absurd):
            raise TraceError(f"{history.device}: the size of {what} is {int(absurd[0])} bytes; no device holds that")
    _check_addresses(history)


def _check_addresses(history: History) -> None:
    for address in (history.address, history.segments.address, history.blocks.address):
        absurd = address[(address > MAX_ADDRESS) | (address < -MAX_ADDRESS)]
        if len(absurd):
            raise TraceError(f"{history.device}: memory at {int(absurd[0]) % (1 << 64):#x}; no device maps that high")


def segment_change(kind: Int8s, size: Int64s) -> Int64s:
    """Bytes each entry adds to what is reserved."""
    taken = (kind == SEGMENT_ALLOC) | (kind == SEGMENT_MAP)
    given = (kind == SEGMENT_FREE) | (kind == SEGMENT_UNMAP)
    return np.where(taken, size, 0) - np.where(given, size, 0)


def resolve_pools(history: History) -> Int64s:
    """The pool of each entry; where it is not told, that of the final segment its address lies in, else the
    default."""
    row = history.segments.containing(history.address)
    known = np.append(history.segments.pool, 0)[row]
    return np.where(history.pool >= 0, history.pool, known)
