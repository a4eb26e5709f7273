"""Hints: what is worth changing in a training script, in the order in which to try it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from memtrace.analysis.findings import Finding, find_device_waste
from memtrace.analysis.growth import measure_growth
from memtrace.analysis.peak import find_peak, peak_by_category
from memtrace.analysis.steps import records_data_waits, step_columns
from memtrace.analysis.thresholds import MIN_CATEGORY_SHARE, MIN_FINDING_SHARE, MIN_WAIT_SHARE
from memtrace.trace import Trace
from memtrace.units import UNKNOWN, format_bytes, format_count, format_share

MAX_FINDINGS: Final = 3
"""Most single-line fixes per device among the hints."""
MAX_CATEGORIES: Final = 3
"""Most categories per device among the hints."""


@dataclass(frozen=True)
class Hint:
    """Something worth changing in the training script."""

    what: str
    """The observation, such as ``Activations hold 81 % of the peak (68.2 MiB)``, without a full stop."""
    why: str
    """What causes it or what it means; a sentence."""
    change: str
    """What to change; a sentence."""
    saved_bytes: int | None
    """By how much the change lowers the peak; None: unknown."""
    device: str | None
    """The device whose memory it concerns; None: the whole run."""


@dataclass(frozen=True)
class _CategoryAdvice:
    subject: str
    """The category with its verb."""
    why: str
    change: str


_ADVICE: Final = {
    "activation": _CategoryAdvice(
        "Activations hold",
        "Forward saves them because backward reads them.",
        "Recompute them in backward (torch.utils.checkpoint) for the modules that hold most of them, or use a smaller "
        "batch with gradient accumulation.",
    ),
    "optimizer_state": _CategoryAdvice(
        "Optimizer state holds",
        "The optimizer keeps it from step to step; Adam keeps two values per parameter.",
        "Use an optimizer with less state (SGD, Adafactor, 8-bit Adam), or shard it (ZeRO, FSDP).",
    ),
    "gradient": _CategoryAdvice(
        "Gradients hold",
        "They stay allocated from backward until they are freed.",
        "Free each gradient as soon as it is applied (optimizer in backward), or shard them (ZeRO, FSDP).",
    ),
    "parameter": _CategoryAdvice(
        "Parameters hold",
        "The weights and buffers of the model stay allocated throughout training.",
        "Shard them (FSDP), or freeze and quantise those that are not trained.",
    ),
    "input": _CategoryAdvice(
        "Input batches hold",
        "They are loaded before forward and stay allocated as long as a variable refers to them.",
        "Load smaller batches, or keep the data set on disk instead of in memory.",
    ),
    "temporary": _CategoryAdvice(
        "Temporary tensors hold",
        "They are allocated and freed within one phase, and many of them are live at the peak.",
        "At the allocation sites that hold most of them, use in-place operators, fused kernels or smaller chunks.",
    ),
    "workspace": _CategoryAdvice(
        "Workspaces hold",
        "They are the scratch memory of single operators.",
        "Choose another algorithm or memory layout for the operators that allocate them.",
    ),
    "unknown": _CategoryAdvice(
        "Unclassified memory holds",
        "The trace does not show what these blocks are used for.",
        "Record with call stacks and accesses, and pass model= and optimizer=, so that memtrace can classify them.",
    ),
}
_UNKNOWN_IN_A_FILE: Final = _CategoryAdvice(
    "Unclassified memory holds",
    "This file does not record what its blocks are used for.",
    "Record the training script with memtrace, which records accesses and classifies the blocks.",
)


def find_hints(trace: Trace, *, include_findings: bool = True) -> tuple[Hint, ...]:
    """Return what is worth changing in the training script, the most urgent first.

    The order is: memory growth, single-line fixes of wasted memory, large categories, waits for data.

    Args:
        trace: the trace of one rank.
        include_findings: whether to look for wasted memory, which takes seconds for millions of events.
    """
    return trace.cached(_find_hints, include_findings)


def _find_hints(trace: Trace, include_findings: bool) -> tuple[Hint, ...]:
    fixes = _single_line_fixes(trace) if include_findings and trace.has_blocks else ()
    return (*_growth(trace), *fixes, *_large_categories(trace), *_data_waits(trace))


def _growth(trace: Trace) -> Iterator[Hint]:
    grows = measure_growth(trace)
    if grows is None or grows.bytes_per_step <= 0:
        return
    source = f"; the largest source is {grows.sources[0].site}" if grows.sources else ""
    yield Hint(
        what=f"Live memory grows by {format_bytes(grows.bytes_per_step)} per step",
        why=f"Memory that is live at the end of a step increased over {format_count(grows.num_steps, 'step')}{source}.",
        change="Look for tensors that are kept across steps: a list of losses with their graphs, a cache or a hook.",
        saved_bytes=None,
        device=None,
    )


def _single_line_fixes(trace: Trace) -> Iterator[Hint]:
    for device in trace.devices:
        waste = find_device_waste(trace, device)
        fixes = [finding for finding in waste.findings if finding.is_single_line_fix]
        fixes = [finding for finding in fixes if finding.saved_bytes >= max(MIN_FINDING_SHARE * waste.peak_bytes, 1)]
        for finding in fixes[:MAX_FINDINGS]:
            yield _finding_hint(device, finding)


def _finding_hint(device: str, finding: Finding) -> Hint:
    wasted = f"{format_bytes(finding.wasted_bytes)} in {format_count(finding.num_blocks, 'block')}"
    no_site = f"an {UNKNOWN} allocation site" + (f" ({finding.no_stack_reason})" if finding.no_stack_reason else "")
    return Hint(
        what=f"{finding.pattern.capitalize()} at {finding.site or no_site}",
        why=f"It wastes {wasted}; fixing it lowers the peak to {format_bytes(finding.peak_if_fixed_bytes)}.",
        change=finding.advice,
        saved_bytes=finding.saved_bytes,
        device=device,
    )


def _large_categories(trace: Trace) -> Iterator[Hint]:
    is_recording = trace.manifest.source.kind == "recording"
    for device in trace.devices:
        top = find_peak(trace, device)
        peak_bytes = top.requested.bytes
        for group in peak_by_category(trace, device)[:MAX_CATEGORIES]:
            category, num_bytes = group.name, group.bytes
            if num_bytes < max(MIN_CATEGORY_SHARE * peak_bytes, 1):
                continue
            advice = _ADVICE[category or "unknown"]
            if advice is _ADVICE["unknown"] and not is_recording:
                advice = _UNKNOWN_IN_A_FILE
            share = format_share(num_bytes, peak_bytes)
            yield Hint(
                what=f"{advice.subject} {share} of the peak ({format_bytes(num_bytes)})",
                why=advice.why,
                change=advice.change,
                saved_bytes=None,
                device=device,
            )


def _data_waits(trace: Trace) -> Iterator[Hint]:
    if not (trace.has_times and records_data_waits(trace)):
        return
    columns = step_columns(trace)
    wait_ns, duration_ns = int(columns.data_wait_ns.sum()), int(columns.duration_ns.sum())
    if duration_ns and wait_ns >= MIN_WAIT_SHARE * duration_ns:
        yield Hint(
            what=f"Steps spend {format_share(wait_ns, duration_ns)} of their time waiting for data",
            why="The data loader delivers batches more slowly than the model consumes them.",
            change="Use more DataLoader workers, or preprocess the data before training.",
            saved_bytes=None,
            device=None,
        )
