"""Summarizes traces for ``memtrace summary`` and prints the result.

It imports most of the analysis, which ``memtrace.cli.summary`` does while another process reads a file.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Final

from memtrace.cli.failure import print_failure
from memtrace.cli.feedback import FEEDBACK
from memtrace.cli.output import (
    console,
    escape,
    fact_table,
    plain_table,
    print_json,
    print_next_command,
    site_with_modules,
    working,
)
from memtrace.cli.verdict import print_verdict

from memtrace.analysis.device_clock import CLOCK_LABELS
from memtrace.analysis.summary import (
    DeviceSummary,
    PatternSummary,
    PeakSummary,
    StepSummary,
    Summary,
    describe_peak,
)
from memtrace.categories import CATEGORY_LABELS
from memtrace.engine.questions import judge_ranks
from memtrace.format.schema import NO_BLOCKS
from memtrace.planning.verdict import JudgedJob, JudgedSummary
from memtrace.units import UNKNOWN, format_bytes, format_count, format_duration, format_share

if TYPE_CHECKING:
    from memtrace.cli.arguments import Selection
    from memtrace.cli.workers import Workers
    from rich.console import Console

    from memtrace.analysis.fragmentation import Fragmentation
    from memtrace.analysis.options import AnalysisOptions
    from memtrace.trace import Trace

RESULT: Final = JudgedSummary | JudgedJob
"""What --json prints: ``JudgedJob`` where the traces hold several ranks."""
NUM_ROWS: Final = 6
"""Most rows of a table of allocation sites or modules."""
FILE_KINDS: Final = {"cuda_snapshot": "CUDA memory snapshot", "chrome_trace": "Chrome trace"}
"""Names of file kinds that have proper nouns in them."""
BAR_CHARS: Final = 30


def print_summary(
    trace: Trace, selection: Selection, workers: Workers, options: AnalysisOptions, *, as_json: bool
) -> None:
    """Summarize open traces and print the result.

    Args:
        trace: the traces.
        selection: how the user named them.
        workers: what analyzes them.
        options: options of the summary.
        as_json: print JSON in place of text.
    """
    with working(f"analyzing {selection.name}"), workers.engine(trace, selection.source) as engine:
        job = judge_ranks(engine, trace, selection.source, options)
    main = job.judged
    for left_out in job.unreadable:
        FEEDBACK.note(f"rank {left_out.rank} is left out: {left_out.reason}")
    if as_json:
        print_json(main if len(trace.ranks) == 1 else job)
        return
    out = console()
    if len(job.ranks) > 1:
        _print_ranks(out, job)
    _print_summary(out, selection.name, main)
    print_next_command(out, f"memtrace report {shlex.join(selection.paths)} -o report.html")


def _print_ranks(out: Console, job: JudgedJob) -> None:
    table = plain_table("rank", "device", "peak", "at the end", "phase of the peak")
    for rank in job.ranks:
        for device in rank.devices:
            end = format_bytes(device.live_requested_bytes_at_end)
            table.add_row(str(rank.rank), device.device, format_bytes(device.peak.bytes), end,
                          device.peak.phase or UNKNOWN)  # fmt: skip
    out.print(table)
    reason = "ran out of memory first" if job.judged.out_of_memory else "has the highest peak"
    out.print(f"\n[bold]Rank {job.judged.rank}[/] {reason}:\n")


def _print_summary(out: Console, name: str, summary: JudgedSummary) -> None:
    out.print(f"[bold]{escape(name)}[/]")
    print_verdict(out, summary.verdict)
    out.print()
    _print_coverage(out, summary)
    for device in summary.devices:
        _print_device(out, device)
    for failure in summary.out_of_memory:
        print_failure(out, failure, with_advice=not summary.verdict.fixes)
    out.print()
    table = fact_table()
    for label, text in (*_step_facts(summary.steps), *_pattern_facts(summary.patterns)):
        table.add_row(f"[bold]{label}[/]", text)
    out.print(table)


def _print_coverage(out: Console, summary: Summary) -> None:
    coverage, source = summary.coverage, summary.source
    first, last = coverage.first_event_ns, coverage.last_event_ns
    span = f" in {format_duration(last - first)}" if first is not None and last is not None else ""
    if source.kind == "recording":
        origin = f"recorded by the {source.observer or UNKNOWN} observer"
    else:
        origin = FILE_KINDS.get(source.kind or "", (source.kind or UNKNOWN).replace("_", " "))
    out.print(f"{coverage.num_events:,} events{span}, {format_count(coverage.num_steps, 'step')}, {escape(origin)}")
    lost = UNKNOWN if coverage.lost_events is None else f"{coverage.lost_events:,}"
    facts = [f"lost events: {lost}", f"allocated before the recording: {format_bytes(coverage.baseline_bytes)}"]
    if coverage.unattributed_bytes:
        facts.append(f"unknown category at the peak: {format_bytes(coverage.unattributed_bytes)}")
    if coverage.outside_allocator_bytes is not None:
        facts.append(f"outside the allocator: {format_bytes(coverage.outside_allocator_bytes)}")
    if coverage.seen_access_share is not None and coverage.seen_access_share < 1:
        facts.append(f"reads and writes recorded: {format_share(coverage.seen_access_share, 1)} of the bytes accessed")
    out.print("Coverage: " + "; ".join(facts))
    if not coverage.finished:
        reason = escape(coverage.stop_reason or "the process died while recording")
        out.print(f"[bold]Unfinished recording[/]: {reason}; the trace ends at the last flush")
    elif coverage.stop_reason:
        out.print(f"Recording ended early: {escape(coverage.stop_reason)}")
    for note in coverage.notes:
        out.print(f"Note: {escape(note)}")


def _print_device(out: Console, device: DeviceSummary) -> None:
    peak = device.peak
    out.print(f"\n[bold]{device.device}[/]")
    out.print(f"[bold]{describe_peak(peak)}[/]")
    out.print("; ".join(_device_facts(device)))
    if device.fragmentation:
        out.print(_fragmentation_sentence(device.fragmentation))
    table = plain_table("Peak by category", "size", "share", "")
    for category, num_bytes in sorted(peak.by_category.items(), key=lambda item: -item[1]):
        bar = "#" * round(BAR_CHARS * num_bytes / peak.bytes) if peak.bytes else ""
        table.add_row(CATEGORY_LABELS[category], format_bytes(num_bytes), format_share(num_bytes, peak.bytes), bar)
    out.print()
    out.print(table)
    _print_group_tables(out, peak)


def _device_facts(device: DeviceSummary) -> list[str]:
    peak, end = device.peak, format_bytes(device.live_requested_bytes_at_end)
    if device.device == "cpu" and peak.allocated_bytes in (None, peak.bytes):  # an allocator without segments
        return [f"Live at the end: {end}"]
    facts = [f"Allocated: {format_bytes(peak.allocated_bytes)}", f"live at the end: {end}"]
    return facts if device.device == "cpu" else [facts[0], f"reserved: {format_bytes(peak.reserved_bytes)}", facts[1]]


def _print_group_tables(out: Console, peak: PeakSummary) -> None:
    missing = []
    for noun, groups, absent in (
        ("allocation site", peak.top_sites, "(no stack)"),
        ("module", peak.top_modules, "(outside any module)"),
    ):
        if all(group.name is None for group in groups):
            missing.append(noun)
            continue
        table = plain_table("size", "share", "blocks", f"Peak by {noun}")
        for group in groups[:NUM_ROWS]:
            reason = f"(no stack: {group.no_stack_reason})" if group.no_stack_reason else absent
            name = escape(site_with_modules(group.name or reason, group.modules))
            share = format_share(group.bytes, peak.bytes)
            table.add_row(format_bytes(group.bytes), share, f"{group.num_blocks:,}", name)
        out.print()
        out.print(table)
    if missing:
        out.print(f"\nNo {' and no '.join(missing)} is known for the blocks at the peak.")


def _fragmentation_sentence(fragmentation: Fragmentation) -> str:
    return (
        f"Fragmentation: {format_bytes(fragmentation.free_bytes)} of {format_bytes(fragmentation.reserved_bytes)} "
        f"reserved ({format_count(fragmentation.num_segments, 'segment')}) are free when memory use is highest; "
        f"{format_bytes(fragmentation.pinned_bytes)} of them share a segment with live blocks. Rounding adds "
        f"{format_bytes(fragmentation.waste_bytes)}. Largest request that fits: "
        f"{format_bytes(fragmentation.largest_fit_bytes)}"
    )


def _step_facts(steps: StepSummary) -> list[tuple[str, str]]:
    if steps.num_steps is None:
        return [("Steps", f"unavailable: {NO_BLOCKS}")]
    if steps.num_steps == 0:
        return [("Steps", "none marked and none detected; mark them with rec.step() or "
                 "rec.steps(loader)")]  # fmt: skip
    source = "detected from the events" if steps.source == "events" else "marked"
    share = steps.data_wait_share
    allocations = UNKNOWN if steps.median_num_allocations is None else f"{steps.median_num_allocations:,}"
    facts = [
        ("Steps", f"{steps.num_steps:,} {source}; median {format_duration(steps.median_duration_ns)}, "
         f"waiting for data {format_share(share)}"),
        ("Peak per step", f"median {format_bytes(steps.median_peak_bytes)}, "
         f"maximum {format_bytes(steps.max_peak_bytes)}"),
        ("Allocated per step", f"median {format_bytes(steps.median_allocated_bytes)} in {allocations} blocks"),
    ]  # fmt: skip
    growth = steps.growth_bytes_per_step
    if growth is None:
        facts.append(("Memory growth", "unknown, too few steps"))
    elif growth <= 0:
        facts.append(("Memory growth", "none"))
    else:
        sources = [f"{format_bytes(row.bytes_per_step)} per step at {row.site}" for row in steps.growth_sources]
        facts.append(("Memory growth", escape("\n".join([f"{format_bytes(growth)} per step stay live", *sources]))))
    return facts


def _pattern_facts(patterns: PatternSummary) -> list[tuple[str, str]]:
    facts = []
    if patterns.stability_share is not None:
        facts.append(("Stability", f"{format_share(patterns.stability_share)} of the bytes of a typical step recur in "
                      "the other steps"))  # fmt: skip
    if patterns.leak_bytes_per_step:
        speed = format_bytes(patterns.leak_bytes_per_step)
        where = f"most at {patterns.leak_site}" if patterns.leak_site else "spread over many allocation sites"
        facts.append(("Leak", escape(f"{speed} per step, {where}")))
    if patterns.swappable_bytes_at_peak:
        clocks = ", ".join(CLOCK_LABELS[clock] for clock in patterns.num_intervals_by_clock or ())
        size = format_bytes(patterns.swappable_bytes_at_peak)
        facts.append(("Swap candidates", f"{size} could wait in host memory at the peak, with one copy at a time in "
                      f"each direction (intervals by {clocks})"))  # fmt: skip
    return facts
