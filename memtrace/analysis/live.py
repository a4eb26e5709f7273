"""What to watch while a recording runs: memory now, this step against the last ones, growth, and time to exhaustion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.allocation_sites import allocation_sites
from memtrace.analysis.blocks import blocks
from memtrace.analysis.event_codes import SPAN
from memtrace.analysis.thresholds import WARM_UP_STEPS
from memtrace.format.live_status import LiveStatus, LiveStep
from memtrace.format.manifest import DeviceInfo, Manifest
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

MIN_STEPS: Final = 4
"""Fewest steps after warm-up from which growth is measured."""
MAX_COMPARED_STEPS: Final = 20
"""This step is compared with the median of at most this many steps before it."""
RETAINED_STEPS: Final = 20
"""Steps among whose blocks growing sites are searched."""


@dataclass(frozen=True)
class StepComparison:
    """The current step so far, and the median of the steps before it."""

    number: int
    duration_ns: int
    usual_duration_ns: int
    peak_bytes: int
    usual_peak_bytes: int
    num_compared_steps: int


@dataclass(frozen=True)
class GrowingSite:
    """An allocation site whose blocks of recent steps are still live."""

    site: str | None
    """None: no call stack was recorded."""
    category: str
    bytes_per_step: int
    num_blocks: int


@dataclass(frozen=True)
class LiveMeasures:
    """One device of a running recording. None: unknown."""

    device: str
    live_bytes: int
    peak_bytes: int
    reserved_bytes: int | None
    category_bytes: Mapping[str, int]
    """Live bytes by category, as far as the program labels its blocks; ``unknown`` for all others."""
    step: StepComparison | None
    """None: no step has ended yet."""
    growth_bytes_per_step: int | None
    """Growth of the memory that is live at the ends of steps; None: too few steps."""
    growth_bytes_per_second: int | None
    """The same over time."""
    capacity_bytes: int | None
    steps_to_capacity: int | None
    """Steps until the peak of a step reaches the capacity at this growth; None without a capacity or without growth."""
    ns_to_capacity: int | None
    """Time until then."""


def measure_live(status: LiveStatus, device: str, capacity_bytes: int | None = None) -> LiveMeasures:
    """Return what the status of a recording shows of one device.

    Args:
        status: the status.
        device: one of the devices in it.
        capacity_bytes: memory that the device has for the program; None: unknown.
    """
    steps = [step for step in status.steps if step.number >= WARM_UP_STEPS]
    growth = growth_per_step([step.number for step in steps], [step.end_bytes.get(device, 0) for step in steps])
    usual_ns = int(np.median([step.duration_ns for step in steps])) if steps else None
    to_capacity = _steps_to_capacity(steps, device, growth, capacity_bytes)
    return LiveMeasures(
        device=device,
        live_bytes=status.live_bytes.get(device, 0),
        peak_bytes=status.peak_bytes.get(device, 0),
        reserved_bytes=status.reserved_bytes.get(device),
        category_bytes=status.category_bytes.get(device, {}),
        step=_compare_step(status, device),
        growth_bytes_per_step=None if growth is None else round(growth),
        growth_bytes_per_second=None if growth is None or not usual_ns else round(growth * 10**9 / usual_ns),
        capacity_bytes=capacity_bytes,
        steps_to_capacity=to_capacity,
        ns_to_capacity=None if to_capacity is None or usual_ns is None else to_capacity * usual_ns,
    )


def growth_per_step(numbers: Sequence[int], end_bytes: Sequence[int]) -> float | None:
    """Return the median of the slopes between all pairs of steps; None with fewer than ``MIN_STEPS``.

    A step in which the program evaluates the model or saves it does not change the median.

    Args:
        numbers: the steps, ascending.
        end_bytes: bytes that are live at the end of each.
    """
    if len(numbers) < MIN_STEPS:
        return None
    first, second = np.triu_indices(len(numbers), 1)
    number, level = np.asarray(numbers, float), np.asarray(end_bytes, float)
    return float(np.median((level[second] - level[first]) / (number[second] - number[first])))


def _steps_to_capacity(
    steps: Sequence[LiveStep], device: str, growth: float | None, capacity_bytes: int | None
) -> int | None:
    if growth is None or capacity_bytes is None or growth < 1:
        return None
    highest = max(step.peak_bytes.get(device, 0) for step in steps[-MAX_COMPARED_STEPS:])
    return max(int((capacity_bytes - highest) // growth), 0)


def _compare_step(status: LiveStatus, device: str) -> StepComparison | None:
    step, before = status.open_step, [step for step in status.steps if step.number >= WARM_UP_STEPS]
    before = (before or list(status.steps))[-MAX_COMPARED_STEPS:]
    if step is None or not before:
        return None
    return StepComparison(
        number=step.number,
        duration_ns=step.duration_ns,
        usual_duration_ns=int(np.median([other.duration_ns for other in before])),
        peak_bytes=step.peak_bytes.get(device, 0),
        usual_peak_bytes=int(np.median([other.peak_bytes.get(device, 0) for other in before])),
        num_compared_steps=len(before),
    )


def known_capacity(manifest: Manifest, device: str) -> int | None:
    """Return the bytes that a device has for the program, as its recording found them; None: unknown."""
    info = manifest.devices.get(device, DeviceInfo())
    if device == "cpu":
        return None
    return info.allowed_bytes if info.allowed_bytes is not None else info.total_bytes


def growing_sites(trace: Trace, device: str, count: int) -> list[GrowingSite]:
    """Return the allocation sites of which recent steps left blocks behind, most bytes per step first.

    The steps are the last ``RETAINED_STEPS`` after warm-up, without the last one, whose blocks can still be freed in
    time. A site counts where at least half of these steps left a block: a block that one step allocates and keeps, such
    as a cache, is no growth.

    Args:
        trace: a single-rank trace, of which the last part is read.
        device: the device of the blocks.
        count: number of sites.
    """
    if not trace.part_numbers:
        return []
    part = trace.part(trace.part_numbers[-1])
    spans = part.columns("spans", "kind", "index")
    last_step = int(spans["index"][spans["kind"] == SPAN["step"]].max(initial=-1)) - 1
    first_step = max(WARM_UP_STEPS, last_step - RETAINED_STEPS + 1)
    num_steps = last_step - first_step + 1
    if num_steps < MIN_STEPS or device not in part.devices:
        return []
    table, live = blocks(part), part.columns("live", "block_id", "step")
    step, older = table.step.astype(np.int64), live["block_id"] >= 0
    step[live["block_id"][older]] = live["step"][older]
    is_retained = (table.free_event < 0) & (step >= first_step) & (step <= last_step)
    rows = np.flatnonzero(is_retained & (table.device == part.devices.index(device)))
    sites, site = allocation_sites(part, table.stack[rows])
    key, group = np.unique(site * len(CATEGORIES) + table.category[rows], return_inverse=True)
    size, num_blocks = np.bincount(group, weights=table.size[rows]), np.bincount(group)
    steps_of = np.unique(np.stack([group, step[rows]]), axis=1)[0]
    is_growing = 2 * np.bincount(steps_of, minlength=len(key)) >= num_steps
    order = [place for place in np.argsort(-size, kind="stable").tolist() if is_growing[place]]
    return [
        GrowingSite(
            site=sites[int(key[place]) // len(CATEGORIES)],
            category=CATEGORIES[int(key[place]) % len(CATEGORIES)],
            bytes_per_step=round(size[place] / num_steps),
            num_blocks=int(num_blocks[place]),
        )
        for place in order[:count]
    ]
