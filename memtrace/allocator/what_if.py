"""What the allocator would have reserved for the same requests under other settings.

New segments need addresses that no device has given: every setting is run with ascending, descending and
shuffled ones, and the spread of the three peaks is the error bar. Settings change how blocks lie, so blocks
older than the history cannot stay where they were: they are requested afresh, and settings are compared with
the recorded ones laid out afresh too, not with what was recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Final

from memtrace.allocator.capacity import Bracket
from memtrace.allocator.devices import ORDERS, InventedDevice, Order
from memtrace.allocator.model import Allocator
from memtrace.allocator.program import Program, run
from memtrace.allocator.rules import TORCH, Rules
from memtrace.allocator.settings import Settings

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
"""What a sweep tries; with a known capacity GC_SWEEP too."""
GC_SWEEP: Final = (
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.95",
    "garbage_collection_threshold:0.8,per_process_memory_fraction:0.95",
)
"""Garbage collection does nothing without a memory fraction, and a fraction needs the size of the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of the model. Bytes."""

    peak_reserved: int
    peak_allocated: int
    allocated_at_peak: int
    segments_at_peak: int
    num_device_allocs: int
    num_retries: int
    num_ooms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What one setting would do to the recorded requests. Bytes."""

    settings: Settings
    peak_reserved_bytes: int
    """Within the capacity where the run fits, else what it would take; so it fits where this is at most the
    capacity."""
    spread_bytes: int
    """Largest less smallest peak over three orders of addresses: the error bar."""
    unallocated_at_peak_bytes: int
    """Reserved less allocated at that peak: what fragmentation and caching cost."""
    peak_allocated_bytes: int
    num_segments: int
    """Held at the peak (virtual ranges, for expandable segments)."""
    num_device_allocs: int
    """Calls to the device for a segment or pages."""
    num_retries: int
    """Times the cache was given back because the device refused."""
    num_ooms: int
    """Requests that failed for good."""
    fits: bool | None
    """Whether every request is served within the capacity; None: no capacity is known, or its bracket
    decides."""
    fits_at: tuple[bool, bool] | None
    """The same at the least and at the largest capacity the history allows; None: it tells none."""
    is_recorded: bool
    """These are the settings the history was recorded under."""

    @property
    def certainty(self) -> int:
        """At how many ends of the capacity every request is served: 0 to 2; without a capacity 2, unless the setting's
        own memory fraction refuses one."""
        return (0 if self.num_ooms else 2) if self.fits_at is None else sum(self.fits_at)


@dataclass(frozen=True, slots=True)
class Case:
    """A program, the settings and rules it was recorded under, and what is known of its device."""

    program: Program
    recorded: Settings
    rules: Rules = TORCH
    capacity: int | None = None
    bracket: Bracket | None = None
    total: int | None = None
    """Memory of the device the history was recorded on; None: not told."""

    @property
    def limits(self) -> tuple[int, int] | None:
        """Least and largest capacity to answer for: the one given, else the history's bracket; None: none is
        known."""
        if self.capacity is not None:
            return self.capacity, self.capacity
        return None if self.bracket is None else self.bracket.ends

    @property
    def device_bytes(self) -> int | None:
        """Size of the device for memory fractions; None: unknown."""
        if self.capacity is not None or self.total is not None:
            return self.total if self.capacity is None else self.capacity
        if self.bracket is not None and self.bracket.estimate is not None:
            return self.bracket.estimate
        limits = self.limits
        return None if limits is None else limits[0]


def sweep_settings(case: Case) -> list[Settings]:
    """The settings of a sweep, the recorded ones first."""
    names = SWEEP + (GC_SWEEP if case.device_bytes is not None else ())
    settings = [Settings.parse(name) for name in names]
    recorded = case.recorded
    if recorded.memory_fraction is not None and case.device_bytes is None:
        recorded = replace(recorded, memory_fraction=None)
    return [recorded, *(other for other in settings if other != recorded)]


def predict(case: Case, settings: Iterable[Settings], progress: Callable[[], None] = lambda: None) -> list[Prediction]:
    """One prediction for each setting; SettingError where a setting needs a capacity and none is known.

    `progress` is called after each.
    """
    predictions = []
    for one in settings:
        predictions.append(_predict(case, one))
        progress()
    return predictions


def outcome(case: Case, settings: Settings, order: Order = "ascending", limit: int | None = None) -> Outcome:
    """One run: `limit` is what the device gives, None all that is asked for."""
    device = InventedDevice(limit, order, total=case.device_bytes)
    allocator = Allocator(settings, device, case.rules)
    run(case.program, allocator)
    return Outcome(
        peak_reserved=allocator.peak_reserved,
        peak_allocated=allocator.peak_allocated,
        allocated_at_peak=allocator.allocated_at_peak,
        segments_at_peak=allocator.segments_at_peak,
        num_device_allocs=allocator.num_device_allocs,
        num_retries=allocator.num_retries,
        num_ooms=allocator.num_ooms,
    )


def _predict(case: Case, settings: Settings) -> Prediction:
    limits = case.limits
    free = {order: outcome(case, settings, order) for order in ORDERS}
    whole = free
    if any(run.num_ooms for run in free.values()):
        # The setting's own memory fraction refuses requests: what it would take is what it takes without one.
        whole = {order: outcome(case, replace(settings, memory_fraction=None), order) for order in ORDERS}
    peaks = sorted((whole[order].peak_reserved, order) for order in ORDERS)
    spread, order = peaks[-1][0] - peaks[0][0], peaks[1][1]
    shown = replace(whole[order], num_retries=free[order].num_retries, num_ooms=free[order].num_ooms)
    fits_at = None
    if limits is not None:
        ends = [{order: _within(case, settings, order, limit, free[order]) for order in ORDERS} for limit in limits]
        fits_at = tuple(all(run.num_ooms == 0 for run in end.values()) for end in ends)
        if fits_at[0]:
            shown = ends[0][order]
        else:
            shown = replace(shown, num_retries=ends[0][order].num_retries, num_ooms=ends[0][order].num_ooms)
    return Prediction(
        settings=settings,
        peak_reserved_bytes=shown.peak_reserved,
        spread_bytes=spread,
        unallocated_at_peak_bytes=shown.peak_reserved - shown.allocated_at_peak,
        peak_allocated_bytes=shown.peak_allocated,
        num_segments=shown.segments_at_peak,
        num_device_allocs=shown.num_device_allocs,
        num_retries=shown.num_retries,
        num_ooms=shown.num_ooms,
        fits=None if fits_at is None or fits_at[0] != fits_at[1] else fits_at[0],
        fits_at=None if fits_at is None else (fits_at[0], fits_at[1]),
        is_recorded=settings == case.recorded,
    )


def _within(case: Case, settings: Settings, order: Order, limit: int, free: Outcome) -> Outcome:
    """The run under a limit; where nothing was ever refused without one it is the same run."""
    if free.peak_reserved <= limit and free.num_ooms == 0:
        return free
    return outcome(case, settings, order, limit)
