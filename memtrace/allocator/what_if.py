"""Predicts what the allocator would have reserved for the same requests under other settings.

New segments need addresses that no device has given. Each setting is therefore simulated with ascending, descending and
shuffled addresses, and the spread of the three peaks is the error of the prediction. Settings change where blocks lie,
so blocks older than the history cannot keep their place: each simulation requests them first. Settings are compared
with a simulation of the recorded settings, not with the recorded peak, because only the simulations start alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from memtrace.allocator.device_capacity import CapacityBounds
from memtrace.allocator.model import CachingAllocator
from memtrace.allocator.operations import OperationSequence, run_operations
from memtrace.allocator.rules import TORCH, Rules
from memtrace.allocator.settings import AllocatorSettings
from memtrace.allocator.simulated_devices import ADDRESS_ORDERS, AddressOrder, SyntheticDevice

SWEEP: Final = (
    "default",
    "expandable_segments:True",
    "max_split_size_mb:32",
    "max_split_size_mb:64",
    "max_split_size_mb:128",
    "max_split_size_mb:256",
    "max_split_size_mb:512",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:16",
    "large_segment_size_mb:12",
    "large_segment_size_mb:40",
)
"""Settings of a sweep. With a known capacity it includes GC_SWEEP."""
GC_SWEEP: Final = (
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.95",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.95",
)
"""Garbage collection requires a memory fraction, and a fraction requires the size of the device."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests to simulate, the settings and rules under which they were recorded, and what is known of the device."""

    operations: OperationSequence
    recorded_settings: AllocatorSettings
    rules: Rules = TORCH
    capacity: int | None = None
    """Bytes that the device gives, as the user states; None: not stated."""
    capacity_bounds: CapacityBounds | None = None
    """What the history reveals about the capacity; None: nothing."""
    total_bytes: int | None = None
    """Memory of the recorded device; None: unknown."""

    @property
    def capacity_interval(self) -> tuple[int, int] | None:
        """The smallest and the largest possible capacity, as stated or as the history bounds it; None: unknown."""
        if self.capacity is not None:
            return self.capacity, self.capacity
        return None if self.capacity_bounds is None else self.capacity_bounds.interval

    @property
    def device_bytes(self) -> int | None:
        """Size of the device that memory fractions refer to; None: unknown."""
        if self.capacity is not None or self.total_bytes is not None:
            return self.total_bytes if self.capacity is None else self.capacity
        if self.capacity_bounds is not None and self.capacity_bounds.estimate_bytes is not None:
            return self.capacity_bounds.estimate_bytes
        interval = self.capacity_interval
        return None if interval is None else interval[0]

    @property
    def baseline_settings(self) -> AllocatorSettings:
        """The recorded settings, without a memory fraction that cannot be simulated because the device is unknown."""
        if self.recorded_settings.memory_fraction is not None and self.device_bytes is None:
            return replace(self.recorded_settings, memory_fraction=None)
        return self.recorded_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """One simulation of a workload. Sizes in bytes."""

    peak_reserved: int
    peak_allocated: int
    allocated_at_peak: int
    """Allocated bytes at the peak of reserved memory."""
    segments_at_peak: int
    num_device_allocs: int
    num_retries: int
    num_ooms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorPrediction:
    """What one setting would do for the recorded requests."""

    setting: str
    """The text that PyTorch reads; `default` for the defaults."""
    environment_setting: str
    """The same as an environment variable to put before the command."""
    is_recorded: bool
    """These are the settings of the recording."""
    peak_reserved_bytes: int
    """Peak within the capacity if the workload fits, otherwise the peak on a larger device."""
    change_bytes: int | None
    """Change of that peak against a simulation of the recorded settings; None: they were not simulated."""
    spread_bytes: int
    """Largest less smallest peak over three address orders: the error of the prediction."""
    unused_at_peak_bytes: int
    """Reserved but not allocated at that peak: the cost of fragmentation and caching."""
    peak_allocated_bytes: int
    num_segments: int
    """Segments at the peak; an expandable segment counts once."""
    num_device_allocs: int
    """Times the device gave a segment or pages."""
    num_retries: int
    """Times the allocator released its cache because the device refused."""
    num_ooms: int
    """Requests that failed."""
    fits: bool | None
    """Whether every request is served; None: the capacity is unknown, or the answer differs within its bounds."""
    fits_at_low: bool | None
    """The same at the smallest possible capacity; None: unknown."""
    fits_at_high: bool | None
    """The same at the largest possible capacity; None: unknown."""

    @property
    def fit_rank(self) -> int:
        """At how many ends of the capacity interval every request is served: 0 to 2.

        Without a capacity it is 2, or 0 where the memory fraction of the setting itself makes a request fail.
        """
        if self.fits_at_low is None or self.fits_at_high is None:
            return 0 if self.num_ooms else 2
        return self.fits_at_low + self.fits_at_high


