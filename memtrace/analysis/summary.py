"""Summary of a trace: what ``memtrace summary`` prints, with and without ``--json``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from memtrace.analysis.allocation_sites import allocation_site
from memtrace.analysis.attribution import steps_are_marked
from memtrace.analysis.block_groups import (
    BlockGroup,
    group_by_category,
    group_by_module_pattern,
    group_by_site,
)
from memtrace.analysis.blocks import blocks
from memtrace.analysis.coverage import Coverage, compute_coverage
from memtrace.analysis.fragmentation import Fragmentation, compute_fragmentation
from memtrace.analysis.growth import GrowthSource, MemoryGrowth, measure_growth
from memtrace.analysis.leaks import find_leaks
from memtrace.analysis.oom import OutOfMemory, explain_out_of_memory
from memtrace.analysis.options import DEFAULT_OPTIONS, AnalysisOptions
from memtrace.analysis.peak import Peak, find_peak
from memtrace.analysis.stability import measure_stability
from memtrace.analysis.steps import StepColumns, records_data_waits, step_columns
from memtrace.analysis.swap import interval_clocks, swappable_peak_bytes
from memtrace.categories import describe_category_share
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.format.manifest import TraceSource
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace
from memtrace.units import format_bytes, format_duration, format_share

NUM_TOP_ROWS: Final = 8
"""Number of allocation sites, modules and blocks that a summary lists."""
MAX_PATTERN_EVENTS: Final = 500_000
"""Largest trace, in events, for which the summary searches for patterns: the search takes seconds beyond that, and
``memtrace steps``, ``access`` and ``findings`` do it on request."""


@dataclass(frozen=True)
class StepSummary:
    """The steps of a trace. None: unknown, or no steps."""

    num_steps: int | None
    """None for a file that holds totals and no blocks."""
    source: str | None
    """``marks``: marked by the program or its optimizer; ``events``: detected in the events alone; None: no steps."""
    median_duration_ns: int | None
    """Median duration of a step."""
    median_peak_bytes: int | None
    """Median of the peaks of the steps."""
    max_peak_bytes: int | None
    """Highest peak of a step."""
    median_allocated_bytes: int | None
    """Median of the bytes that a step allocates."""
    median_num_allocations: int | None
    """Median of the number of allocations of a step."""
    data_wait_share: float | None
    """Share of the time of all steps that they wait for data, from 0 to 1."""
    growth_bytes_per_step: int | None
    """Growth of the live bytes from step end to step end; None with too few steps."""
    growth_sources: tuple[GrowthSource, ...]
    """Allocation sites that grow, fastest first."""


@dataclass(frozen=True)
class BlockSummary:
    """One block that is live at the peak."""

    block_id: int
    """Number of the block in the trace."""
    bytes: int
    """Size of the block (requested bytes where the trace has them)."""
    category: str
    """One of ``schema.CATEGORIES``."""
    name: str | None
    """Name of the tensor, such as ``blocks.0.weight``."""
    module: str | None
    """Fully qualified name of the module that allocated the block."""
    operator: str | None
    """Operator that allocated the block."""
    site: str | None
    """Allocation site."""


@dataclass(frozen=True)
class PeakSummary(Displayed):
    """The peaks of one device. Each kind of bytes has a maximum of its own; groups are those live at the requested one.

    Where the trace has no requested bytes, the groups hold the sizes that the allocator counts.
    """

    requested_bytes: int | None
    """Bytes that the program requested; None: unknown."""
    allocated_bytes: int | None
    """Bytes that the allocator counts for the blocks, rounding included; None: unknown."""
    reserved_bytes: int | None
    """Bytes reserved in segments; None: unknown, or an allocator without segments (the CPU)."""
    time_ns: int | None
    """Time of the peak since the start of the recording; None: unknown, or at the start."""
    event: int
    """Row of the events table after which the peak is reached; -1: at the start of the recording."""
    step: int | None
    """Step of the peak; None: outside every step."""
    phase: str | None
    """Phase of the peak: forward, backward, optimizer or other; None: unknown."""
    by_category: dict[str, int]
    """Bytes of each category."""
    likely_activation_bytes: int
    """Those bytes of activations that no backward read, because memory ran out in forward: they are likely ones."""
    top_sites: tuple[BlockGroup, ...]
    """The allocation sites that hold most, largest first."""
    top_modules: tuple[BlockGroup, ...]
    """The module patterns (``GPT.blocks.*.mlp``) that hold most, largest first."""
    top_blocks: tuple[BlockSummary, ...]
    """The largest blocks, largest first."""

    @property
    def bytes(self) -> int:
        """The requested bytes; where they are unknown, the allocated bytes."""
        return self.allocated_bytes or 0 if self.requested_bytes is None else self.requested_bytes


@dataclass(frozen=True)
class DeviceSummary:
    """The memory of one device."""

    device: str
    """Name of the device, such as ``cuda:0``."""
    peak: PeakSummary
    """The peak and the blocks that are live at it."""
    baseline_requested_bytes: int | None
    """Bytes that were allocated before the recording; None: unknown."""
    live_requested_bytes_at_end: int | None
    """Requested bytes that are live at the end of the trace; None: unknown."""
    reserved_bytes_at_end: int | None
    """Bytes reserved at the end of the trace; None: unknown."""
    fragmentation: Fragmentation | None
    """None where the trace has no segments."""


@dataclass(frozen=True)
class PatternSummary:
    """Patterns over time. None: unknown, or not searched for (``MAX_PATTERN_EVENTS``)."""

    is_iterative: bool
    """Whether the trace has steps."""
    stability_share: float | None
    """Share of the bytes of a typical step that the other steps repeat, from 0 to 1."""
    swappable_bytes_at_peak: int | None
    """Bytes that can be in host memory at the peak, with one copy at a time in each direction."""
    num_intervals_by_clock: dict[str, int] | None
    """The clocks that measured how long: number of access intervals by ``host``, ``launch`` (host time at which
    operators on a GPU were launched) and ``device`` (the GPU's time)."""
    leak_bytes_per_step: float | None
    """Growth of all leaks together."""
    leak_site: str | None
    """Allocation site that leaks fastest."""


@dataclass(frozen=True)
class Summary(Displayed):
    """What a rank holds in memory, when, and where it was allocated. Bytes and nanoseconds."""

    rank: int
    """Number of the rank in its job; 0 for a single process."""
    coverage: Coverage
    """Which part of the run the trace covers."""
    source: TraceSource
    """Where the trace comes from."""
    command: tuple[str, ...]
    """Command line of the recorded program; empty: unknown."""
    steps: StepSummary
    """The training steps."""
    devices: tuple[DeviceSummary, ...]
    """The devices with memory events."""
    patterns: PatternSummary
    """Stability, leaks and swap candidates."""
    out_of_memory: tuple[OutOfMemory, ...]
    """The allocations that failed, in order of time."""

    @property
    def peak_bytes(self) -> int:
        """The highest peak of any device."""
        return max((device.peak.bytes for device in self.devices), default=0)


@dataclass(frozen=True)
class JobSummary(Displayed):
    """The summaries of all ranks of a job."""

    ranks: tuple[Summary, ...]
    """One summary per rank, in order of rank."""

    @property
    def highest(self) -> Summary:
        """The rank with the highest peak."""
        return max(self.ranks, key=lambda rank: rank.peak_bytes)


def summarize(trace: Trace, options: AnalysisOptions = DEFAULT_OPTIONS) -> Summary:
    """Summarize a single-rank trace.

    Args:
        trace: The trace of one rank.
        options: The bandwidths of copies and the smallest block to swap.
    """
    manifest = trace.manifest
    return Summary(
        rank=manifest.rank,
        coverage=compute_coverage(trace),
        source=manifest.source,
        command=manifest.command,
        steps=_summarize_steps(trace),
        devices=tuple(_summarize_device(trace, device) for device in trace.devices),
        patterns=_summarize_patterns(trace, options),
        out_of_memory=tuple(explain_out_of_memory(trace)),
    )


def summarize_job(trace: Trace, options: AnalysisOptions = DEFAULT_OPTIONS) -> JobSummary:
    """Summarize every rank of a trace."""
    return JobSummary(tuple(summarize(trace.rank(rank), options) for rank in trace.ranks))


def summarize_peak(trace: Trace, device: str) -> PeakSummary:
    """Summarize the peak of one device of a single-rank trace (cached)."""
    return trace.cached(_summarize_peak, device)


def describe_peak(peak: PeakSummary) -> str:
    """Return a sentence such as ``Peak 84.3 MiB at 1.09 s (step 1, backward); activations hold 81 %``."""
    step = None if peak.step is None else f"step {peak.step}"
    where = ", ".join(part for part in (step, peak.phase) if part)
    text = (
        f"Peak {format_bytes(peak.bytes)} at {format_moment(peak.event, peak.time_ns)}{f' ({where})' if where else ''}"
    )
    if not peak.by_category or not peak.bytes:
        return text
    largest = max(peak.by_category, key=lambda category: peak.by_category[category])
    likely = (
        " (likely: memory ran out before backward)" if largest == "activation" and peak.likely_activation_bytes else ""
    )
    return f"{text}; {describe_category_share(largest, format_share(peak.by_category[largest], peak.bytes))}{likely}"


def format_moment(event: int, time_ns: int | None) -> str:
    """Format a moment of a trace: its time; without times its event; ``the start`` for event -1."""
    if event < 0:
        return "the start"
    return f"event {event:,}" if time_ns is None else format_duration(time_ns)


def _summarize_patterns(trace: Trace, options: AnalysisOptions) -> PatternSummary:
    is_searched = trace.num_rows("events") <= MAX_PATTERN_EVENTS and trace.has_blocks
    result = find_leaks(trace, with_long_lived=False)
    return PatternSummary(
        is_iterative=bool(len(step_columns(trace))),
        stability_share=measure_stability(trace).median_matching_bytes if is_searched else None,
        swappable_bytes_at_peak=(
            swappable_peak_bytes(trace, options.bandwidths, min_bytes=options.min_swap_bytes) if is_searched else None
        ),
        num_intervals_by_clock=interval_clocks(trace) if is_searched else None,
        leak_bytes_per_step=result.bytes_per_step,
        leak_site=result.leaks[0].site if result.leaks else None,
    )


def _summarize_steps(trace: Trace) -> StepSummary:
    source = "marks" if steps_are_marked(trace) else "events"
    return summarize_steps(trace, step_columns(trace), measure_growth(trace), source, records_data_waits(trace))


def summarize_steps(
    trace: Trace, columns: StepColumns, growth: MemoryGrowth | None, source: str, has_waits: bool
) -> StepSummary:
    """Summarize the steps of a rank.

    Args:
        trace: The trace of the rank, of which only the manifest is read.
        columns: The steps.
        growth: The growth of the memory; None with too few steps.
        source: ``marks`` or ``events``.
        has_waits: Whether waits for data were recorded.
    """
    num_steps, total_ns = len(columns), int(columns.duration_ns.sum())
    has_waits = has_waits and total_ns > 0 and trace.has_times
    return StepSummary(
        num_steps=num_steps if trace.has_blocks else None,
        source=source if num_steps else None,
        median_duration_ns=_median(columns.duration_ns) if trace.has_times else None,
        median_peak_bytes=_median(columns.peak_bytes),
        max_peak_bytes=int(columns.peak_bytes.max()) if num_steps else None,
        median_allocated_bytes=_median(columns.allocated_bytes) if trace.has_blocks else None,
        median_num_allocations=_median(columns.num_allocs) if trace.has_blocks else None,
        data_wait_share=int(columns.data_wait_ns.sum()) / total_ns if has_waits else None,
        growth_bytes_per_step=growth.bytes_per_step if growth else None,
        growth_sources=growth.sources if growth else (),
    )


def _median(values: Array) -> int | None:
    return int(np.median(values)) if len(values) else None


def _summarize_device(trace: Trace, device: str) -> DeviceSummary:
    peak = find_peak(trace, device)
    return DeviceSummary(
        device=device,
        peak=summarize_peak(trace, device),
        baseline_requested_bytes=peak.baseline_bytes if peak.is_requested else None,
        live_requested_bytes_at_end=peak.end_bytes if peak.is_requested else None,
        reserved_bytes_at_end=peak.reserved_end_bytes,
        fragmentation=compute_fragmentation(trace, device),
    )


def _summarize_peak(trace: Trace, device: str) -> PeakSummary:
    return describe_live_blocks(trace, find_peak(trace, device))


def describe_live_blocks(trace: Trace, peak: Peak) -> PeakSummary:
    """Summarize a peak by its live blocks, whose origins a single-rank trace has."""
    table = blocks(trace)
    waiting = peak.live[table.waits_for_backward[peak.live]]
    categories = {group.name: group.bytes for group in group_by_category(trace, peak.live)}
    largest = peak.live[np.argsort(-table.size[peak.live], kind="stable")][:NUM_TOP_ROWS]
    return PeakSummary(
        requested_bytes=peak.requested.bytes if peak.is_requested else None,
        allocated_bytes=peak.allocated.bytes if peak.allocated else None,
        reserved_bytes=peak.reserved.bytes if peak.reserved else None,
        time_ns=peak.time_ns,
        event=peak.requested.event,
        step=peak.step,
        phase=peak.phase,
        by_category={name: categories[name] for name in CATEGORIES if name in categories},
        likely_activation_bytes=int(table.size[waiting].sum()),
        top_sites=tuple(group_by_site(trace, peak.live)[:NUM_TOP_ROWS]),
        top_modules=tuple(group_by_module_pattern(trace, peak.live)[:NUM_TOP_ROWS]),
        top_blocks=tuple(summarize_block(trace, int(block_id)) for block_id in largest),
    )


def summarize_block(trace: Trace, block_id: int) -> BlockSummary:
    """Summarize one block of a single-rank trace."""
    table = blocks(trace)
    return BlockSummary(
        block_id=block_id,
        bytes=int(table.size[block_id]),
        category=CATEGORIES[table.category[block_id]],
        name=trace.name(int(table.name[block_id])),
        module=trace.name(int(table.module[block_id])),
        operator=trace.name(int(table.op_name[block_id])),
        site=allocation_site(trace, int(table.stack[block_id])),
    )
