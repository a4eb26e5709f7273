"""The manifest of a recording: what is known when it begins, and what is added while it runs."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

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

ENVIRONMENT_VARIABLES: Final = (
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "CUDA_MPS_PIPE_DIRECTORY",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
)


def new_manifest(
    observer: Observer, options: RecordingOptions, notes: Sequence[str], rank: int, world_size: int
) -> Manifest:
    """Return what is known when a recording begins.

    The GPUs are added when the program initialises CUDA: asking for them earlier would initialise it, and processes
    that are forked afterwards could not use CUDA.
    """
    devices = {"cpu": DeviceInfo(platform.processor() or platform.machine(), num_threads=torch.get_num_threads())}
    return Manifest(
        memtrace_version=__version__,
        source=TraceSource("recording", observer.kind),
        rank=rank,
        world_size=world_size,
        finished=False,
        num_events=0,
        versions={
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        },
        devices=devices,
        environment={name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ},
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

    def add_devices(self, devices: Mapping[str, DeviceInfo]) -> None:
        """Add devices that became known."""
        with self._lock:
            self.current = replace(self.current, devices={**self.current.devices, **devices})

    def add_note(self, note: str) -> None:
        """Add a sentence about what the trace cannot show."""
        with self._lock:
            self.current = self.current.with_notes(note)

    def set_dropped_events(self, num_events: int) -> None:
        """Set how many events a ring deleted."""
        with self._lock:
            coverage = replace(self.current.coverage, dropped_events=num_events)
            self.current = replace(self.current, coverage=coverage)

    def set_program_steps(self, num_steps: int) -> None:
        """Set how many steps the program has taken, recorded or not."""
        with self._lock:
            self.current = replace(self.current, coverage=replace(self.current.coverage, program_steps=num_steps))

    def set_unseen_accesses(self, sources: Sequence[str], opaque_bytes: int | None) -> None:
        """Set which code ran without its reads and writes being recorded; see ``FileCoverage``."""
        with self._lock:
            coverage = replace(self.current.coverage, unseen_accesses=tuple(sources), opaque_bytes=opaque_bytes)
            self.current = replace(self.current, coverage=coverage)

    def write(self, folder: Path) -> None:
        """Write the manifest as it is now. Raises OSError."""
        write_manifest(folder, self.current)