def sweep_settings(workload: Workload) -> list[AllocatorSettings]:
    """Return the settings of a sweep, the recorded ones first."""
    texts = SWEEP + (GC_SWEEP if workload.device_bytes is not None else ())
    settings = [AllocatorSettings.parse(text) for text in texts]
    baseline = workload.baseline_settings
    return [baseline, *(other for other in settings if other != baseline)]


def predict_settings(
    workload: Workload, settings: Iterable[AllocatorSettings], progress: Callable[[], None] = lambda: None
) -> list[AllocatorPrediction]:
    """Return one prediction per setting.

    Args:
        workload: the recorded requests.
        settings: the settings to simulate.
        progress: called after each prediction.

    Raises:
        SettingError: a setting requires the size of the device, which is unknown.
    """
    predictions = []
    for candidate in settings:
        predictions.append(_predict(workload, candidate))
        progress()
    baseline = next((prediction for prediction in predictions if prediction.is_recorded), None)
    if baseline is None:
        return predictions
    peak = baseline.peak_reserved_bytes
    return [replace(prediction, change_bytes=prediction.peak_reserved_bytes - peak) for prediction in predictions]


def simulate_settings(
    workload: Workload,
    settings: AllocatorSettings,
    order: AddressOrder = "ascending",
    capacity: int | None = None,
) -> SimulatedRun:
    """Simulate a workload once.

    Args:
        workload: the recorded requests.
        settings: the settings to simulate.
        order: addresses of new segments.
        capacity: bytes that the device gives; None: unlimited.
    """
    device = SyntheticDevice(capacity, order, total_bytes=workload.device_bytes)
    allocator = CachingAllocator(settings, device, workload.rules)
    run_operations(workload.operations, allocator)
    return SimulatedRun(
        peak_reserved=allocator.peak_reserved,
        peak_allocated=allocator.peak_allocated,
        allocated_at_peak=allocator.allocated_at_peak,
        segments_at_peak=allocator.segments_at_peak,
        num_device_allocs=allocator.num_device_allocs,
        num_retries=allocator.num_retries,
        num_ooms=allocator.num_ooms,
    )


_Runs = dict[AddressOrder, SimulatedRun]


def _predict(workload: Workload, settings: AllocatorSettings) -> AllocatorPrediction:
    unlimited: _Runs = {order: simulate_settings(workload, settings, order) for order in ADDRESS_ORDERS}
    complete = unlimited
    if any(run.num_ooms for run in unlimited.values()):
        # The memory fraction of the setting makes requests fail: what the workload needs shows without the fraction.
        without_fraction = replace(settings, memory_fraction=None)
        complete = {order: simulate_settings(workload, without_fraction, order) for order in ADDRESS_ORDERS}
    peaks = sorted((complete[order].peak_reserved, order) for order in ADDRESS_ORDERS)
    median_order = peaks[1][1]
    limited = [
        {order: _simulate_limited(workload, settings, order, capacity, unlimited[order]) for order in ADDRESS_ORDERS}
        for capacity in workload.capacity_interval or ()
    ]
    fits_at = [all(run.num_ooms == 0 for run in runs.values()) for runs in limited]
    shown = complete[median_order]
    if limited and fits_at[0]:
        shown = limited[0][median_order]
    else:
        counted = (limited[0] if limited else unlimited)[median_order]
        shown = replace(shown, num_retries=counted.num_retries, num_ooms=counted.num_ooms)
    return AllocatorPrediction(
        setting=settings.name,
        environment_setting=settings.environment_setting,
        is_recorded=settings == workload.baseline_settings,
        peak_reserved_bytes=shown.peak_reserved,
        change_bytes=None,
        spread_bytes=peaks[-1][0] - peaks[0][0],
        unused_at_peak_bytes=shown.peak_reserved - shown.allocated_at_peak,
        peak_allocated_bytes=shown.peak_allocated,
        num_segments=shown.segments_at_peak,
        num_device_allocs=shown.num_device_allocs,
        num_retries=shown.num_retries,
        num_ooms=shown.num_ooms,
        fits=fits_at[0] if fits_at and fits_at[0] == fits_at[1] else None,
        fits_at_low=fits_at[0] if fits_at else None,
        fits_at_high=fits_at[1] if fits_at else None,
    )


def _simulate_limited(
    workload: Workload, settings: AllocatorSettings, order: AddressOrder, capacity: int, unlimited: SimulatedRun
) -> SimulatedRun:
    """Simulate at a capacity; where the unlimited run stays below it, that run is the answer."""
    if unlimited.peak_reserved <= capacity and unlimited.num_ooms == 0:
        return unlimited
    return simulate_settings(workload, settings, order, capacity)
