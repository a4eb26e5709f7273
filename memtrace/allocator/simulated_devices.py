"""Devices for the allocator model: one that answers as the recorded device did, and synthetic ones for predictions."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from memtrace.allocator.blocks import FreeList
from memtrace.allocator.rules import virtual_range_size

AddressOrder = Literal["ascending", "descending", "random"]
ADDRESS_ORDERS: Final[tuple[AddressOrder, ...]] = ("ascending", "descending", "random")

FIRST_SYNTHETIC_ADDRESS: Final = 1 << 62
"""Synthetic addresses of a replay start here, above every recorded address."""
_STRIDE: Final = 1 << 40  # distance of synthetic addresses: larger than any segment
_NUM_SHUFFLED: Final = 1 << 14  # number of segments whose addresses are shuffled together


class RecordedDeviceAlloc(NamedTuple):
    """Memory that the recorded device gave: a segment, or pages of an expandable segment. Sizes in bytes."""

    request: int
    """Number of the request that it served, counted from 1."""
    mapped: bool
    """Pages of an expandable segment."""
    address: int
    size: int
    stream: int
    pool: int


class SyntheticDevice:
    """A device of a given capacity; new segments get ascending, descending or shuffled addresses."""

    def __init__(
        self, capacity: int | None = None, order: AddressOrder = "ascending", total_bytes: int | None = None
    ) -> None:
        self.total_bytes = capacity if total_bytes is None else total_bytes
        self._order = order
        self._shuffled = random.Random(0).sample(range(_NUM_SHUFFLED), _NUM_SHUFFLED) if order == "random" else []
        self._num_segments = 0
        self._capacity = FIRST_SYNTHETIC_ADDRESS if capacity is None else capacity

    def allocate(self, size: int, *, request: int, reserved: int) -> int | None:
        """Return the address of a new segment; None where the capacity is exhausted."""
        return self._next_address() if reserved + size <= self._capacity else None

    def reserve_range(self, free_list: FreeList, *, request: int) -> tuple[int, int]:
        """Return address and length of a new virtual range."""
        return self._next_address(), self.range_size(free_list.page)

    def restore_range(self, address: int, length: int) -> None:
        """Do nothing: ranges are far apart."""

    def release_range(self, address: int) -> None:
        """Do nothing: no address is used twice."""

    def range_size(self, page: int) -> int:
        """Return the length of a virtual range."""
        return virtual_range_size(self.total_bytes, page)

    def map_pages(self, size: int, *, request: int, reserved: int) -> bool:
        """Return whether the pages are within the capacity."""
        return reserved + size <= self._capacity

    def _next_address(self) -> int:
        self._num_segments += 1
        if self._order == "ascending":
            return self._num_segments * _STRIDE
        if self._order == "descending":
            return FIRST_SYNTHETIC_ADDRESS - self._num_segments * _STRIDE
        turn, place = divmod(self._num_segments, _NUM_SHUFFLED)
        return (1 + turn * _NUM_SHUFFLED + self._shuffled[place]) * _STRIDE


class ReplayDevice:
    """A device that returns the recorded addresses and runs out of memory at a capacity or at given requests.

    A request for memory that the history does not contain gets a synthetic address, so that the replay of a wrong model
    can continue and be compared to the end.

    Args:
        allocs: what the recorded device gave.
        capacity: bytes that the device gives; None: unlimited.
        refused_requests: numbers of the requests that the device refuses once, whatever its capacity.
        total_bytes: memory of the device; None: unknown.
        range_device_bytes: memory of the device that determines the length of virtual ranges; None: unknown.
    """

    def __init__(
        self,
        allocs: Sequence[RecordedDeviceAlloc],
        capacity: int | None = None,
        refused_requests: frozenset[int] = frozenset(),
        total_bytes: int | None = None,
        range_device_bytes: int | None = None,
    ) -> None:
        self.total_bytes = total_bytes
        self._range_device_bytes = range_device_bytes
        self._segments = {alloc.request: alloc for alloc in allocs if not alloc.mapped}
        self._pages = [alloc for alloc in allocs if alloc.mapped]
        self._capacity = FIRST_SYNTHETIC_ADDRESS if capacity is None else capacity
        self._to_refuse = set(refused_requests)
        self._ranges: dict[int, int] = {}  # end of each range by its start
        self._last_mapped = (0, 0)  # the last request that mapped pages, and how often it did
        self._synthetic = SyntheticDevice(total_bytes=total_bytes)

    def allocate(self, size: int, *, request: int, reserved: int) -> int | None:
        """Return the recorded address; None where the device refuses."""
        if self._refuses(size, request, reserved):
            return None
        recorded = self._segments.get(request)
        if recorded is not None and recorded.size == size:
            return recorded.address
        return FIRST_SYNTHETIC_ADDRESS + (self._synthetic.allocate(size, request=request, reserved=reserved) or 0)

    def reserve_range(self, free_list: FreeList, *, request: int) -> tuple[int, int]:
        """Return a range that starts where the next recorded pages of this stream and pool were mapped.

        A request may have mapped pages before: if the device then refused more, the allocator released their range with
        its cache, and tries again in a new one.
        """
        length = self.range_size(free_list.page)
        last_request, num_mapped = self._last_mapped
        next_pages = bisect_left(self._pages, request, key=lambda pages: pages.request)
        next_pages += num_mapped if request == last_request else 0
        for pages in self._pages[next_pages:]:
            size_matches = pages.size == free_list.page if free_list.pool.small else pages.size % free_list.page == 0
            same_list = pages.stream == free_list.stream and pages.pool == free_list.pool.private
            in_known_range = any(start <= pages.address < end for start, end in self._ranges.items())
            if same_list and size_matches and not in_known_range:
                address = pages.address
                break
        else:
            address = FIRST_SYNTHETIC_ADDRESS + self._synthetic.reserve_range(free_list, request=request)[0]
        self.restore_range(address, length)
        return address, length

    def restore_range(self, address: int, length: int) -> None:
        """Note a range that exists."""
        self._ranges[address] = address + length

    def release_range(self, address: int) -> None:
        """Forget a range: the driver can hand out its addresses again."""
        self._ranges.pop(address, None)

    def range_size(self, page: int) -> int:
        """Return the length of a virtual range."""
        return virtual_range_size(self._range_device_bytes, page)

    def map_pages(self, size: int, *, request: int, reserved: int) -> bool:
        """Return False where the device refuses."""
        if self._refuses(size, request, reserved):
            return False
        last_request, num_mapped = self._last_mapped
        self._last_mapped = request, num_mapped + 1 if request == last_request else 1
        return True

    def _refuses(self, size: int, request: int, reserved: int) -> bool:
        if request in self._to_refuse:
            self._to_refuse.discard(request)
            return True
        return reserved + size > self._capacity
