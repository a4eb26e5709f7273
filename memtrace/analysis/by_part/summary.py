"""The summary of a long trace, a part at a time: equal to that of ``memtrace.analysis.summary``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol, TypeVar

import numpy as np

from memtrace.analysis.block_accesses import seen_share_by_manifest
from memtrace.analysis.by_part.events import EventFacts, NotDivisibleError
from memtrace.analysis.by_part.levels import NO_DEVICE, DeviceFacts
from memtrace.analysis.by_part.live_blocks import (
    BlockColumns,
    Moment,
    describe_blocks,
    last_parts,
    live_ids,
    small_trace,
)
from memtrace.analysis.by_part.passes import EventPass, SpanPass
from memtrace.analysis.by_part.retained_memory import LongRetainedMemory
from memtrace.analysis.by_part.segments import find_fragmentation, find_reserved
from memtrace.analysis.by_part.spans import RankSpans, open_part
from memtrace.analysis.by_part.step_facts import UNKNOWN
from memtrace.analysis.coverage import Coverage, describe_coverage
from memtrace.analysis.growth import describe_growth
from memtrace.analysis.leaks import LeakAnalysis, measure_leaks
from memtrace.analysis.peak import Maximum, Peak, phase_at
from memtrace.analysis.steps import StepColumns, waiting_ns
from memtrace.analysis.summary import (
    MAX_PATTERN_EVENTS,
    DeviceSummary,
    PatternSummary,
    Summary,
    describe_live_blocks,
    summarize_steps,
)
from memtrace.analysis.thresholds import WARM_UP_STEPS
from memtrace.format.decode import sort_devices
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

MIN_PARTS: Final = 2
S = TypeVar("S")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
T = TypeVar("T")


class PartAnalysis(Protocol[T, S, R_co]):
    """An analysis of the parts of one rank."""

    is_quick: ClassVar[bool]
    """Whether the parts are read in a small part of the time that reading their events takes."""

    def tasks(self, trace: Trace) -> list[T]:
        """Return what ``partial`` is called with: runs of parts that follow each other."""
        ...

    @staticmethod
    def partial(trace: Trace, task: T) -> S:
        """Return the state of a run of parts."""
        ...

    def merge(self, earlier: S, later: S) -> S:
        """Return the state of two runs that follow each other."""
        ...

    @staticmethod
    def finish(state: S) -> R_co:
        """Return the result for all parts."""
        ...


class PartRunner(Protocol):
    """Runs analyses of parts, in this process or in others."""

    def __call__(self, trace: Trace, analysis: PartAnalysis[T, S, R], task: str) -> R:
        """Return the result of an analysis of a single-rank trace; ``task`` says what it does, for progress."""
        ...


@dataclass(frozen=True)
class LongSummary:
    """The summary of a long trace, and what a verdict on it needs besides."""

    summary: Summary
    highest_change_bytes: dict[str, int]
    """Highest level of the live bytes after any change, by device."""
    peak_bytes: dict[str, int]
    """Peak of the live bytes by device."""
    wait_ns: int
    """Time that the steps waited for data."""
    step_ns: int
    """Duration of all steps."""
    has_waits: bool
    """Whether waits were recorded."""


def is_divisible(trace: Trace) -> bool:
    """Return whether a single-rank trace is long enough, and of the kind, to be summarized a part at a time."""
    manifest, options = trace.manifest, trace.manifest.options
    has_gaps = options is not None and (options.last_steps is not None or options.schedule is not None)
    return (
        manifest.source.kind == "recording"
        and manifest.source.observer == "native"
        and not has_gaps
        and trace.has_blocks
        and trace.surroundings is None
        and len(trace.part_numbers) >= MIN_PARTS
        and _num_events(trace) > MAX_PATTERN_EVENTS
    )


def _num_events(trace: Trace) -> int:
    """Return the number of events by the manifest; by the parts where the recording did not write it."""
    known = trace.manifest.num_events
    return trace.num_rows("events") if known is None else known


def summarize_parts(trace: Trace, run: PartRunner) -> LongSummary | None:
    """Summarize a long single-rank trace a part at a time.

    Args:
        trace: the trace; ``is_divisible``.
        run: runs the passes.

    Returns:
        None where the trace has to be summarized whole: no step is marked, steps overlap, memory ran out, or a schedule
        chose the steps.
    """
    options = trace.manifest.options
    if options is not None and options.schedule is not None:  # gaps are known as a whole only
        return None
    spans = run(trace, SpanPass.of(trace), "reading steps")
    if spans is None or spans.facts.num_first_live:
        return None
    try:
        facts = run(trace, EventPass(spans), "reading events")
    except NotDivisibleError:
        return None
    is_sparse = facts.last_block >= facts.num_events // 2 + 1024
    if facts.num_failures or is_sparse:
        return None
    try:
        return _Finish(trace, spans, facts).summary()
    except NotDivisibleError:
        return None


class _Finish:
    """Puts what the passes found together."""

    def __init__(self, trace: Trace, spans: RankSpans, facts: EventFacts) -> None:
        self._trace, self._spans, self._facts = trace, spans, facts
        self._first_rows = np.concatenate([[0], np.cumsum(facts.part_events)])
        self._segments = trace.with_tables({"segments": trace.arrow_table("segments")}, {})
        names = {*facts.devices, *self._segments.devices, *spans.facts.devices}
        self._devices = sort_devices(names)
        self._older_bytes = sum(device.older_bytes for device in facts.devices.values())
        self._columns = self._step_columns()

    def summary(self) -> LongSummary:
        """Return the summary."""
        trace, facts = self._trace, self._facts
        leaks = measure_leaks(
            LongRetainedMemory(
                trace,
                facts.retained,
                self._spans.steps.number[WARM_UP_STEPS:],
                facts.collected_bytes if len(self._spans.facts.collections.start_ns) else None,
                has_phases=self._spans.facts.has_phases,
            )
        )
        described = {name: self._describe_device(name) for name in self._devices}
        has_waits = bool(len(self._spans.facts.waits.start_ns))
        summary = Summary(
            rank=trace.manifest.rank,
            coverage=self._coverage(described),
            source=trace.manifest.source,
            command=trace.manifest.command,
            steps=summarize_steps(trace, self._columns, describe_growth(leaks), "marks", has_waits),
            devices=tuple(device for device, _ in described.values()),
            patterns=_patterns(leaks),
            out_of_memory=(),
        )
        levels = {name: self._device(name) for name in self._devices}
        return LongSummary(
            summary=summary,
            highest_change_bytes={
                name: max(0, device.older_bytes + device.live.highest_change)
                if device.live.highest_change is not None
                else 0
                for name, device in levels.items()
            },
            peak_bytes={name: device.live.maximum(device.older_bytes).bytes for name, device in levels.items()},
            wait_ns=int(self._columns.data_wait_ns.sum()),
            step_ns=int(self._columns.duration_ns.sum()),
            has_waits=has_waits,
        )

    def _device(self, name: str) -> DeviceFacts:
        return self._facts.devices.get(name, NO_DEVICE)

    def _step_columns(self) -> StepColumns:
        steps, facts, waits = self._spans.steps, self._facts, self._spans.facts.waits
        columns = facts.steps.columns
        start = self._older_bytes
        end_level = np.where(columns["live_end_bytes"] == UNKNOWN, facts.live_bytes, columns["live_end_bytes"])
        peak = np.where(columns["peak_bytes"] == UNKNOWN, end_level, columns["peak_bytes"])
        self._first_row = np.where(columns["first_row"] == UNKNOWN, facts.num_events, columns["first_row"])
        self._end_row = np.where(columns["end_row"] == UNKNOWN, facts.num_events, columns["end_row"])
        return StepColumns(
            step=steps.number,
            start_ns=steps.start_ns,
            duration_ns=steps.duration_ns,
            peak_bytes=start + peak,
            data_wait_ns=waiting_ns(waits.start_ns, waits.duration_ns, steps.start_ns, steps.duration_ns),
            live_end_bytes=start + end_level,
            **{name: columns[name] for name in ("allocated_bytes", "num_allocs", "num_frees", "num_reads",
                                                "num_writes")},
        )  # fmt: skip

    def _coverage(self, described: dict[str, tuple[DeviceSummary, int]]) -> Coverage:
        facts, outside = self._facts, self._spans.facts.outside_bytes
        return describe_coverage(
            self._trace,
            (facts.first_ns, facts.last_ns) if self._trace.has_times and facts.num_events else None,
            num_events=facts.num_events,
            num_steps=len(self._columns),
            baseline_bytes=facts.baseline_bytes,
            unattributed_bytes=sum(unknown for _, unknown in described.values()),
            outside_bytes=sum(outside.values()) if outside else None,
            seen_share=seen_share_by_manifest(self._trace),
        )

    def _moment(self, row: int) -> Moment:
        place = int(np.searchsorted(self._first_rows, row, side="right")) - 1
        return Moment(self._trace.part_numbers[place], row - int(self._first_rows[place]))

    def _live_blocks(self, device: str, row: int) -> BlockColumns:
        """Return the blocks that are live on a device after a row; -1: at the start."""
        older = self._device(device).older_ids
        if row < 0:
            moment, ids, parts = None, np.empty(0, np.int64), np.empty(0, np.int64)
        else:
            moment = self._moment(row)
            ids, is_freed = live_ids(self._trace, device, moment)
            parts = np.full(len(ids), moment.part)
            parts[~is_freed] = last_parts(self._trace, ids[~is_freed], moment.part)
        # Blocks that are older than the recording are live before they are first seen.
        for number, later in older:
            if moment is None or number > moment.part:
                ids = np.concatenate([ids, later])
                parts = np.concatenate([parts, last_parts(self._trace, later, number)])
        return describe_blocks(self._trace, ids, parts, has_phases=self._spans.facts.has_phases)

    def _describe_device(self, name: str) -> tuple[DeviceSummary, int]:
        """Return the summary of a device, and the bytes of category unknown at its peak."""
        device = self._device(name)
        top = device.live.maximum(device.older_bytes)
        columns = self._live_blocks(name, top.event)
        small = small_trace(self._trace, name, columns)
        reserved = find_reserved(self._segments, name, device)
        peak = self._peak(name, device, top, len(columns["id"]), reserved)
        described = describe_live_blocks(small, peak)
        blocks = tuple(replace(block, block_id=int(columns["id"][block.block_id])) for block in described.top_blocks)
        unknown = columns["category"] == CATEGORIES.index("unknown")
        fragmentation = None
        if reserved is not None:
            fragmentation = find_fragmentation(self._trace, self._segments, name, device, reserved, self._live_blocks)
        if fragmentation is not None:
            fragmentation = replace(fragmentation, time_ns=self._time_of(max(fragmentation.event, 0)))
        summary = DeviceSummary(
            device=name,
            peak=replace(described, top_blocks=blocks),
            baseline_requested_bytes=peak.baseline_bytes if peak.is_requested else None,
            live_requested_bytes_at_end=peak.end_bytes if peak.is_requested else None,
            reserved_bytes_at_end=peak.reserved_end_bytes,
            fragmentation=fragmentation,
        )
        return summary, int(columns["size"][unknown].sum())

    def _peak(
        self, name: str, device: DeviceFacts, top: Maximum, num_live: int, reserved: tuple[Maximum, int] | None
    ) -> Peak:
        is_allocated_known = device.is_allocated_known and device.num_blocks > 0
        if name != "cpu" and not is_allocated_known and device.num_blocks:
            raise NotDivisibleError("the allocator's sizes have to be found by a replay")
        allocated = device.allocated_maximum() if is_allocated_known else None
        row = np.array([max(top.event, 0)])
        inside = np.flatnonzero((self._first_row <= row) & (row < self._end_row))
        segments = self._segments.columns("segments", "device", "requested_size")
        final = np.empty(0, np.int64)
        if name in self._segments.devices:
            final = segments["requested_size"][segments["device"] == self._segments.devices.index(name)]
        is_final_known = len(final) and (final >= 0).all()
        return Peak(
            device=name,
            is_requested=device.is_requested,
            requested=top,
            allocated=allocated,
            reserved=reserved[0] if reserved else None,
            time_ns=self._time_of(top.event) if top.event >= 0 else None,
            step=int(self._spans.steps.number[inside[-1]]) if len(inside) else None,
            phase=self._phase_of(top.event) if top.event >= 0 else None,
            live=np.arange(num_live),
            baseline_bytes=device.older_bytes,
            end_bytes=int(final.sum()) if is_final_known else device.older_bytes + device.live.total,
            reserved_end_bytes=reserved[1] if reserved else None,
        )

    def _time_of(self, row: int) -> int | None:
        if not self._trace.has_times:
            return None
        moment = self._moment(row)
        stored = self._trace.stored_columns(moment.part, {"events": ("time_ns",)})
        return int(stored.columns["events"]["time_ns"][moment.row])

    def _phase_of(self, row: int) -> str | None:
        moment = self._moment(row)
        part = open_part(self._trace, moment.part, has_phases=self._spans.facts.has_phases)
        return phase_at(part, moment.row + part.num_rows("live"))


def _patterns(leaks: LeakAnalysis) -> PatternSummary:
    return PatternSummary(
        is_iterative=True,
        stability_share=None,
        swappable_bytes_at_peak=None,
        num_intervals_by_clock=None,
        leak_bytes_per_step=leaks.bytes_per_step,
        leak_site=leaks.leaks[0].site if leaks.leaks else None,
    )
