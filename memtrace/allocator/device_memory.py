"""The device as the caching allocator sees it, and the account of what the allocator has taken from it."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from memtrace.allocator.blocks import FreeList
from memtrace.format.schema import EVENT_KINDS

SEGMENT_ALLOC: Final = EVENT_KINDS.index("segment_alloc")
SEGMENT_FREE: Final = EVENT_KINDS.index("segment_free")
SEGMENT_MAP: Final = EVENT_KINDS.index("segment_map")
SEGMENT_UNMAP: Final = EVENT_KINDS.index("segment_unmap")
OOM: Final = EVENT_KINDS.index("oom")


class SegmentEvent(NamedTuple):
    """One operation on the device: a segment or pages taken or released, or a request that failed."""

    request: int
    """Number of requests so far, the current one included."""
    kind: int
    """Code into `EVENT_KINDS`."""
    address: int
    size: int


class Device(Protocol):
    """The driver: gives segments, address ranges and pages. All sizes are in bytes.

    `request` is the number of the request that needs the memory, counted from 1; `reserved` is what the allocator
    holds.
    """

    total_bytes: int | None
    """Memory of the device, which memory fractions refer to; None: unknown."""

    def allocate(self, size: int, *, request: int, reserved: int) -> int | None:
        """Return the address of a new segment; None: out of memory."""

    def reserve_range(self, free_list: FreeList, *, request: int) -> tuple[int, int]:
        """Return address and length of a new virtual range for an expandable segment; takes no memory."""

    def restore_range(self, address: int, length: int) -> None:
        """Note a virtual range that is older than the first request."""

    def release_range(self, address: int) -> None:
        """Give up the virtual range that starts at an address; none of its pages is mapped."""

    def range_size(self, page: int) -> int:
        """Return the length of the virtual ranges with pages of a size."""

    def map_pages(self, size: int, *, request: int, reserved: int) -> bool:
        """Return whether the device gives pages of `size` bytes in all."""


class DeviceMemory:
    """What an allocator holds of its device, with a log of every segment event."""

    def __init__(self, device: Device, *, orders_by_age: bool) -> None:
        self.device = device
        self.reserved = 0
        self.num_requests = self.num_segments = self.num_device_allocs = 0
        self.log: list[SegmentEvent] = []
        self._orders_by_age = orders_by_age
        self._num_ages = 0

    def take_segment(self, size: int) -> int | None:
        """Take a segment and return its address; None where the device refuses."""
        address = self.device.allocate(size, request=self.num_requests, reserved=self.reserved)
        if address is None:
            return None
        self.reserved += size
        self.num_segments += 1
        self.num_device_allocs += 1
        self._append(SEGMENT_ALLOC, address, size)
        return address

    def release_segment(self, address: int, size: int) -> None:
        """Return a segment to the device."""
        self.reserved -= size
        self.num_segments -= 1
        self._append(SEGMENT_FREE, address, size)

    def reserve_range(self, free_list: FreeList) -> tuple[int, int]:
        """Reserve a virtual range and return its address and length."""
        self.num_segments += 1
        return self.device.reserve_range(free_list, request=self.num_requests)

    def release_range(self, address: int) -> None:
        """Give up a virtual range that has no mapped pages."""
        self.num_segments -= 1
        self.device.release_range(address)

    def map_pages(self, address: int, size: int) -> bool:
        """Map pages at `address`; return False where the device refuses."""
        if not self.device.map_pages(size, request=self.num_requests, reserved=self.reserved):
            return False
        self.reserved += size
        self.num_device_allocs += 1
        self._append(SEGMENT_MAP, address, size)
        return True

    def unmap_pages(self, address: int, size: int) -> None:
        """Return pages to the device."""
        self.reserved -= size
        self._append(SEGMENT_UNMAP, address, size)

    def log_failure(self, size: int) -> None:
        """Log a request of a rounded size that failed."""
        self._append(OOM, 0, size)

    def next_age_key(self) -> int:
        """Return the key that orders blocks of the next segment behind those of older ones (`Rules.tie_break`)."""
        self._num_ages += self._orders_by_age
        return self._num_ages << 64

    def _append(self, kind: int, address: int, size: int) -> None:
        self.log.append(SegmentEvent(self.num_requests, kind, address, size))
