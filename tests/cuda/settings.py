"""The settings under which CUDA recordings are compared with torch's own history."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MIB: Final = 1 << 20
CONTEXT_BYTES: Final = 256 * MIB
"""What the null device takes for its context."""


@dataclass(frozen=True)
class Setting:
    """Settings of the allocator and of the device."""

    allocator: str = ""
    """PYTORCH_CUDA_ALLOC_CONF."""
    num_devices: int = 1
    """The program runs on each of these devices in turn."""
    limit_bytes: int | None = None
    """Limit of the process on each device (set_per_process_memory_fraction); None: no limit."""
    null_device: Mapping[str, str] = field(default_factory=dict)
    """Variables of the null device without which the setting makes no sense."""


DELAYED: Final = {"NULLCUDA_EVENT_QUERIES": "3"}
SETTINGS: Final[dict[str, Setting]] = {
    "default": Setting(),
    "expandable": Setting("expandable_segments:True"),
    "max_split": Setting("max_split_size_mb:21"),
    "garbage_collection": Setting("garbage_collection_threshold:0.5", limit_bytes=384 * MIB),
    "expandable_limited": Setting("expandable_segments:True,garbage_collection_threshold:0.5", limit_bytes=384 * MIB),
    "delayed_events": Setting(null_device=DELAYED),
    "expandable_delayed": Setting("expandable_segments:True", null_device=DELAYED),
    "two_devices": Setting(num_devices=2),
    "expandable_two_devices": Setting("expandable_segments:True", num_devices=2),
}


def on_null_device() -> bool:
    """Return whether this process runs on the null device (tests/nullcuda)."""
    return "NULLCUDA_LIB" in os.environ
