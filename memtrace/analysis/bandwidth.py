"""Cost of copies between device and host: t = a + b * S per direction, published, given or measured on this machine.

The cost model and the published values are those of "Pinpointing the Memory Behaviors of DNN Training" (ISPASS 2021).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from memtrace.errors import MemtraceError
from memtrace.format.arrays import Array

COPY_SIZES: Final = tuple(1 << power for power in range(12, 27, 2))
"""Sizes of the measured copies, bytes: 4 KiB to 64 MiB."""
_COPIES_PER_SIZE: Final = 7


@dataclass(frozen=True)
class CopyCost:
    """Time of a copy of S bytes in one direction: ``latency_ns`` + ``ns_per_byte`` * S."""

    latency_ns: float
    ns_per_byte: float

    @property
    def gb_per_s(self) -> float:
        """Bandwidth without the latency, in GB/s (10**9 bytes per second)."""
        return 1 / self.ns_per_byte


@dataclass(frozen=True)
class CopyBandwidths:
    """Costs of copies from the device to the host and back."""

    d2h: CopyCost
    """Device to host."""
    h2d: CopyCost
    """Host to device."""
    source: str
    """Where the costs come from."""

    @property
    def round_trip_latency_ns(self) -> float:
        """Sum of the latencies of both copies."""
        return self.d2h.latency_ns + self.h2d.latency_ns

    @property
    def round_trip_ns_per_byte(self) -> float:
        """Nanoseconds per byte of both copies together."""
        return self.d2h.ns_per_byte + self.h2d.ns_per_byte


TITAN_XP: Final = CopyBandwidths(CopyCost(8242, 0.1563), CopyCost(12352, 0.1574), "published for a TITAN Xp")
"""PCIe 3.0 with pinned memory, 6.40 and 6.35 GB/s, as fitted by the authors of the paper."""


def _link(generation: int) -> CopyBandwidths:
    """Return the rate of PCI Express with 16 lanes: transfers per second of a lane times lanes, after line coding."""
    gigatransfers_per_s = 2**generation  # 8, 16 and 32 GT/s in generations 3, 4 and 5
    cost = CopyCost(0, 8 / (gigatransfers_per_s * 16 * 128 / 130))
    return CopyBandwidths(cost, cost, f"link rate of PCIe {generation}.0 x16, an upper bound")


CARDS: Final = {
    "TITAN Xp": TITAN_XP,
    "P100": _link(3),
    "V100": _link(3),
    "A100": _link(4),
    "RTX 4090": _link(4),
    "H100": _link(5),
}
"""Costs of copies between known cards and pinned host memory: measured values, or what the card's link allows."""


def bandwidths_of_card(name: str) -> CopyBandwidths:
    """Return the costs of copies of a known card; MemtraceError for another name."""
    for card, bandwidths in CARDS.items():
        if card.casefold() == name.strip().casefold():
            return bandwidths
    raise MemtraceError(
        f"unknown card {name!r}: memtrace knows {', '.join(CARDS)}. Measure with: memtrace doctor --bandwidth"
    )


def bandwidths_of_device_name(name: str | None) -> CopyBandwidths:
    """Return the costs of copies of the known card that a device's name contains, else those of a TITAN Xp.

    Args:
        name: a name such as ``NVIDIA A100-SXM4-80GB``; None: unknown.
    """
    text = (name or "").casefold()
    return next((costs for card, costs in CARDS.items() if card.casefold() in text), TITAN_XP)


def bandwidths_from_rates(d2h_gb_per_s: float, h2d_gb_per_s: float) -> CopyBandwidths:
    """Return the costs of copies at given bandwidths in GB/s (10**9 bytes per second), without latency.

    Raises:
        MemtraceError: a bandwidth is not a positive number.
    """
    for direction, rate in (("device-to-host", d2h_gb_per_s), ("host-to-device", h2d_gb_per_s)):
        if not (rate > 0 and math.isfinite(rate)):
            raise MemtraceError(f"{direction} bandwidth of {rate:g} GB/s: pass a positive number.")
    return CopyBandwidths(CopyCost(0, 1 / d2h_gb_per_s), CopyCost(0, 1 / h2d_gb_per_s), "given")


def bandwidths_from_json(document: Any) -> CopyBandwidths:
    """Return the costs in a JSON document of ``memtrace doctor --bandwidth --json``, or in its part ``bandwidth``.

    Raises:
        MemtraceError: the document holds no bandwidths, or the time per byte is not positive.
    """
    try:
        measured = document.get("bandwidth", document)
        d2h, h2d = (
            CopyCost(float(measured[direction]["latency_ns"]), float(measured[direction]["ns_per_byte"]))
            for direction in ("d2h", "h2d")
        )
        source = str(measured.get("source", "file"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MemtraceError("no bandwidths. Pass the output of: memtrace doctor --bandwidth --json") from error
    if not all(cost.ns_per_byte > 0 and math.isfinite(cost.ns_per_byte) for cost in (d2h, h2d)):
        raise MemtraceError("ns_per_byte must be positive. Measure again with: memtrace doctor --bandwidth --json")
    return CopyBandwidths(d2h, h2d, source)


def fit_copy_cost(times_ns: Array) -> CopyCost:
    """Return the line through the times of copies of ``COPY_SIZES`` with the least relative error; no negative latency.

    Args:
        times_ns: time of a copy of each of ``COPY_SIZES``.
    """
    sizes = np.array(COPY_SIZES, np.float64)
    slope, intercept = np.polyfit(sizes, times_ns, 1, w=1 / times_ns)
    if intercept < 0:
        intercept, slope = 0.0, float((times_ns / sizes).mean())
    return CopyCost(float(intercept), float(slope))


def best_copy_times(copy: Callable[[int], None]) -> Array:
    """Return the shortest time of a copy of each of ``COPY_SIZES``, in nanoseconds."""
    best_ns = []
    for num_bytes in COPY_SIZES:
        times_ns = []
        for _ in range(_COPIES_PER_SIZE):
            start_ns = time.perf_counter_ns()
            copy(num_bytes)
            times_ns.append(time.perf_counter_ns() - start_ns)
        best_ns.append(min(times_ns))
    return np.array(best_ns, np.float64)
