"""Time that training spends waiting for data, and how much of it is spent on fetching and on preprocessing.

The host waits for data while a GPU still works on what was launched before: only the time in which the GPU has nothing
left to do costs anything. Where the recording has device times (``device_clock``), waits and steps are measured there.

Source: DS-Analyzer (CoorDL, VLDB 2021). Within one run a wait cannot be broken down, because data loading overlaps with
training; only the difference between runs separates fetching (from storage) from preprocessing (decoding, augmenting).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from memtrace.analysis.attribution import SPAN
from memtrace.analysis.cache_share import CacheWhatIf, DataSource, predict_cache_shares
from memtrace.analysis.device_clock import launch_times, timed_calls
from memtrace.analysis.steps import StepColumns, records_data_waits, step_columns
from memtrace.analysis.warm_up import steps_after_warm_up
from memtrace.display import Displayed
from memtrace.errors import TraceError
from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True)
class StepWait:
    """How long a step took, and how long it waited for data."""

    step: int
    """Number of the step."""
    duration_ns: int
    """How long the step took, by the clock of ``DataStalls``."""
    data_wait_ns: int | None
    """How long it waited for data; by the device's clock, the part of the wait in which every GPU was idle. None: the
    trace records no waits."""
    host_wait_ns: int | None
    """How long the training loop on the host waited for data. None: the trace records no waits."""


@dataclass(frozen=True)
class StallBreakdown:
    """The data stall of a median step, by comparing three recordings of one training job."""

    clock: Literal["host", "device"]
    """The clock of the steps: ``device`` if all three recordings have device times in every step."""
    synthetic_ns: int
    """Median step on data generated in memory (T1 of DS-Analyzer); warm-up steps are excluded."""
    cached_ns: int
    """Median step with all data cached (T3)."""
    cold_ns: int
    """Median step with an empty cache (T2)."""
    prep_stall_ns: int
    """Time that preprocessing adds: cached - synthetic."""
    fetch_stall_ns: int
    """Time that fetching from storage adds: cold - cached."""


@dataclass(frozen=True)
class DataStalls(Displayed):
    """The waits for data of a recording. None: the trace has no steps, or it records no waits."""

    clock: Literal["host", "device"]
    """The clock of the durations and waits: the GPU's (``device``) if the trace has device times in every step."""
    clock_note: str
    """A sentence about this clock."""
    steps: tuple[StepWait, ...]
    """All steps in order."""
    wait_share: float | None
    """Share of the time of all steps, from 0 to 1."""
    median_wait_ns: int | None
    """Median of the waits of all steps."""
    median_duration_ns: int | None
    """Median of the durations of all steps."""
    breakdown: StallBreakdown | None
    """None: only one recording was given."""
    cache: CacheWhatIf | None
    """Steps with shares of the data set in the cache; None: only one recording was given."""


def measure_stalls(
    trace: Trace,
    *,
    synthetic: Trace | None = None,
    cached: Trace | None = None,
    cache_shares: Sequence[float] = (),
    source: DataSource | None = None,
) -> DataStalls:
    """Return how long each step of a single-rank trace waits for data.

    Args:
        trace: a recording of one rank; for a breakdown, one with an empty cache.
        synthetic: a recording of the same job on data generated in memory.
        cached: a recording of the same job with all data cached.
        cache_shares: shares of the data set, from 0 to 1, to predict steps for; empty: some.
        source: how fast data is read; None: by the difference between the recordings.

    Raises:
        MemtraceError: a cache share is not from 0 to 1.
        TraceError: a breakdown is wanted and one of the recordings has no steps.
        ValueError: only one of ``synthetic`` and ``cached`` is given.
    """
    if (synthetic is None) != (cached is None):
        raise ValueError("a breakdown needs both the synthetic and the cached recording")
    breakdown = _break_down(synthetic, cached, trace) if synthetic is not None and cached is not None else None
    facts = _facts(trace)
    times, has_waits = facts.times, facts.has_waits
    has_steps = len(times.step) > 0
    unknown = [None] * len(times.step)
    waits = times.wait_ns.tolist() if has_waits else unknown
    host_waits = times.host_wait_ns.tolist() if has_waits else unknown
    return DataStalls(
        clock=times.clock,
        clock_note=facts.clock_note,
        steps=tuple(map(StepWait, times.step.tolist(), times.duration_ns.tolist(), waits, host_waits)),
        wait_share=int(times.wait_ns.sum()) / max(int(times.duration_ns.sum()), 1) if has_waits else None,
        median_wait_ns=int(np.median(times.wait_ns)) if has_waits else None,
        median_duration_ns=int(np.median(times.duration_ns)) if has_steps and facts.has_times else None,
        breakdown=breakdown,
        cache=None
        if breakdown is None
        else predict_cache_shares(breakdown.synthetic_ns, breakdown.cached_ns, breakdown.cold_ns, cache_shares, source),
    )


@dataclass(frozen=True)
class StallFacts:
    """What a comparison of recordings needs of one of them."""

    times: StepTimes
    has_times: bool
    has_waits: bool
    """Whether waits of steps were recorded."""
    clock_note: str
    host_duration_ns: Array
    """Durations of the steps by the clock of the host."""
    is_after_warm_up: Array
    """Which of the steps are after warm-up."""


