"""The numbers of PyTorch's device types (``c10::DeviceType``) that have memory, as its profiler writes them."""

from __future__ import annotations

from typing import Final

DEVICE_TYPES: Final = {
    0: "cpu",
    1: "cuda",
    6: "hip",
    9: "xla",
    12: "xpu",
    13: "mps",
    14: "meta",
    15: "hpu",
    19: "mtia",
    20: "privateuseone",
}
"""Name of each device type by its number."""
