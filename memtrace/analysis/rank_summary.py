"""What is known of one rank of a job: its peak, what it consists of, the peaks and times of its steps, its problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from memtrace.analysis.attribution import KIND
from memtrace.analysis.coverage import compute_coverage
from memtrace.analysis.peak import Peak, find_peak, peak_by_category
from memtrace.analysis.rank_standing import RankStanding, measure_standing
from memtrace.analysis.steps import device_step_peaks, step_columns
from memtrace.errors import TraceError
from memtrace.format.arrays import Array
from memtrace.trace import Trace


@dataclass(frozen=True, kw_only=True)
class RankSummary:
    """Memory and time of one rank. None: unknown."""

    rank: int
    coordinates: dict[str, int] = field(default_factory=dict)
    """Place of the rank in each dimension of the job's parallelism, such as ``{"pp": 3, "dp": 0}``; empty: unknown."""
    device: str | None = None
    """The device with the highest peak; accelerators come before the CPU."""
    peak_bytes: int | None = None
    """Peak of requested bytes on that device."""
    peak_phase: str | None = None
    """Phase in which the peak was reached."""
    bytes_by_category: dict[str, int] = field(default_factory=dict)
    """Live bytes at the peak by category."""
    end_bytes: int | None = None
    """Live bytes at the end of the recording."""
    num_steps: int | None = None
    step_ns: int | None = None
    """Median duration of a step; ranks that wait for each other have equal steps."""
    compute_ns: int | None = None
    """Median time per step in operators other than those of torch.distributed."""
    clock_error_ns: int | None = None
    """Upper bound of the error of the rank's clock against that of rank 0."""
    clock_drift_ns: int | None = None
    """Change of the clock offset against rank 0 over the recording."""
    num_oom: int | None = None
    """Number of allocations that failed."""
    finished: bool | None = None
    """Whether the recording was closed properly."""
    ended_epoch_ns: int | None = None
    """Wall-clock time of the last event."""
    problem: str | None = None
    """Why the recording ended early, or why it cannot be read."""


@dataclass(frozen=True)
class DeviceLoad:
    """Memory of one device of one rank."""

    rank: int
    device: str
    peak_bytes: int
    """Peak of the requested bytes."""
    bytes_by_category: dict[str, int]
    """Live bytes at the peak by category."""
    step: Array
    """Numbers of the steps."""
    step_peak_bytes: Array
    """Peak of each step."""


@dataclass(frozen=True)
class RankReport:
    """All that the comparison of ranks needs of one rank."""

    summary: RankSummary
    standing: RankStanding | None = None
    """None: the rank cannot be read."""
    loads: tuple[DeviceLoad, ...] = ()
    """Every device of the rank that has memory events."""


def fullest_device_peak(trace: Trace) -> Peak | None:
    """The highest peak of any device of a single-rank trace, accelerators before the CPU; None without events."""
    devices = [device for device in trace.devices if device != "cpu"] or list(trace.devices)
    peaks = (find_peak(trace, device) for device in devices)
    return max(peaks, key=lambda device_peak: device_peak.requested.bytes, default=None)


def step_compute_ns(trace: Trace) -> Array | None:
    """Time of every step in operators other than those of torch.distributed; None where durations are unknown.

    Operators that run at the same time on several threads, or within each other (ranges of a Chrome trace), count once.
    """
    steps = step_columns(trace)
    ops = trace.columns("ops", "start_ns", "duration_ns", "name")
    if not trace.has_times or not len(ops["duration_ns"]) or (ops["duration_ns"] < 0).all():
        return None
    names = {int(name): trace.name(int(name)) or "" for name in np.unique(ops["name"])}
    communication = [name for name, text in names.items() if text.startswith("c10d")]
    computes = (ops["duration_ns"] > 0) & ~np.isin(ops["name"], communication)
    order = np.argsort(ops["start_ns"][computes], kind="stable")
    starts = ops["start_ns"][computes][order]
    ends = starts + ops["duration_ns"][computes][order]
    previous_end = np.concatenate([starts[:1], np.maximum.accumulate(ends)[:-1]])
    total = np.concatenate([[0], np.cumsum(np.maximum(ends - np.maximum(starts, previous_end), 0))])
    begin, end = steps.start_ns, steps.start_ns + steps.duration_ns
    compute: Array = total[np.searchsorted(starts, end)] - total[np.searchsorted(starts, begin)]
    return compute


def report_rank(trace: Trace) -> RankReport:
    """Return what is known of a single-rank trace; where it cannot be read, a summary with its problem."""
    (number,) = trace.ranks
    try:
        summary = _summarize_readable(trace, number)
        loads = tuple(_device_loads(trace, number)) if summary.peak_bytes is not None else ()
        return RankReport(summary, measure_standing(trace), loads)
    except TraceError as error:
        return RankReport(RankSummary(rank=number, problem=str(error)))


def _summarize_readable(trace: Trace, number: int) -> RankSummary:
    coverage = compute_coverage(trace)
    clock = trace.manifest.clock
    ended_early = "the process died while recording"
    begin_epoch_ns, last_event_ns = trace.manifest.t0_epoch_ns, coverage.last_event_ns
    common: dict[str, Any] = {
        "rank": number,
        "coordinates": {place.dimension: place.index for place in trace.manifest.coordinates},
        "num_steps": coverage.num_steps,
        "clock_error_ns": clock.error_ns if clock else None,
        "clock_drift_ns": clock.drift_ns if clock else None,
        "num_oom": int((trace.columns("events", "kind")["kind"] == KIND["oom"]).sum()),
        "finished": coverage.finished,
        "ended_epoch_ns": None if begin_epoch_ns is None or last_event_ns is None else begin_epoch_ns + last_event_ns,
        "problem": coverage.stop_reason if coverage.stop_reason or coverage.finished else ended_early,
    }
    top = fullest_device_peak(trace)
    if top is None:
        return RankSummary(**common)
    duration = step_columns(trace).duration_ns
    compute = step_compute_ns(trace)
    return RankSummary(
        **common,
        device=top.device,
        peak_bytes=top.requested.bytes,
        peak_phase=top.phase,
        bytes_by_category={
            group.name: group.bytes for group in peak_by_category(trace, top.device) if group.name is not None
        },
        end_bytes=top.end_bytes,
        step_ns=int(np.median(duration)) if len(duration) and trace.has_times else None,
        compute_ns=int(np.median(compute)) if compute is not None and len(compute) else None,
    )


def _device_loads(trace: Trace, rank: int) -> Iterator[DeviceLoad]:
    for device in trace.devices:
        peak_bytes = find_peak(trace, device).requested.bytes
        if peak_bytes:
            categories = {group.name or "unknown": group.bytes for group in peak_by_category(trace, device)}
            yield DeviceLoad(
                rank, device, peak_bytes, categories, step_columns(trace).step, device_step_peaks(trace, device)
            )
