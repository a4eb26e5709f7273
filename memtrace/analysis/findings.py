"""Wasted memory: findings by pattern and allocation site, ranked by how much fixing each would lower the peak.

Every finding is evaluated by replaying the recorded timeline without the memory that it wastes. The patterns are
DrGPUM's (ASPLOS 2023), refined by msMemScope's conditions; see ``pattern_catalog``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Final

import numpy as np

from memtrace.analysis import dead_graphs, patterns, training_patterns, unused_gradients
from memtrace.analysis import pattern_catalog as catalog
from memtrace.analysis.allocation_sites import allocation_site
from memtrace.analysis.attribution import step_rows
from memtrace.analysis.block_accesses import has_accesses, runs_unseen_kernels
from memtrace.analysis.block_groups import largest_module
from memtrace.analysis.block_signatures import row_codes
from memtrace.analysis.blocks import CATEGORY, PERSISTENT, blocks
from memtrace.analysis.counterfactual import (
    IdleIntervals,
    compute_peak_lower_bound,
    free_rows,
    max_simultaneous_bytes,
    peak_without_intervals,
)
from memtrace.analysis.gaps import find_gaps
from memtrace.analysis.in_place import can_write_in_place
from memtrace.analysis.interrupted import is_cut_short
from memtrace.analysis.missing_stacks import missing_stack_reasons
from memtrace.analysis.pattern_catalog import ALL_PATTERNS, WastePattern
from memtrace.analysis.peak import find_peak
from memtrace.analysis.thresholds import MAX_REPLAYS, MIN_FINDING_SHARE, MIN_STEPS_FOR_LEAKS
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES, NO_BLOCKS
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Finding(Displayed):
    """Memory that one pattern wastes at one allocation site."""

    pattern: str
    """The pattern, such as ``retained graph``; see ``pattern_catalog``."""
    pattern_class: str
    """The pattern of DrGPUM that it is a case of, such as ``leak``."""
    site: str | None
    """The allocation site, ``file:line function``; None: no call stack was recorded."""
    module: str | None
    """The module that owns most of the wasted bytes; layers of a stack are ``*``. None: outside any module."""
    category: str
    """The category of most of the bytes."""
    num_blocks: int
    """Number of blocks that are wasted at some time."""
    wasted_bytes: int
    """The most bytes that are wasted at the same time."""
    idle_byte_seconds: float | None
    """Wasted bytes multiplied by the seconds for which they are wasted; None where times are unknown."""
    covers_peak: bool
    """Whether memory is wasted at the moment of the peak."""
    peak_if_fixed_bytes: int
    """The peak of the recorded timeline without the wasted memory."""
    saved_bytes: int
    """By how much fixing it lowers the peak; 0 also where that is less than ``DeviceWaste.min_bytes``."""
    is_upper_bound: bool
    """Whether the fix saves at most ``saved_bytes``: what is offloaded or recomputed must come back in time."""
    is_single_line_fix: bool
    """Whether moving, changing or deleting a line is enough to fix it."""
    advice: str
    """What to change in the program."""
    no_stack_reason: str | None
    """Why its largest blocks have no call stack; None: they have one."""


@dataclass(frozen=True)
class SkippedPatterns:
    """Patterns that could not be checked."""

    patterns: tuple[str, ...]
    """Their names; see ``pattern_catalog``."""
    reason: str
    """What the trace lacks."""


@dataclass(frozen=True)
class DeviceWaste(Displayed):
    """The wasted memory of one device."""

    device: str
    """The device, such as ``cpu`` or ``cuda:0``."""
    peak_bytes: int
    """Peak of the requested bytes."""
    lower_bound_bytes: int | None
    """The most bytes that a single operator needs at the same time: no schedule can go below it. None: no accesses were
    recorded."""
    peak_if_all_fixed_bytes: int | None
    """The peak with all single-line fixes applied together; None if nothing could be checked."""
    min_bytes: int
    """Findings that waste less than this at any time are left out; smaller savings count as none."""
    findings: tuple[Finding, ...]
    """Single-line fixes first, then what needs recomputation, offloading or in-place operators, then what does not
    lower the peak; within each group the largest saving first."""
    skipped_patterns: tuple[SkippedPatterns, ...]
    """Patterns that could not be checked, and why."""


@dataclass(frozen=True)
class WastedMemory(Displayed):
    """The wasted memory of every device of a trace."""

    devices: tuple[DeviceWaste, ...]
    """The CPU first, then the accelerators."""


def find_wasted_memory(trace: Trace, *, min_bytes: int | None = None) -> WastedMemory:
    """Return the findings on every device of a single-rank trace.

    Args:
        trace: the trace of one rank.
        min_bytes: leave out findings that waste fewer bytes at any time; default: a hundredth of the peak.
    """
    return WastedMemory(tuple(find_device_waste(trace, device, min_bytes=min_bytes) for device in trace.devices))


def find_device_waste(trace: Trace, device: str, *, min_bytes: int | None = None) -> DeviceWaste:
    """Return the findings on one device of a single-rank trace; see ``find_wasted_memory``."""
    return trace.cached(_find_device_waste, device, _min_bytes(trace, device, min_bytes))


def predict_peak_with_fixes(trace: Trace, waste: DeviceWaste, fixed: Iterable[Finding]) -> int:
    """Return the peak bytes of a device if several of its findings were fixed together.

    Args:
        trace: the trace of one rank.
        waste: the findings on a device of ``trace``.
        fixed: those of ``waste.findings`` to fix.
    """
    intervals = trace.cached(_ranked_intervals, waste.device, waste.min_bytes)
    return peak_without_intervals(
        trace, waste.device, IdleIntervals.concatenate([intervals[finding] for finding in fixed])
    )


def findings_table(trace: Trace) -> pd.DataFrame:
    """Return one row per finding: its device and the fields of ``Finding`` as columns."""
    import pandas as pd

    devices = find_wasted_memory(trace).devices
    rows = [{"device": waste.device} | asdict(finding) for waste in devices for finding in waste.findings]
    table: pd.DataFrame = pd.DataFrame(rows, columns=["device", *(field.name for field in fields(Finding))])
    return table


def _min_bytes(trace: Trace, device: str, min_bytes: int | None) -> int:
    return int(MIN_FINDING_SHARE * find_peak(trace, device).requested.bytes) if min_bytes is None else min_bytes


def _find_device_waste(trace: Trace, device: str, min_bytes: int) -> DeviceWaste:
    peak_bytes = find_peak(trace, device).requested.bytes
    if not trace.has_blocks:
        skipped = SkippedPatterns(tuple(pattern.name for pattern in ALL_PATTERNS), NO_BLOCKS)
        return DeviceWaste(device, peak_bytes, None, None, min_bytes, (), (skipped,))
    intervals = trace.cached(_ranked_intervals, device, min_bytes)
    applied = [part for finding, part in intervals.items() if finding.saved_bytes > 0 and finding.is_single_line_fix]
    return DeviceWaste(
        device=device,
        peak_bytes=peak_bytes,
        lower_bound_bytes=compute_peak_lower_bound(trace, device, IdleIntervals.concatenate([*intervals.values()])),
        peak_if_all_fixed_bytes=peak_without_intervals(trace, device, IdleIntervals.concatenate(applied)),
        min_bytes=min_bytes,
        findings=tuple(intervals),
        skipped_patterns=tuple(_skipped_patterns(trace)),
    )


def _skipped_patterns(trace: Trace) -> Iterator[SkippedPatterns]:
    if (reason := _unknown_accesses(trace)) is not None:
        yield SkippedPatterns(
            tuple(pattern.name for pattern in ALL_PATTERNS if pattern.pattern_class != "leak"), reason
        )
    if len(step_rows(trace).number) < MIN_STEPS_FOR_LEAKS:
        names = tuple(pattern.name for pattern in ALL_PATTERNS if pattern.pattern_class == "leak")
        yield SkippedPatterns(names, f"at least {MIN_STEPS_FOR_LEAKS} steps are needed")


def _unknown_accesses(trace: Trace) -> str | None:
    """Return why the trace does not show when blocks are used; None: it does."""
    if not has_accesses(trace):
        return "the trace does not record reads and writes"
    if runs_unseen_kernels(trace):
        return "kernels of torch.compile read and write memory unseen"
    if "threads" in trace.manifest.coverage.unseen_accesses:
        return "threads of the program read and wrote memory unseen"
    return None


def _ranked_intervals(trace: Trace, device: str, min_bytes: int) -> dict[Finding, IdleIntervals]:
    """Return the findings of a device in the order of ``DeviceWaste.findings``, with the intervals of each."""
    columns = blocks(trace)
    on_device = (columns.device == trace.devices.index(device)) & (columns.size > 0)
    # A step that ran out of memory shows what is allocated, and not what it would have been used for.
    cut_short = is_cut_short(trace, columns.alloc_event, columns.free_event)
    in_gap = (columns.alloc_event >= 0) & find_gaps(trace).contain_rows(columns.alloc_event)
    candidates = np.flatnonzero(on_device & ~cut_short & ~columns.waits_for_backward & ~in_gap)
    evaluated = [
        (_evaluate(trace, device, pattern, site, part, max(min_bytes, 1) if rank < MAX_REPLAYS else None), part)
        for pattern, intervals in _detect_patterns(trace, candidates)
        for rank, (site, part) in enumerate(_group_by_site(trace, device, pattern, intervals))
    ]
    large = [(finding, part) for finding, part in evaluated if finding.wasted_bytes >= min_bytes]
    return dict(sorted(large, key=lambda item: _ranking(item[0])))


def _ranking(finding: Finding) -> tuple[bool, bool, int, float]:
    saves_nothing = finding.saved_bytes == 0
    return saves_nothing, not finding.is_single_line_fix, -finding.saved_bytes, -(finding.idle_byte_seconds or 0.0)


def _detect_patterns(trace: Trace, candidates: Array) -> list[tuple[WastePattern, IdleIntervals]]:
    """Return the intervals of each pattern; blocks of a special case are not reported under the general pattern too."""
    leaked = training_patterns.find_leaked_blocks(trace, candidates)
    of_graph = dead_graphs.is_held_by_graph(trace, leaked.block)
    leaks = [(catalog.RETAINED_GRAPH, leaked.select(of_graph)), (catalog.LEAK, leaked.select(~of_graph))]
    if _unknown_accesses(trace) is not None:
        return leaks
    candidates = candidates[~_cross_gaps(trace, candidates)]
    carried = training_patterns.find_graphs_across_steps(trace, candidates)
    candidates = _without(trace, candidates, carried.block)
    accumulated = training_patterns.find_accumulated_results(trace, candidates)
    gradients = training_patterns.find_idle_gradients(trace, candidates)
    for_nothing = unused_gradients.find_unused_gradients(trace, candidates)
    replaced = training_patterns.find_replaced_state(trace, candidates)
    special = [gradients.block, leaked.block, for_nothing.block, replaced.block]
    candidates = _without(trace, candidates, np.concatenate(special))
    unused = patterns.find_unused_allocations(trace, candidates)
    candidates = _without(trace, candidates, unused.block)
    is_gradient = blocks(trace).category[candidates] == CATEGORY["gradient"]
    is_of_dead_graph = dead_graphs.is_held_by_dead_graph(trace, candidates) & ~is_gradient
    is_forward_only = dead_graphs.is_made_without_backward(trace, candidates) & ~is_gradient
    of_dead_graph = candidates[is_of_dead_graph]
    is_persistent = np.isin(blocks(trace).category[candidates], PERSISTENT)
    # A variable that holds an output of such a forward holds its graph too: dropping it would save more than the block.
    others = patterns.blocks_that_are_read(trace, candidates[~(is_persistent | is_forward_only | is_of_dead_graph)])
    dead = dead_graphs.until_variables_drop(trace, patterns.find_late_deallocations(trace, of_dead_graph))
    # The graph of the last step is not a leak yet, but the fix of the earlier ones fixes it too.
    stack, origin = blocks(trace).stack, row_codes(blocks(trace).stack, blocks(trace).op_name)
    is_retained = np.isin(origin[dead.block], origin[leaks[0][1].block])
    leaks[0] = (catalog.RETAINED_GRAPH, IdleIntervals.concatenate([leaks[0][1], dead.select(is_retained)]))
    others = others[~np.isin(stack[others], stack[leaked.block])]
    freed_late = patterns.find_late_deallocations(trace, others)
    late = patterns.select_droppable(trace, freed_late)
    # Where later steps run through the graph again, backward has to keep it.
    may_be_freed = freed_late if not len(carried) else IdleIntervals.concatenate([])
    after_backward = patterns.find_graphs_kept_after_backward(trace, may_be_freed)
    late_gradient = training_patterns.is_applied_gradient(trace, late.block)
    applied = training_patterns.find_optimizer_in_backward(trace, late.block[late_gradient], candidates)
    redundant, donors = patterns.find_redundant_allocations(trace, candidates)
    copied = training_patterns.is_copy_of_donor(trace, redundant.block, donors)
    in_place = can_write_in_place(trace, redundant.block)
    return [
        *leaks,
        (catalog.GRAPH_ACROSS_STEPS, carried),
        (catalog.ACCUMULATED_RESULTS, accumulated),
        (catalog.GRADIENTS_THROUGH_FORWARD, gradients),
        (catalog.UNUSED_ALLOCATION, unused),
        (catalog.FORWARD_WITHOUT_BACKWARD, dead.select(~is_retained)),
        (catalog.GRAPH_AFTER_BACKWARD, dead_graphs.until_variables_drop(trace, after_backward)),
        (catalog.REPLACED_STATE, replaced),
        (catalog.UNUSED_GRADIENTS, for_nothing),
        (catalog.GRADIENTS_THROUGH_STEP, applied),
        (catalog.LATE_DEALLOCATION, late.select(~late_gradient)),
        (catalog.EARLY_ALLOCATION, patterns.find_early_allocations(trace, candidates)),
        (catalog.DOUBLE_COPY, redundant.select(copied)),
        (catalog.REDUNDANT_ALLOCATION, redundant.select(in_place & ~copied)),
        (catalog.TEMPORARY_IDLENESS, patterns.find_temporary_idleness(trace, _offloadable(trace, candidates))),
        (catalog.DEAD_WRITE, patterns.find_dead_writes(trace, candidates)),
    ]


def _cross_gaps(trace: Trace, candidates: Array) -> Array:
    """Return whether blocks live in a gap too, where what uses them is unknown."""
    columns = blocks(trace)
    begin = np.maximum(columns.alloc_event[candidates], 0)
    return find_gaps(trace).cut_rows(begin, np.minimum(free_rows(columns, candidates), trace.num_rows("events")))


def _offloadable(trace: Trace, candidates: Array) -> Array:
    """Return the blocks that could be moved to the host: those of accelerators."""
    chosen: Array = candidates[blocks(trace).device[candidates] != _cpu(trace)]
    return chosen


def _cpu(trace: Trace) -> int:
    return trace.devices.index("cpu") if "cpu" in trace.devices else -1


def _without(trace: Trace, candidates: Array, excluded: Array) -> Array:
    remaining: Array = candidates[~patterns.block_mask(trace, excluded)[candidates]]
    return remaining


def _group_by_site(
    trace: Trace, device: str, pattern: WastePattern, intervals: IdleIntervals
) -> list[tuple[str | None, IdleIntervals]]:
    """Return the intervals of each allocation site and category, those that waste most at the peak first."""
    if not len(intervals):
        return []
    if pattern.is_reported_once:
        return [(_main_site(trace, pattern, intervals), intervals)]
    columns = blocks(trace)
    category = columns.category[intervals.block]
    if pattern.is_reported_by_line:
        category = np.zeros(len(intervals), np.int8)
    if pattern in _SITES_OF_GRAPHS:
        sites = _SITES_OF_GRAPHS[pattern](trace, intervals.block)
        return _by_bytes_at_peak(trace, device, intervals, _members_by_site(sites))
    key = columns.stack[intervals.block].astype(np.int64) * len(CATEGORIES) + category
    order = np.argsort(key, kind="stable")
    keys, first = np.unique(key[order], return_index=True)
    groups: dict[tuple[str | None, int], list[Array]] = {}
    for stack_and_category, members in zip(keys.tolist(), np.split(order, first[1:]), strict=True):
        stack, category = divmod(stack_and_category, len(CATEGORIES))
        # Several call stacks can share an allocation site.
        groups.setdefault((allocation_site(trace, stack), category), []).append(members)
    merged = [(site, np.concatenate(members)) for (site, _), members in groups.items()]
    return _by_bytes_at_peak(trace, device, intervals, merged)


_SITES_OF_GRAPHS: Final = {
    catalog.FORWARD_WITHOUT_BACKWARD: dead_graphs.sites_of_dead_graphs,
    catalog.UNUSED_GRADIENTS: unused_gradients.sites_of_unused_gradients,
}
"""Patterns whose blocks belong to graphs that one line of the program runs, and the function that finds this line."""


def _members_by_site(sites: list[str | None]) -> list[tuple[str | None, Array]]:
    """Return each site with the positions at which it stands in ``sites``."""
    members: dict[str | None, list[int]] = {}
    for position, site in enumerate(sites):
        members.setdefault(site, []).append(position)
    return [(site, np.array(positions)) for site, positions in members.items()]


def _by_bytes_at_peak(
    trace: Trace, device: str, intervals: IdleIntervals, groups: list[tuple[str | None, Array]]
) -> list[tuple[str | None, IdleIntervals]]:
    """Return the intervals of each group of positions, those that waste most at the peak first."""
    peak_row = find_peak(trace, device).requested.event
    size = blocks(trace).size[intervals.block]
    bytes_at_peak = size * ((intervals.begin <= peak_row) & (intervals.end > peak_row))
    ordered = sorted(groups, key=lambda group: -int(bytes_at_peak[group[1]].sum()))
    return [(site, intervals.select(members)) for site, members in ordered]


def _main_site(trace: Trace, pattern: WastePattern, intervals: IdleIntervals) -> str | None:
    """Return the site to report for blocks of many sites: that of the loss of a retained graph, else of most bytes."""
    columns = blocks(trace)
    if pattern in (catalog.RETAINED_GRAPH, catalog.GRAPH_AFTER_BACKWARD):
        # The loss is the block of the graph that is allocated last.
        of_graph = intervals.block[columns.stack[intervals.block] >= 0]
        last = of_graph[np.argmax(columns.alloc_event[of_graph])] if len(of_graph) else intervals.block[0]
        return allocation_site(trace, int(columns.stack[last]))
    stacks, index = np.unique(columns.stack[intervals.block], return_inverse=True)
    largest = np.argmax(np.bincount(index, weights=columns.size[intervals.block]))
    return allocation_site(trace, int(stacks[largest]))


def _evaluate(
    trace: Trace,
    device: str,
    pattern: WastePattern,
    site: str | None,
    intervals: IdleIntervals,
    min_saved_bytes: int | None,
) -> Finding:
    """Return the finding that ``intervals`` make.

    Args:
        trace: the trace of one rank.
        device: the device.
        pattern: the pattern of the finding.
        site: its allocation site.
        intervals: when its blocks are wasted.
        min_saved_bytes: smaller savings count as none; None: the saving is not computed.
    """
    columns, peak_of_requests = blocks(trace), find_peak(trace, device).requested
    time_ns = trace.columns("events", "time_ns")["time_ns"]
    size = columns.size[intervals.block]
    begin, end = np.maximum(intervals.begin, 0), np.minimum(intervals.end, max(len(time_ns) - 1, 0))
    idle_ns = np.maximum(time_ns[end] - time_ns[begin], 0).astype(float) if len(time_ns) else np.zeros(len(size))
    spans_peak = (intervals.begin <= peak_of_requests.event) & (intervals.end > peak_of_requests.event)
    covers_peak = bool(spans_peak.any())
    fixed = peak_of_requests.bytes
    if covers_peak and min_saved_bytes is not None:
        fixed = peak_without_intervals(trace, device, intervals)
        fixed = fixed if peak_of_requests.bytes - fixed >= min_saved_bytes else peak_of_requests.bytes
    bytes_by_category = np.bincount(columns.category[intervals.block], weights=size, minlength=len(CATEGORIES))
    is_dead_write = pattern is catalog.DEAD_WRITE
    return Finding(
        pattern=pattern.name,
        pattern_class=pattern.pattern_class,
        site=site,
        module=_main_module(trace, pattern, intervals.block),
        category=CATEGORIES[int(bytes_by_category.argmax())],
        num_blocks=len(np.unique(intervals.block)),
        wasted_bytes=int(size.max()) if is_dead_write else max_simultaneous_bytes(intervals, size),
        idle_byte_seconds=float((size * idle_ns).sum()) / 1e9 if trace.has_times else None,
        covers_peak=covers_peak,
        peak_if_fixed_bytes=fixed,
        saved_bytes=peak_of_requests.bytes - fixed,
        is_upper_bound=pattern.is_upper_bound,
        is_single_line_fix=pattern.is_single_line_fix,
        advice=pattern.advice,
        no_stack_reason=_no_stack_reason(trace, intervals.block) if site is None else None,
    )


def _main_module(trace: Trace, pattern: WastePattern, block: Array) -> str | None:
    """Return the module to report: that of unused gradients contains all of them, others own most of the bytes."""
    if pattern is catalog.UNUSED_GRADIENTS:
        return unused_gradients.module_of_unused_gradients(trace, block) or largest_module(trace, block)
    return largest_module(trace, block)


def _no_stack_reason(trace: Trace, block: Array) -> str | None:
    """Return why most bytes of some blocks have no call stack; None: all have one."""
    nameless = np.unique(block[blocks(trace).stack[block] < 0])
    if not len(nameless):
        return None
    reasons, index = missing_stack_reasons(trace, nameless)
    return reasons[int(np.bincount(index, weights=blocks(trace).size[nameless]).argmax())]
