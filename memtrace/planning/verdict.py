"""The verdict on a trace: what held the memory when it mattered, and the few changes that are worth most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.by_part.summary import LongSummary
from memtrace.analysis.growth import GrowthSource, measure_growth
from memtrace.analysis.oom import OutOfMemory, RequestRoom, explain_out_of_memory
from memtrace.analysis.options import DEFAULT_OPTIONS, AnalysisOptions
from memtrace.analysis.peak import find_peak
from memtrace.analysis.rank_reports import rank_reports
from memtrace.analysis.rank_results import UnreadableRank
from memtrace.analysis.rank_standing import choose_standing
from memtrace.analysis.steps import records_data_waits, step_columns
from memtrace.analysis.summary import PeakSummary, Summary, describe_peak, summarize_job, summarize_peak
from memtrace.analysis.thresholds import MIN_FINDING_SHARE, MIN_WAIT_SHARE
from memtrace.categories import describe_category_share
from memtrace.display import Displayed
from memtrace.planning.fix import NO_COST, Fix, Shortfall, trace_argument
from memtrace.planning.recorded_step import main_device
from memtrace.trace import Trace
from memtrace.units import format_bytes, format_share

NO_EVENTS: Final = "The trace has no memory events."
MAX_FIXES: Final = 3
"""Most fixes of a verdict."""
STEPS_AHEAD: Final = 1000
"""Growth is reported where it would add a share of the peak worth reporting within so many steps."""
MAX_CATEGORIES: Final = 3
"""Most categories that a sentence names."""


@dataclass(frozen=True)
class Verdict(Displayed):
    """The answer to a trace in a paragraph and at most ``MAX_FIXES`` fixes."""

    device: str | None
    """The device that ran out of memory, else the one with the highest peak; None: the trace has no memory events."""
    sentences: tuple[str, ...]
    fixes: tuple[Fix, ...]
    """Those that are enough first, of these what costs nothing; then by the bytes saved."""
    next_command: str | None = None
    """Command that looks for a mix of changes with which a step fits; None: it fits, or no step was recorded."""


@dataclass(frozen=True)
class JudgedSummary(Summary):
    """The summary of a rank with the verdict on it."""

    verdict: Verdict


@dataclass(frozen=True)
class JudgedJob(Displayed):
    """The summaries of all ranks of a job."""

    judged: JudgedSummary
    """The rank that ran out of memory first, else the one with the highest peak."""
    ranks: tuple[Summary, ...]
    """One summary per rank, in order of rank."""
    unreadable: tuple[UnreadableRank, ...] = ()
    """Ranks that are left out."""


def find_verdict(trace: Trace, device: str | None = None, options: AnalysisOptions = DEFAULT_OPTIONS) -> Verdict:
    """Return the verdict on a single-rank trace (cached).

    Args:
        trace: The trace of one rank.
        device: The device; None: the one that ran out of memory, else the one with the highest peak, GPUs first.
        options: The capacity that the peak is compared with, and thresholds.
    """
    return trace.cached(_find_verdict, device or _main_device(trace), options)


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
    """Return the rank of a trace to look at first, see ``choose_standing``; the first one where none can be read."""
    standings = [report.standing for report in rank_reports(trace) if report.standing is not None]
    manifests = {rank.ranks[0]: rank.manifest for rank in trace.each_rank()}
    return choose_standing(standings, manifests) if standings else trace.ranks[0]


def judge_job(trace: Trace, options: AnalysisOptions = DEFAULT_OPTIONS) -> JudgedJob:
    """Return the summaries of all ranks of a trace, and the verdict on one of them."""
    job, number = summarize_job(trace, options), choose_rank(trace)
    chosen = next(each for each in job.ranks if each.rank == number)
    return JudgedJob(judge_rank(trace.rank(number), chosen, options), job.ranks)


def judge_rank(trace: Trace, summary: Summary, options: AnalysisOptions = DEFAULT_OPTIONS) -> JudgedSummary:
    """Return the summary of a single-rank trace with the verdict on it."""
    return _with_verdict(summary, order_devices(trace), find_verdict(trace, options=options))


def judge_long_rank(trace: Trace, long: LongSummary, options: AnalysisOptions = DEFAULT_OPTIONS) -> JudgedSummary:
    """Return the summary of a long trace with the verdict on it, which is that of ``judge_rank``.

    A trace so long is not searched for fixes, and in one that is summarized by parts no allocation failed.

    Args:
        trace: the trace of one rank, of which only names are read.
        long: its summary.
        options: the capacity that the peak is compared with.
    """
    summary, names = long.summary, [device.device for device in long.summary.devices]
    candidates = [name for name in names if name != "cpu"] or names
    if not candidates:
        return _with_verdict(summary, [], Verdict(None, (NO_EVENTS,), ()))
    main = max(candidates, key=lambda name: long.highest_change_bytes[name])
    peak = next(device.peak for device in summary.devices if device.device == main)
    lacking = _lacking_bytes(long.peak_bytes[main], options.capacity_bytes)
    sentences = [
        _describe_peak(peak),
        *_compare_with_capacity(long.peak_bytes[main], options.capacity_bytes),
        *_describe_growth(summary.steps.growth_bytes_per_step, summary.steps.growth_sources, peak.bytes),
    ]
    if trace.has_times and long.has_waits:
        sentences += _describe_waits(long.wait_ns, long.step_ns)
    has_step = bool(summary.steps.num_steps)
    command = _plan_command(trace, main, options.capacity_bytes) if lacking is not None and has_step else None
    order = sorted(names, key=lambda name: (name != main, name == "cpu"))
    return _with_verdict(summary, order, Verdict(main, tuple(sentences), (), command))


def _with_verdict(summary: Summary, order: list[str], verdict: Verdict) -> JudgedSummary:
    members = {field.name: getattr(summary, field.name) for field in fields(summary)}
    members["devices"] = tuple(sorted(summary.devices, key=lambda each: order.index(each.device)))
    return JudgedSummary(**members, verdict=verdict)


def _find_verdict(trace: Trace, device: str | None, options: AnalysisOptions) -> Verdict:
    if device is None:
        return Verdict(None, (NO_EVENTS,), ())
    failure = next((each for each in reversed(explain_out_of_memory(trace)) if each.device == device), None)
    peak = summarize_peak(trace, device)
    if failure is not None:
        # What looks for fixes is imported where it is needed: a long trace is not searched for them.
        from memtrace.planning.failure_fixes import failure_fixes

        sentences, fixes = list(_describe_failure(trace, failure)), failure_fixes(trace, failure, options)
    else:
        sentences = [_describe_peak(peak)]
        sentences += _compare_with_capacity(find_peak(trace, device).requested.bytes, options.capacity_bytes)
        fixes = list(_step_fixes(trace, device, options))
    sentences += _describe_steps(trace, peak.bytes)
    least = max(int(MIN_FINDING_SHARE * peak.bytes), 1)
    fixes = [fix for fix in fixes if fix.saved_bytes >= least or fix.is_enough]
    fixes.sort(key=lambda fix: (not fix.is_enough, fix.cost != NO_COST if fix.is_enough else False, -fix.saved_bytes))
    return Verdict(device, tuple(sentences), tuple(fixes[:MAX_FIXES]), _next_command(trace, device, failure, options))


def _next_command(trace: Trace, device: str, failure: OutOfMemory | None, options: AnalysisOptions) -> str | None:
    if failure is not None:
        from memtrace.planning.failure_fixes import known_capacity

        has_shortage, capacity = failure.cause == "capacity", known_capacity(failure, options)
    else:
        capacity = options.capacity_bytes
        has_shortage = _lacking_bytes(find_peak(trace, device).requested.bytes, capacity) is not None
    if not has_shortage or capacity is None or not len(step_rows(trace).number):
        return None
    return _plan_command(trace, device, capacity)


def _plan_command(trace: Trace, device: str, capacity_bytes: int | None) -> str:
    return f"memtrace plan auto {trace_argument(trace)} --device {device} --capacity {capacity_bytes}B -o plan.json"


def _describe_peak(peak: PeakSummary) -> str:
    others = _clauses(dict(sorted(peak.by_category.items(), key=lambda each: -each[1])), peak.bytes)[1:]
    return f"{', '.join([describe_peak(peak), *others])}."


def _step_fixes(trace: Trace, device: str, options: AnalysisOptions) -> Iterator[Fix]:
    """Yield the fixes for a device on which no request failed."""
    from memtrace.planning.fixes import allocator_fixes, line_fixes, select_useful, step_fixes

    lacking = _lacking_bytes(find_peak(trace, device).requested.bytes, options.capacity_bytes)
    shortfall = None if lacking is None else Shortfall(lacking, lacking)
    fixes = [*line_fixes(trace, device, shortfall, options), *step_fixes(trace, device, shortfall)]
    yield from select_useful(fixes, shortfall)
    yield from allocator_fixes(trace, device, has_failed=False, capacity_bytes=options.capacity_bytes)


def _lacking_bytes(peak_bytes: int, capacity_bytes: int | None) -> int | None:
    """Return by how much a peak exceeds a capacity; None: it does not, or no capacity is stated."""
    lacking = 0 if capacity_bytes is None else peak_bytes - capacity_bytes
    return lacking if lacking > 0 else None


def _compare_with_capacity(peak_bytes: int, capacity_bytes: int | None) -> Iterator[str]:
    if capacity_bytes is None:
        return
    lacking = _lacking_bytes(peak_bytes, capacity_bytes)
    if lacking is not None:
        yield f"The peak exceeds the capacity of {format_bytes(capacity_bytes)} by {format_bytes(lacking)}."
        return
    left = capacity_bytes - peak_bytes
    yield f"The peak leaves {format_bytes(left)} of the capacity of {format_bytes(capacity_bytes)}."


def _describe_failure(trace: Trace, failure: OutOfMemory) -> Iterator[str]:
    """Yield what was requested and where, why it failed, what held the memory, and what would have fitted."""
    from memtrace.planning.unfinished_step import state_to_come
    from memtrace.planning.unfinished_update import estimate_update

    where = f" at {failure.site}" if failure.site else ""
    free = "" if failure.device_free_bytes is None else f" with {format_bytes(failure.device_free_bytes)} free"
    phase = {"forward": " in forward", "backward": " in backward", "optimizer": " in the optimizer step"}
    moment = phase.get(failure.phase or "", "")
    yield (
        f"{failure.device} ran out of memory{moment}: a request for {format_bytes(failure.asked_bytes)}{where} failed"
        f"{free}."
    )
    if failure.room is not None:
        yield from _describe_room(failure, failure.room)
    held = _clauses(failure.live_bytes_by_category, failure.live_bytes)
    if held and failure.likely_activation_bytes:
        held = [
            f"{clause} (likely: memory ran out before backward had read them)" if "activations" in clause else clause
            for clause in held
        ]
    yield f"Tensors held {format_bytes(failure.live_bytes)}{': ' if held else ''}{', '.join(held)}."
    state_bytes = state_to_come(trace, failure) if failure.cause == "capacity" else 0
    if state_bytes:
        yield (
            f"The optimizer had no state yet: that of Adam takes {format_bytes(state_bytes)}, which the changes below "
            "leave room for."
        )
    estimate = estimate_update(trace, failure)
    if estimate is not None:
        missing = estimate.missing_state_bytes
        existed = f", of which {format_bytes(missing)} did not exist yet," if missing else ""
        yield (
            f"The optimizer keeps {format_bytes(estimate.state_bytes)} of state{existed} and its update needs "
            f"{format_bytes(estimate.temporary_bytes)} of temporary tensors: {format_bytes(estimate.missing_bytes)} "
            "were missing for the step as a whole."
        )


def _describe_room(failure: OutOfMemory, room: RequestRoom) -> Iterator[str]:
    if failure.cause == "outside memory" and failure.outside is not None:
        growth = failure.outside.growth_bytes or 0
        grown = f", {format_bytes(growth)} more than when the recording began" if growth > 0 else ""
        yield (
            f"{format_bytes(failure.outside.bytes)} were in use outside torch's allocator (CUDA contexts, libraries, "
            f"other processes){grown}; the request needed "
            f"{format_bytes(room.segment_bytes - (failure.device_free_bytes or 0))} of them."
        )
    elif failure.cause == "request too large":
        yield (
            f"The device could not have served it with no other tensor on it: it was "
            f"{format_bytes(failure.asked_bytes - room.state.reserved_bytes - (failure.device_free_bytes or 0))} too "
            "large."
        )
    elif failure.cause == "capacity":
        has_pieces = 0 < room.lacking_bytes < room.missing_bytes
        unused = f", {format_bytes(room.lacking_bytes)} even without fragmentation" if has_pieces else ""
        largest = max(room.largest_fit_bytes, failure.device_free_bytes or 0)
        yield (
            f"{format_bytes(room.missing_bytes)} were missing{unused}; a request of {format_bytes(largest)} would have "
            "fitted."
        )
    elif room.segment_bytes <= (failure.device_free_bytes or 0):
        yield (
            "The device had enough for it: a memory limit of this process (set_per_process_memory_fraction) or a short "
            "peak of another process refused it."
        )
    else:
        yield (
            f"No memory was missing: {format_bytes(room.state.free_bytes)} of the reserved memory were unused, but the "
            f"request could use free blocks of at most {format_bytes(room.largest_fit_bytes)}."
        )


def _clauses(by_category: dict[str, int], total_bytes: int) -> list[str]:
    """Return what the largest categories hold, such as ``activations hold 81 %``."""
    held = [(name, num_bytes) for name, num_bytes in by_category.items() if num_bytes]
    return [describe_category_share(name, format_share(part, total_bytes)) for name, part in held[:MAX_CATEGORIES]]


def _describe_steps(trace: Trace, peak_bytes: int) -> Iterator[str]:
    growth = measure_growth(trace)
    if growth is not None:
        yield from _describe_growth(growth.bytes_per_step, growth.sources, peak_bytes)
    if not (trace.has_times and records_data_waits(trace)):
        return
    columns = step_columns(trace)
    yield from _describe_waits(int(columns.data_wait_ns.sum()), int(columns.duration_ns.sum()))


def _describe_growth(bytes_per_step: int | None, sources: Sequence[GrowthSource], peak_bytes: int) -> Iterator[str]:
    if bytes_per_step is not None and bytes_per_step * STEPS_AHEAD >= MIN_FINDING_SHARE * peak_bytes:
        where = f", most at {sources[0].site}" if sources else ""
        yield f"Live memory grows by {format_bytes(bytes_per_step)} per step{where}."


def _describe_waits(wait_ns: int, duration_ns: int) -> Iterator[str]:
    if duration_ns and wait_ns >= MIN_WAIT_SHARE * duration_ns:
        yield f"Steps spend {format_share(wait_ns, duration_ns)} of their time waiting for data."
