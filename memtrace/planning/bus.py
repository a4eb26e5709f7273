"""The bus between a device and host memory: one copy at a time in each direction."""

from __future__ import annotations

from dataclasses import dataclass, field

from memtrace.analysis.bandwidth import CopyBandwidths, CopyCost


@dataclass
class Direction:
    """Copies in one direction, which wait for each other."""

    cost: CopyCost | None
    """Cost of a copy; None: copies take no time (a trace without times)."""
    free_at_ns: float = 0.0
    """When the last copy ends."""
    busy_ns: float = 0.0
    """Sum of the durations of the copies."""

    def copy_ns(self, num_bytes: int) -> float:
        """Return the duration of a copy: t = a + b * S."""
        return 0.0 if self.cost is None else self.cost.latency_ns + self.cost.ns_per_byte * num_bytes

    def copy(self, num_bytes: int, requested_at_ns: float) -> float:
        """Queue a copy that is requested at a time, and return when it ends."""
        duration_ns = self.copy_ns(num_bytes)
        self.free_at_ns = max(self.free_at_ns, requested_at_ns) + duration_ns
        self.busy_ns += duration_ns
        return self.free_at_ns


@dataclass
class Bus:
    """Both directions, which do not disturb each other."""

    bandwidths: CopyBandwidths | None
    """None: copies take no time."""
    to_host: Direction = field(init=False)
    to_device: Direction = field(init=False)

    def __post_init__(self) -> None:
        """Begin with both directions idle."""
        self.to_host = Direction(self.bandwidths.d2h if self.bandwidths is not None else None)
        self.to_device = Direction(self.bandwidths.h2d if self.bandwidths is not None else None)


def fits_interval(num_bytes: int, interval_ns: float, bandwidths: CopyBandwidths) -> bool:
    """Return whether a block can be copied to the host and back within an access interval, if nothing else is copied.

    Source: "Pinpointing the Memory Behaviors of DNN Training" (ISPASS 2021): S/B_d2h + S/B_h2d <= ATI, with latencies.
    """
    return free_time_ns(num_bytes, interval_ns, bandwidths) >= 0


def free_time_ns(num_bytes: int, interval_ns: float, bandwidths: CopyBandwidths) -> float:
    """Return the time between the end of the copy out and the latest start of the copy back; negative: a stall.

    Source: Capuchin (ASPLOS 2020): FT = SwapInStart - SwapOutEnd, with SwapTime = bytes / bandwidth for both copies.
    """
    to_host, to_device = Direction(bandwidths.d2h), Direction(bandwidths.h2d)
    return (interval_ns - to_device.copy_ns(num_bytes)) - to_host.copy_ns(num_bytes)
