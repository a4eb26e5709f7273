"""The manifest of a recording: what is known when it begins, and what is added while it runs."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from memtrace import __version__
from memtrace.format.manifest import (
    DeviceInfo,
    FileCoverage,
    Manifest,
    RecordingOptions,
    TraceSource,
    write_manifest,
)
from memtrace.recording.code_locations import find_code_locations
from memtrace.recording.observers import Observer


def new_manifest(
    observer: Observer, options: RecordingOptions, notes: Sequence[str], rank: int, world_size: int
) -> Manifest:
    """Return what is known when a recording begins."""
    devices = {"cpu": DeviceInfo(platform.processor() or platform.machine(), num_threads=torch.get_num_threads())}
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            devices[f"cuda:{index}"] = DeviceInfo(torch.cuda.get_device_name(index))
    return Manifest(
        memtrace_version=__version__,
        source=TraceSource("recording", observer.kind),
        rank=rank,
        world_size=world_size,
        finished=False,
        num_events=0,
        versions={"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
        devices=devices,
        host=platform.node(),
        process=os.getpid(),
        command=tuple(sys.argv),
        options=options,
        code=find_code_locations(),
        coverage=FileCoverage(0, 0, has_accesses=options.accesses, notes=tuple(notes)),
        parts={},
    )


class ManifestFile:
    """The manifest of a running recording, which several threads add to.

    Attributes:
        current: the manifest as it is now.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.current = manifest
        self._lock = threading.Lock()

    def update(self, **changes: Any) -> None:
        """Replace fields of the manifest."""
        with self._lock:
            self.current = replace(self.current, **changes)

    def update_device(self, name: str, **changes: Any) -> None:
        """Replace fields of a device."""
        with self._lock:
            devices = dict(self.current.devices)
            devices[name] = replace(devices.get(name, DeviceInfo()), **changes)
            self.current = replace(self.current, devices=devices)

    def add_note(self, note: str) -> None:
        """Add a sentence about what the trace cannot show."""
        with self._lock:
            self.current = self.current.with_notes(note)

    def set_dropped_events(self, num_events: int) -> None:
        """Set how many events a ring deleted."""
        with self._lock:
            coverage = replace(self.current.coverage, dropped_events=num_events)
            self.current = replace(self.current, coverage=coverage)

    def write(self, folder: Path) -> None:
        """Write the manifest as it is now. Raises OSError."""
        write_manifest(folder, self.current)
