"""Measures the copies that plans make between a device and host memory on this machine."""

from __future__ import annotations

from typing import Final

import torch

from memtrace.analysis.bandwidth import COPY_SIZES, CopyBandwidths, best_copy_times, fit_copy_cost
from memtrace.errors import MemtraceError
from memtrace.execution.host_memory import HostMemory, host_memory_for

_REGION_BYTES: Final = COPY_SIZES[-1]
_STRIDE_BYTES: Final = 9 << 20
"""Distance of copies that follow each other."""


def measure_bandwidths(device: str | None = None) -> CopyBandwidths:
    """Measure the copies that ``memtrace.apply`` makes between a device and host memory.

    Args:
        device: ``cpu`` (copies to memory-mapped files) or a GPU (copies to pinned memory); None: the first GPU, or
            ``cpu`` without one.

    Raises:
        MemtraceError: There is no room for the largest copy.
    """
    place = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    try:
        memory = host_memory_for(place)
        try:
            return _measure(place, memory)
        finally:
            memory.close()
    except RuntimeError as error:
        raise MemtraceError(f"copies of {place} cannot be measured: {error}") from error


def _measure(place: torch.device, memory: HostMemory) -> CopyBandwidths:
    host = memory.allocate(_REGION_BYTES)
    content = torch.empty(_REGION_BYTES, dtype=torch.uint8, device=place).fill_(1)
    memory.copy_out(host, content).finish()  # the first copy also maps the pages of the file
    begin = 0

    def next_range(num_bytes: int) -> slice:
        # Elsewhere each time: what a plan copies is no longer, or not yet, in the caches.
        nonlocal begin
        begin = begin + _STRIDE_BYTES if begin + _STRIDE_BYTES + num_bytes <= _REGION_BYTES else 0
        return slice(begin, begin + num_bytes)

    def copy_out(num_bytes: int) -> None:
        place_of = next_range(num_bytes)
        memory.copy_out(host[place_of], content[place_of]).finish()

    def copy_in(num_bytes: int) -> None:
        # As when a plan is applied, the copy back goes to new memory.
        memory.copy_in(torch.empty(num_bytes, dtype=torch.uint8, device=place), host[next_range(num_bytes)]).finish()

    d2h, h2d = (fit_copy_cost(best_copy_times(copy)) for copy in (copy_out, copy_in))
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "memory-mapped files of this machine"
    return CopyBandwidths(d2h, h2d, f"measured, {name}")
