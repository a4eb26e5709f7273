"""The verdict on a trace: what held the memory when it mattered, and the few changes that are worth most."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from memtrace.allocator.plan import plan_allocator
from memtrace.analysis.findings import find_device_waste
from memtrace.analysis.growth import measure_growth
from memtrace.analysis.oom import OutOfMemory, explain_out_of_memory
from memtrace.analysis.peak import find_peak
from memtrace.analysis.steps import records_data_waits, step_columns
from memtrace.analysis.summary import (
    MAX_PATTERN_EVENTS,
    Summary,
    describe_peak,
    summarize_job,
    summarize_peak,
)
from memtrace.analysis.thresholds import MIN_FINDING_SHARE, MIN_WAIT_SHARE
from memtrace.categories import describe_category_share
from memtrace.errors import MemtraceError
from memtrace.planning.recompute import plan_recompute
from memtrace.planning.recorded_step import main_device
from memtrace.planning.unfinished_forward import estimate_checkpointing
from memtrace.trace import Trace
from memtrace.units import format_bytes, format_count, format_share

MAX_FIXES: Final = 3
"""Most fixes of a verdict."""
NO_COST: Final = "no added time"
STEPS_AHEAD: Final = 1000
"""Growth is reported where it would add a share of the peak worth reporting within so many steps."""


@dataclass(frozen=True)
class Fix:
    """One change, and what it would save."""

    what: str
    """What to change and where, in a sentence."""
    paste: str | None
    """What to paste: an environment setting, code, or a command; None: the sentence says it all."""
    saved_bytes: int
    """By how much it lowers the peak: of the requested bytes, or of the reserved bytes for a setting of the
    allocator."""
    cost: str
    """What it costs, such as ``4 % longer steps``."""
    is_enough: bool | None
    """Whether the request that failed would have fitted; None: no request failed, or unknown."""


@dataclass(frozen=True)
class Verdict:
    """The answer to a trace in a paragraph and at most ``MAX_FIXES`` fixes."""

    device: str | None
    """The device that ran out of memory, else the one with the highest peak; None: the trace has no memory events."""
    sentences: tuple[str, ...]
    fixes: tuple[Fix, ...]
    """Those after which the failed request fits first, then by the bytes saved."""


@dataclass(frozen=True)
class JudgedSummary(Summary):
    """The summary of a rank with the verdict on it."""

    verdict: Verdict


@dataclass(frozen=True)
class JudgedJob:
    """The summaries of all ranks of a job."""

    judged: JudgedSummary
    """The rank that ran out of memory first, else the one with the highest peak."""
    ranks: tuple[Summary, ...]
    """One summary per rank, in order of rank."""


def find_verdict(trace: Trace, device: str | None = None) -> Verdict:
    """Return the verdict on a single-rank trace (cached).

    Args:
        trace: The trace of one rank.
        device: The device; None: the one that ran out of memory, else the one with the highest peak, GPUs first.
    """
    return trace.cached(_find_verdict, device or _main_device(trace))


def _main_device(trace: Trace) -> str | None:
    if not trace.devices:
        return None
    failures = explain_out_of_memory(trace)
    return failures[-1].device if failures else main_device(trace)


def order_devices(trace: Trace) -> list[str]:
    """Return the devices of a single-rank trace, that of the verdict first, the CPU last."""
    main = _main_device(trace)
    return sorted(trace.devices, key=lambda device: (device != main, device == "cpu"))


def choose_rank(trace: Trace) -> int:
    """Return the rank to look at first: the one that ran out of memory first, else the one with the highest peak."""
    failed_ns: dict[int, int] = {}
    peak_bytes: dict[int, int] = {}
    for rank in trace.each_rank():
        (number,) = rank.ranks
        failures = explain_out_of_memory(rank)
        if failures:
            failed_ns[number] = failures[0].time_ns or 0
        peak_bytes[number] = _highest_peak(rank)
    if failed_ns:
        return min(failed_ns, key=lambda number: failed_ns[number])
    return max(peak_bytes, key=lambda number: peak_bytes[number])


def _highest_peak(trace: Trace) -> int:
    return max((find_peak(trace, device).requested.bytes for device in trace.devices), default=0)


def judge_job(trace: Trace) -> JudgedJob:
    """Return the summaries of all ranks of a trace, and the verdict on one of them."""
    job = summarize_job(trace)
    number = choose_rank(trace)
    rank, main = trace.rank(number), next(each for each in job.ranks if each.rank == number)
    order = order_devices(rank)
    members = {field.name: getattr(main, field.name) for field in fields(main)}
    members["devices"] = tuple(sorted(main.devices, key=lambda each: order.index(each.device)))
    return JudgedJob(JudgedSummary(**members, verdict=find_verdict(rank)), job.ranks)


def describe_saving(fix: Fix) -> str:
    """Return a sentence such as ``Saves 2.00 GiB, enough for the failed request; 4 % longer steps.``"""
    enough = {True: ", enough for the failed request", False: ", not enough for the failed request", None: ""}
    return f"Saves {format_bytes(fix.saved_bytes)}{enough[fix.is_enough]}; {fix.cost.rstrip('.')}."


def _find_verdict(trace: Trace, device: str | None) -> Verdict:
    if device is None:
        return Verdict(None, ("The trace has no memory events.",), ())
    failure = next((each for each in reversed(explain_out_of_memory(trace)) if each.device == device), None)
    peak = summarize_peak(trace, device)
    sentences = [_describe_failure(failure)] if failure else []
    sentences.append(f"{describe_peak(peak)}{_second_category(peak.by_category, peak.bytes)}.")
    sentences += _describe_steps(trace, peak.bytes)
    least = max(int(MIN_FINDING_SHARE * peak.bytes), 1)
    fixes = [fix for fix in _find_fixes(trace, device, failure) if fix.saved_bytes >= least or fix.is_enough]
    fixes.sort(key=lambda fix: (not fix.is_enough, -fix.saved_bytes))
    return Verdict(device, tuple(sentences), tuple(fixes[:MAX_FIXES]))


def _describe_failure(failure: OutOfMemory) -> str:
    where = f" at {failure.site}" if failure.site else ""
    free = "" if failure.device_free_bytes is None else f" with {format_bytes(failure.device_free_bytes)} free"
    text = f"{failure.device} ran out of memory: a request for {format_bytes(failure.asked_bytes)}{where} failed{free}"
    if failure.room is None:
        return f"{text}."
    if failure.room.lacking_bytes:
        return f"{text}. It was {format_bytes(failure.room.lacking_bytes)} short, even without fragmentation."
    return f"{text}, although {format_bytes(failure.room.state.free_bytes)} of the reserved memory were unused."


def _second_category(by_category: dict[str, int], peak_bytes: int) -> str:
    ranked = sorted(by_category, key=lambda category: -by_category[category])
    if len(ranked) < 2 or not by_category[ranked[1]]:
        return ""
    return ", " + describe_category_share(ranked[1], format_share(by_category[ranked[1]], peak_bytes))


def _describe_steps(trace: Trace, peak_bytes: int) -> Iterator[str]:
    growth = measure_growth(trace)
    if growth is not None and growth.bytes_per_step * STEPS_AHEAD >= MIN_FINDING_SHARE * peak_bytes:
        where = f", most at {growth.sources[0].site}" if growth.sources else ""
        yield f"Live memory grows by {format_bytes(growth.bytes_per_step)} per step{where}."
    if not (trace.has_times and records_data_waits(trace)):
        return
    columns = step_columns(trace)
    wait_ns, duration_ns = int(columns.data_wait_ns.sum()), int(columns.duration_ns.sum())
    if duration_ns and wait_ns >= MIN_WAIT_SHARE * duration_ns:
        yield f"Steps spend {format_share(wait_ns, duration_ns)} of their time waiting for data."


def _find_fixes(trace: Trace, device: str, failure: OutOfMemory | None) -> Iterator[Fix]:
    if trace.num_rows("events") <= MAX_PATTERN_EVENTS and trace.has_blocks:
        yield from _line_fixes(trace, device, failure)
        yield from _recomputation(trace, device, failure)
    if device != "cpu":
        yield from _allocator_settings(trace, device, failure)


def _is_enough(failure: OutOfMemory | None, saved_bytes: int) -> bool | None:
    """Return whether a fix that frees requested bytes lets the failed request succeed; None: unknown."""
    if failure is None or failure.room is None or not failure.room.lacking_bytes:
        return None
    return saved_bytes >= failure.room.lacking_bytes


def _line_fixes(trace: Trace, device: str, failure: OutOfMemory | None) -> Iterator[Fix]:
    for finding in find_device_waste(trace, device).findings:
        if finding.is_single_line_fix and finding.saved_bytes:
            where = f" ({finding.site})" if finding.site else ""
            what = f"{finding.pattern.capitalize()}{where}: {finding.advice}"
            yield Fix(what, None, finding.saved_bytes, NO_COST, _is_enough(failure, finding.saved_bytes))


def _recomputation(trace: Trace, device: str, failure: OutOfMemory | None) -> Iterator[Fix]:
    try:
        planned = plan_recompute(trace, device)
    except MemtraceError:  # no steps, no module calls, or nothing that backward needs
        yield from _checkpointing(trace, device, failure)
        return
    recorded, predicted = planned.plan.recorded, planned.plan.predicted
    saved = recorded.peak_bytes - predicted.peak_bytes
    if recorded.step_ns and predicted.step_ns is not None:
        cost = f"{format_share(predicted.step_ns - recorded.step_ns, recorded.step_ns)} longer steps"
    else:
        cost = "a part of forward runs twice"
    modules = format_count(len(planned.modules), "module")
    yield Fix(
        f"Recompute {modules} in backward instead of keeping their activations.",
        f"memtrace plan recompute {shlex.quote(str(trace.path)) if trace.path else 'TRACE'} -o plan.json\n"
        "memtrace record --apply plan.json YOUR_SCRIPT.py",
        saved,
        cost,
        _is_enough(failure, saved),
    )


def _checkpointing(trace: Trace, device: str, failure: OutOfMemory | None) -> Iterator[Fix]:
    """Return what checkpointing would save in a forward pass that ran out of memory before the first step ended."""
    if failure is None:
        return
    estimate = estimate_checkpointing(trace, device, failure.event)
    if estimate is None:
        return
    calls = format_count(estimate.num_calls, "finished call")
    yield Fix(
        f"Recompute {estimate.modules} in backward: {calls} kept {format_bytes(estimate.saved_bytes)} for it.",
        "from torch.utils.checkpoint import checkpoint\n"
        "x = checkpoint(module, x, use_reentrant=False)  # instead of x = module(x)",
        estimate.saved_bytes,
        "their forward runs twice",
        _is_enough(failure, estimate.saved_bytes),
    )


def _allocator_settings(trace: Trace, device: str, failure: OutOfMemory | None) -> Iterator[Fix]:
    if find_peak(trace, device).reserved is None or trace.num_rows("events") > MAX_PATTERN_EVENTS:
        return
    plan = next((plan for plan in plan_allocator(trace).devices if plan.device == device), None)
    if plan is None or plan.suggestion is None or plan.replay is None or plan.baseline is None:
        return
    chosen = next(each for each in plan.predictions if each.setting == plan.suggestion.setting)
    fits = f": the request that failed fits in {format_bytes(chosen.peak_reserved_bytes)}" if failure else ""
    yield Fix(
        f"Run with other allocator settings{fits}.",
        plan.suggestion.environment_setting,
        max(plan.baseline.peak_reserved_bytes - chosen.peak_reserved_bytes, 0),
        " ".join(plan.suggestion.caveats) or NO_COST,
        (chosen.fits if failure else None),
    )
