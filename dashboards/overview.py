"""The head of the page: what the trace covers, key figures of a device, and what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from memtrace.dashboards.text import name_text

from memtrace.analysis.coverage import Coverage, compute_coverage
from memtrace.analysis.growth import measure_growth
from memtrace.analysis.options import DEFAULT_OPTIONS, AnalysisOptions
from memtrace.analysis.peak import Peak, find_peak, peak_by_category, peak_by_module, peak_by_site
from memtrace.analysis.steps import step_columns
from memtrace.categories import CATEGORY_LABELS
from memtrace.planning.fix import Fix, describe_saving
from memtrace.planning.verdict import find_verdict
from memtrace.units import UNKNOWN, format_bytes, format_count, format_duration, format_share

if TYPE_CHECKING:
    from memtrace.trace import Trace

MAX_SENTENCE: Final = 400
"""Longest warning, sentence or fix on the page, in characters."""


@dataclass(frozen=True)
class CoverageBox:
    """What the trace covers: a sentence, warnings, and facts as pairs of a term and its value."""

    sentence: str
    warnings: tuple[str, ...]
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Card:
    """One key figure."""

    label: str
    value: str
    hint: str
    category: str | None = None
    """The category whose colour marks the card."""


@dataclass(frozen=True)
class FixText:
    """A fix as the page prints it."""

    what: str
    saving: str
    paste: str


@dataclass(frozen=True)
class Overview:
    """The head of the page for one device."""

    coverage: CoverageBox
    cards: tuple[Card, ...]
    verdict: str
    fixes: tuple[FixText, ...]
    sentences: tuple[str, ...]


def build_overview(trace: Trace, device: str, options: AnalysisOptions = DEFAULT_OPTIONS) -> Overview:
    """Return the head of the page for one device of a single-rank trace."""
    top, verdict = find_peak(trace, device), find_verdict(trace, device, options)
    return Overview(
        coverage=_coverage_box(trace),
        cards=tuple(_cards(trace, top)),
        verdict=" ".join(name_text(sentence, MAX_SENTENCE) for sentence in verdict.sentences),
        fixes=tuple(_fix_text(fix) for fix in verdict.fixes),
        sentences=tuple(_sentences(trace, top)),
    )


def _fix_text(fix: Fix) -> FixText:
    paste = "\n".join(name_text(line, MAX_SENTENCE) for line in (fix.paste or "").splitlines())
    return FixText(name_text(fix.what, MAX_SENTENCE), name_text(describe_saving(fix), MAX_SENTENCE), paste)


def _coverage_box(trace: Trace) -> CoverageBox:
    coverage = compute_coverage(trace)
    lost = UNKNOWN if coverage.lost_events is None else f"{coverage.lost_events:,}"
    events, steps = format_count(coverage.num_events, "event"), format_count(coverage.num_steps, "step")
    return CoverageBox(
        sentence=f"{events}{_time_span(coverage)}, {steps}. Lost events: {lost}.",
        warnings=tuple(name_text(warning, MAX_SENTENCE) for warning in _warnings(coverage)),
        facts=tuple(_facts(trace, coverage)),
    )


def _time_span(coverage: Coverage) -> str:
    first, last = coverage.first_event_ns, coverage.last_event_ns
    return f" over {format_duration(last - first)}" if first is not None and last is not None else ""


def _warnings(coverage: Coverage) -> Iterator[str]:
    if coverage.lost_events:
        yield f"{format_count(coverage.lost_events, 'event')} were lost, so the figures below are incomplete."
    if not coverage.finished:
        reason = coverage.stop_reason or "the process died while recording"
        yield f"The recording is incomplete: {reason}."
    yield from coverage.notes


def _facts(trace: Trace, coverage: Coverage) -> Iterator[tuple[str, str]]:
    manifest = trace.manifest
    recorder = manifest.source.observer or manifest.source.kind
    versions = {name: version for name, version in manifest.versions.items() if version}
    yield "Recorded by", f"memtrace {manifest.memtrace_version or UNKNOWN}, {recorder}"
    yield "Versions", ", ".join(f"{name} {version}" for name, version in versions.items()) or UNKNOWN
    yield "Command", name_text(" ".join(map(str, manifest.command or [UNKNOWN])))
    yield "Allocated before the recording", format_bytes(coverage.baseline_bytes)
    yield "Unclassified at the peak", format_bytes(coverage.unattributed_bytes)
    if coverage.seen_access_share is not None:
        yield "Reads and writes recorded", f"{format_share(coverage.seen_access_share, 1)} of the bytes accessed"
    yield "Outside the allocator", format_bytes(coverage.outside_allocator_bytes)


def _cards(trace: Trace, top: Peak) -> Iterator[Card]:
    peak_bytes = top.requested.bytes
    yield Card("Peak requested", format_bytes(peak_bytes), _moment(top))
    if top.reserved is not None:
        yield Card("Peak reserved", format_bytes(top.reserved.bytes), "held by the allocator")
    categories = peak_by_category(trace, top.device)
    if categories:
        category, num_bytes = categories[0].name, categories[0].bytes
        share = f"{format_bytes(num_bytes)}, {format_share(num_bytes, peak_bytes)} of the peak"
        category = category or "unknown"
        yield Card("Largest category", CATEGORY_LABELS[category], share, category)
    columns = step_columns(trace)
    if len(columns):
        median_ns = float(np.median(columns.duration_ns))
        duration = f"median {format_duration(median_ns)}" if trace.has_times else "duration unknown"
        yield Card("Steps", f"{len(columns):,}", duration)
    grows = measure_growth(trace)
    if grows is not None:
        value = f"{format_bytes(grows.bytes_per_step)} per step" if grows.bytes_per_step > 0 else "none"
        steps = format_count(grows.num_steps, "step")
        yield Card("Memory growth", value, f"{steps} ({grows.num_warm_up_steps} warm-up steps excluded)")


def _moment(top: Peak) -> str:
    """Return when the peak is reached, such as ``at 1.09 s (step 1, backward)``."""
    if top.requested.event < 0:
        return "at the start"
    time = format_duration(top.time_ns) if top.time_ns is not None else f"event {top.requested.event:,}"
    step = f"step {top.step}" if top.step is not None else "outside the steps"
    return f"at {time} ({step}, {top.phase})" if top.phase else f"at {time} ({step})"


def _sentences(trace: Trace, top: Peak) -> Iterator[str]:
    peak_bytes = top.requested.bytes
    for what, groups in (
        ("allocation site", peak_by_site(trace, top.device)),
        ("module", peak_by_module(trace, top.device)),
    ):
        for group in [group for group in groups if group.name][:1]:
            share = f"{format_bytes(group.bytes)} ({format_share(group.bytes, peak_bytes)})"
            num_blocks = format_count(group.num_blocks, "block")
            yield f"Largest {what} at the peak: {name_text(group.name)}, {share} in {num_blocks}."
