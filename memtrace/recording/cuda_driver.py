"""The functions of ``torch.cuda`` that a recording calls. None of them initialises CUDA."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, Literal, NamedTuple, Protocol

import torch

from memtrace.format.manifest import DeviceInfo

CudaAllocator = Literal["native", "cudaMallocAsync", "pluggable", "uncached"]
"""torch's caching allocator, that of the CUDA driver, the program's own, or none (caching is disabled)."""
NO_CACHING_VARIABLE: Final = "PYTORCH_NO_CUDA_MEMORY_CACHING"
_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed and hipStreamCaptureModeRelaxed


class DeviceTotals(NamedTuple):
    """Memory totals of one CUDA device, in bytes. None: unknown."""

    device: int
    """Number of the device."""
    allocated_bytes: int | None
    """Allocated by torch."""
    reserved_bytes: int | None
    """Reserved by torch's allocator."""
    used_bytes: int
    """Used on the device by all processes."""


class CudaDriver(Protocol):
    """The functions of ``torch.cuda`` that a recording calls."""

    def when_ready(self, call: Callable[[], None]) -> Callable[[], None]:
        """Call ``call`` when the program initialises CUDA; immediately if it already has.

        Returns:
            A function that cancels the call.
        """

    def allocator(self) -> CudaAllocator:
        """The allocator that the program uses."""

    def devices(self) -> dict[str, DeviceInfo]:
        """The devices that the process sees."""

    def snapshot(self) -> Mapping[str, Any]:
        """``torch.cuda.memory._snapshot()``."""

    def totals(self) -> list[DeviceTotals]:
        """Memory totals of the devices in use."""

    def has_history(self) -> bool:
        """Whether torch's allocator history is enabled."""

    def enable_history(self, max_entries: int) -> None:
        """Enable torch's allocator history, without stacks."""

    def disable_history(self) -> None:
        """Disable torch's allocator history."""

    def watch_history(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """Call ``before`` and ``after`` around every change that the program makes to the history.

        Returns:
            A function that ends this.
        """


class TorchDriver:
    """``CudaDriver`` on top of ``torch.cuda``."""

    def when_ready(self, call: Callable[[], None]) -> Callable[[], None]:
        """See ``CudaDriver``. torch runs queued calls after it creates the allocator and before anything uses it."""
        torch.cuda._lazy_call(call)  # type: ignore[no-untyped-call]

        def cancel() -> None:
            queue: list[Any] = torch.cuda._queued_calls
            with torch.cuda._initialization_lock:  # CUDA may be initialised by another thread at the moment
                queue[:] = [entry for entry in queue if entry[0] is not call]

        return cancel

    def allocator(self) -> CudaAllocator:
        """See ``CudaDriver``."""
        backend: CudaAllocator = torch.cuda.memory.get_allocator_backend()  # type: ignore[assignment]
        # torch checks whether the variable is set, not its value.
        return "uncached" if backend == "native" and NO_CACHING_VARIABLE in os.environ else backend

    def devices(self) -> dict[str, DeviceInfo]:
        """See ``CudaDriver``."""
        allocator = self.allocator()
        with relaxed_capture_mode():
            return {f"cuda:{index}": _device_info(index, allocator) for index in range(torch.cuda.device_count())}

    def snapshot(self) -> Mapping[str, Any]:
        """See ``CudaDriver``."""
        snapshot: Mapping[str, Any] = torch.cuda.memory._snapshot()
        return snapshot

    def totals(self) -> list[DeviceTotals]:
        """See ``CudaDriver``. Devices without a context are skipped: querying them would create one."""
        has_statistics = self.allocator() in ("native", "cudaMallocAsync")
        totals = []
        with relaxed_capture_mode():
            for device in range(torch.cuda.device_count()):
                if _has_context(device):
                    free, total = torch.cuda.mem_get_info(device)
                    allocated = torch.cuda.memory_allocated(device) if has_statistics else None
                    reserved = torch.cuda.memory_reserved(device) if has_statistics else None
                    totals.append(DeviceTotals(device, allocated, reserved, total - free))
        return totals

    def has_history(self) -> bool:
        """See ``CudaDriver``."""
        return bool(torch._C._cuda_isHistoryEnabled())

    def enable_history(self, max_entries: int) -> None:
        """See ``CudaDriver``."""
        torch.cuda.memory._record_memory_history("all", context=None, max_entries=max_entries)

    def disable_history(self) -> None:
        """See ``CudaDriver``."""
        torch.cuda.memory._record_memory_history(None)

    def watch_history(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        """See ``CudaDriver``."""
        original = torch.cuda.memory._record_memory_history

        @functools.wraps(original)
        def change_history(*args: Any, **kwargs: Any) -> Any:
            before()
            try:
                return original(*args, **kwargs)
            finally:
                after()

        def restore() -> None:
            if torch.cuda.memory._record_memory_history is change_history:
                torch.cuda.memory._record_memory_history = original

        torch.cuda.memory._record_memory_history = change_history
        return restore


def _device_info(index: int, allocator: CudaAllocator) -> DeviceInfo:
    properties: Any = torch.cuda.get_device_properties(index)
    uuid = getattr(properties, "uuid", None)
    bus = getattr(properties, "pci_bus_id", None)
    return DeviceInfo(
        name=properties.name,
        total_bytes=int(properties.total_memory),
        uuid=None if uuid is None else str(uuid),
        pci_address=None
        if bus is None
        else f"{properties.pci_domain_id:08x}:{bus:02x}:{properties.pci_device_id:02x}.0",
        allowed_bytes=_allowed_bytes(index) if allocator == "native" else None,
    )


def _allowed_bytes(device: int) -> int | None:
    """Return the most that torch's allocator may reserve on a device; None: no limit, or a torch that hides it."""
    read_fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    # Reading the fraction of a device that the program does not use would initialise the device.
    if read_fraction is None or not _has_context(device):
        return None
    fraction = read_fraction(device)
    # torch multiplies the fraction with the total that the driver reports and cuts off what follows the point. Where it
    # returns the quotient of the two, the product can be a little less than the whole number.
    return int(fraction * torch.cuda.mem_get_info(device)[1] + 0.001) if fraction < 1 else None


def _has_context(device: int) -> bool:
    bindings: Any = torch._C  # its stubs lack the function
    return bool(bindings._cuda_hasPrimaryContext(device))


@contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Allow the calling thread to query the device while a CUDA graph is captured, by itself or by another thread.

    Otherwise such a query can end the capture with an error.
    """
    exchange = _exchange_capture_mode()
    mode = ctypes.c_int(_RELAXED)
    if exchange is None:
        yield
        return
    exchange(ctypes.byref(mode))
    try:
        yield
    finally:
        exchange(ctypes.byref(mode))


@functools.cache
def _exchange_capture_mode() -> Callable[[Any], int] | None:
    """The runtime's function that exchanges the capture mode of a thread; None if the library is not found."""
    name = "hipThreadExchangeStreamCaptureMode" if torch.version.hip else "cudaThreadExchangeStreamCaptureMode"
    function: Callable[[Any], int] | None = getattr(ctypes.CDLL(None), name, None)
    return function
