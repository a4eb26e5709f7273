"""A stand-in for ``torch.cuda``, so that CUDA recordings can be tested without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from memtrace.format.manifest import DeviceInfo
from memtrace.recording import recorder
from memtrace.recording.cuda import CudaMonitor
from memtrace.recording.cuda_driver import CudaAllocator, DeviceTotals
from memtrace.recording.manifest import ManifestFile
from memtrace.recording.observers import Observer
from tests.recording.helpers import MIB


class FakeDriver:
    """Returns one given snapshot after the other (the last one again and again) and given totals."""

    def __init__(
        self,
        *snapshots: Mapping[str, Any],
        totals: list[DeviceTotals] | None = None,
        allocator: CudaAllocator = "native",
    ) -> None:
        self.cuda_allocator = allocator
        self.snapshots = list(snapshots)
        self.device_totals = totals or []
        self.is_history_on = False
        self.changes: tuple[Callable[[], None], Callable[[], None]] | None = None

    def when_ready(self, call: Callable[[], None]) -> Callable[[], None]:
        call()
        return lambda: None

    def allocator(self) -> CudaAllocator:
        return self.cuda_allocator

    def devices(self) -> dict[str, DeviceInfo]:
        return {"cuda:0": DeviceInfo("Fake GPU", total_bytes=80 << 30, uuid="GPU-0", pci_address="00000000:01:00.0")}

    def snapshot(self) -> Mapping[str, Any]:
        return self.snapshots.pop(0) if len(self.snapshots) > 1 else self.snapshots[0]

    def totals(self) -> list[DeviceTotals]:
        return self.device_totals

    def has_history(self) -> bool:
        return self.is_history_on

    def enable_history(self, max_entries: int) -> None:
        self.is_history_on = True

    def disable_history(self) -> None:
        self.is_history_on = False

    def watch_history(self, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
        self.changes = (before, after)
        return lambda: None


def use_driver(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, *, tracks_allocator: bool) -> None:
    """Have recordings use ``driver``.

    Args:
        monkeypatch: undoes it after the test.
        driver: the driver.
        tracks_allocator: whether the observer sees the events of the CUDA allocator itself.
    """

    def make(observer: Observer, manifest: ManifestFile) -> CudaMonitor:
        observer.attach_cuda = lambda: tracks_allocator  # type: ignore[method-assign]
        return CudaMonitor(observer, driver, manifest)

    monkeypatch.setattr(recorder, "make_cuda_monitor", make)


def snapshot(*segments: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A memory snapshot without history."""
    defaults = {"roundup_power2_divisions": {"1": 0}, "max_split_size": -1}
    return {"segments": list(segments), "device_traces": [[]], "allocator_settings": defaults | settings}


def segment(address: int, size: int, *blocks: tuple[int, int, int, str]) -> dict[str, Any]:
    """A segment of a snapshot; blocks are (offset, size, requested size, state)."""
    live = [block for block in blocks if block[3] == "active_allocated"]
    return {
        "device": 0, "address": address, "total_size": size, "stream": 0, "segment_pool_id": (0, 0),
        "segment_type": "small" if size == 2 * MIB else "large", "is_expandable": False, "frames": [],
        "allocated_size": sum(block[1] for block in live), "active_size": sum(block[1] for block in live),
        "requested_size": sum(block[2] for block in live),
        "blocks": [
            {"address": address + offset, "size": length, "requested_size": requested, "state": state, "frames": []}
            for offset, length, requested, state in blocks
        ],
    }  # fmt: skip
