"""The functions of ``torch.cuda`` that a recording calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch


class DeviceTotals(NamedTuple):
    """Memory totals of one CUDA device, in bytes."""

    device: int
    """Number of the device."""
    allocated_bytes: int
    """Allocated by torch."""
    reserved_bytes: int
    """Reserved by torch's caching allocator."""
    used_bytes: int
    """Used on the device by all processes."""


class DeviceMemory(NamedTuple):
    """Memory of one CUDA device, in bytes."""

    device: int
    """Number of the device."""
    total_bytes: int
    """All of it."""
    allowed_bytes: int | None
    """Most that torch's allocator may reserve; None: no limit, or unknown."""


class CudaDriver(Protocol):
    """The functions of ``torch.cuda`` that a recording calls."""

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call ``call`` when the program initialises CUDA; immediately if it already has."""

    def snapshot(self) -> Mapping[str, Any]:
        """``torch.cuda.memory._snapshot()``."""

    def totals(self) -> list[DeviceTotals]:
        """Memory totals of the devices in use."""

    def memory(self) -> list[DeviceMemory]:
        """Memory of the visible devices; CUDA must be initialised."""

    def enable_history(self, max_entries: int) -> bool:
        """Enable torch's allocator history, without stacks; False if the program has enabled it already."""

    def disable_history(self) -> None:
        """Undo ``enable_history``."""


class TorchDriver:
    """``CudaDriver`` on top of ``torch.cuda``."""

    def when_ready(self, call: Callable[[], None]) -> None:
        """See ``CudaDriver``. torch's allocator exists once CUDA is initialised and must not be used earlier."""
        torch.cuda._lazy_call(call)  # type: ignore[no-untyped-call]

    def snapshot(self) -> Mapping[str, Any]:
        """See ``CudaDriver``."""
        snapshot: Mapping[str, Any] = torch.cuda.memory._snapshot()
        return snapshot

    def totals(self) -> list[DeviceTotals]:
        """See ``CudaDriver``. Devices without segments are skipped: querying them would initialise them."""
        totals = []
        for device in range(torch.cuda.device_count()):
            reserved = torch.cuda.memory_reserved(device)
            if reserved > 0:
                free, total = torch.cuda.mem_get_info(device)
                totals.append(DeviceTotals(device, torch.cuda.memory_allocated(device), reserved, total - free))
        return totals

    def memory(self) -> list[DeviceMemory]:
        """See ``CudaDriver``."""
        return [
            DeviceMemory(device, torch.cuda.get_device_properties(device).total_memory, _allowed_bytes(device))
            for device in range(torch.cuda.device_count())
        ]

    def enable_history(self, max_entries: int) -> bool:
        """See ``CudaDriver``."""
        if torch._C._cuda_isHistoryEnabled():
            return False
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=max_entries)
        return True

    def disable_history(self) -> None:
        """See ``CudaDriver``."""
        torch.cuda.memory._record_memory_history(None)


def _allowed_bytes(device: int) -> int | None:
    """Return the most that torch's allocator may reserve on a device; None: no limit, or a torch that hides it."""
    read_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    # Reading the fraction of a device that the program does not use would initialise the device.
    if read_fraction is None or not torch._C._cuda_hasPrimaryContext(device):
        return None
    fraction = read_fraction(device)
    # torch multiplies the fraction with the total that the driver reports and cuts off what follows the point. Where it
    # returns the quotient of the two, the product can be a little less than the whole number.
    return int(fraction * torch.cuda.mem_get_info(device)[1] + 0.001) if fraction < 1 else None
