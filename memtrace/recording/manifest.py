"""The manifest that a recording begins with: versions, devices, who records, and how."""

from __future__ import annotations

import os
import platform
import sys
from typing import Any

import torch

from memtrace import __version__
from memtrace.format import schema
from memtrace.recording.observers import Observer


def new_manifest(
    observer: Observer, options: dict[str, Any], notes: list[str], rank: int, world_size: int
) -> dict[str, Any]:
    """What is known when a recording begins; the rest is filled in while it runs and when it ends."""
    cuda = torch.cuda.is_available()
    return {
        "format": "memtrace",
        "format_version": schema.FORMAT_VERSION,
        "memtrace_version": __version__,
        "source": {"kind": "recording", "observer": observer.kind, "file": None},
        "rank": rank,
        "world_size": world_size,
        "finished": False,
        "stop_reason": None,
        "t0_epoch_ns": None,
        "num_events": 0,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
        },
        "devices": {
            "cpu": {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()},
            **(
                {f"cuda:{i}": {"name": torch.cuda.get_device_name(i)} for i in range(torch.cuda.device_count())}
                if cuda
                else {}
            ),
        },
        "host": platform.node(),
        "process": os.getpid(),
        "command": sys.argv,
        "options": options,
        "coverage": {"lost_events": 0, "dropped_events": 0, "notes": notes},
    }