def stall_facts(trace: Trace) -> StallFacts:
    """Return what ``measure_stalls`` needs of a single-rank trace."""
    times = _step_times(trace)
    return StallFacts(
        times=times,
        has_times=trace.has_times,
        has_waits=len(times.step) > 0 and trace.has_times and records_data_waits(trace),
        clock_note=_describe_clock(trace, times.clock),
        host_duration_ns=step_columns(trace).duration_ns,
        is_after_warm_up=np.isin(times.step, steps_after_warm_up(trace)),
    )


def _facts(trace: Trace) -> StallFacts:
    return trace.rank_result(trace.ranks[0], stall_facts)


def _describe_clock(trace: Trace, clock: Literal["host", "device"]) -> str:
    if clock == "device":
        return "Times are device times: a step waits while the GPU has finished its work and the host waits for data."
    if all(device == "cpu" for device in trace.devices):
        return "Times are host times."
    if len(timed_calls(trace)):
        return "Times are host times, because not every step has operators that were timed on the GPU."
    return (
        "Times are host times: the GPU may still work while the host waits for data. Record with device_time=True to "
        "measure waits on the GPU."
    )


@dataclass(frozen=True)
class StepTimes:
    """Durations and waits of the steps, one element per step."""

    clock: Literal["host", "device"]
    step: Array
    duration_ns: Array
    wait_ns: Array
    host_wait_ns: Array


def _step_times(trace: Trace) -> StepTimes:
    """Return the durations and waits of all steps, by the device's clock where the trace has it."""
    columns = step_columns(trace)
    queue = _device_queue(trace)
    bounds_ns = np.stack([columns.start_ns, columns.start_ns + columns.duration_ns])
    num_launched = np.searchsorted(queue.launch_ns, bounds_ns)
    if not len(columns) or (num_launched[0] == num_launched[1]).any():
        return StepTimes("host", columns.step, columns.duration_ns, columns.data_wait_ns, columns.data_wait_ns)
    # A step ends on the GPU when all that was launched before its end has finished, and at its end on the host at the
    # earliest: until then the GPU had nothing to do for the next step.
    begin_ns, end_ns = np.maximum(bounds_ns, queue.finished_ns(bounds_ns))
    return StepTimes(
        "device", columns.step, end_ns - begin_ns, _idle_waits(trace, columns, queue), columns.data_wait_ns
    )


@dataclass(frozen=True)
class _DeviceQueue:
    """The timed operator calls of all GPUs in the order of their launch."""

    launch_ns: Array
    """Host time of the launch."""
    latest_end_ns: Array
    """When the last of this call and all earlier ones ended on its GPU."""

    def finished_ns(self, host_ns: Array) -> Array:
        """Return when the GPUs finished what was launched before each moment; -1: nothing was."""
        ends = np.concatenate([[-1], self.latest_end_ns])
        finished: Array = ends[np.searchsorted(self.launch_ns, host_ns)]
        return finished


def _device_queue(trace: Trace) -> _DeviceQueue:
    launch_ns, end_ns = launch_times(trace), timed_calls(trace).end_ns
    order = np.flatnonzero(launch_ns >= 0)
    order = order[np.argsort(launch_ns[order], kind="stable")]
    return _DeviceQueue(launch_ns[order], np.maximum.accumulate(end_ns[order]))


def _idle_waits(trace: Trace, columns: StepColumns, queue: _DeviceQueue) -> Array:
    """Return for each step how long the GPUs had nothing to do while the host waited for data."""
    spans = trace.columns("spans", "kind", "start_ns", "duration_ns")
    waits = np.flatnonzero(spans["kind"] == SPAN["data_wait"])
    start_ns = spans["start_ns"][waits]
    end_ns = start_ns + spans["duration_ns"][waits]
    idle_ns = np.maximum(end_ns - np.maximum(start_ns, queue.finished_ns(start_ns)), 0)
    step = np.searchsorted(columns.start_ns, start_ns, side="right") - 1
    is_inside = (step >= 0) & (start_ns < (columns.start_ns + columns.duration_ns)[step])
    total = np.zeros(len(columns), np.int64)
    np.add.at(total, step[is_inside], idle_ns[is_inside])
    return total


def _break_down(synthetic: Trace, cached: Trace, cold: Trace) -> StallBreakdown:
    recordings = {"synthetic": synthetic, "cached": cached, "cold": cold}
    facts = {name: _facts(trace) for name, trace in recordings.items()}
    by_device = all(result.times.clock == "device" for result in facts.values())
    medians = []
    for name, result in facts.items():
        if not result.is_after_warm_up.any():
            raise TraceError(f"the {name} recording has no steps; mark them with rec.step() or rec.steps(loader)")
        duration_ns = result.times.duration_ns if by_device else result.host_duration_ns
        medians.append(int(np.median(duration_ns[result.is_after_warm_up])))
    synthetic_ns, cached_ns, cold_ns = medians
    clock: Literal["host", "device"] = "device" if by_device else "host"
    return StallBreakdown(clock, synthetic_ns, cached_ns, cold_ns, cached_ns - synthetic_ns, cold_ns - cached_ns)
