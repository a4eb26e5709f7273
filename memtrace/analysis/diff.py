"""Differences between two traces by category, module and allocation site, and step by step; addresses are ignored.

Two things are compared: the memory that is live at the peak, and the memory that a step allocates. The latter is the
median over the steps after warm-up, so that runs of different lengths can be compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from memtrace.analysis.allocation_sites import allocation_site
from memtrace.analysis.block_groups import group_by_category, group_by_module_pattern, group_by_site
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak
from memtrace.analysis.steps import step_columns
from memtrace.analysis.warm_up import has_warm_up, steps_after_warm_up
from memtrace.display import Displayed
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

Grouping = Literal["category", "module", "site"]
GROUPINGS: Final[tuple[Grouping, ...]] = ("category", "module", "site")
Measure = Literal["live_at_peak", "allocated_per_step"]
MEASURES: Final[tuple[Measure, ...]] = ("live_at_peak", "allocated_per_step")
ChangeKind = Literal["appeared", "disappeared", "grew", "shrank"]
_LINE_NUMBER: Final = re.compile(r":\d+ ")


@dataclass(frozen=True)
class MemoryChange:
    """A category, module or allocation site whose memory differs between two traces."""

    kind: ChangeKind
    """``appeared`` and ``disappeared``: only one of the traces has the group."""
    measure: Measure
    """``live_at_peak``, or ``allocated_per_step`` (the median over the compared steps)."""
    grouping: Grouping
    """What ``name`` is: a category, a module or an allocation site."""
    name: str | None
    """The category, module or site, as in the second trace; None: unknown."""
    before_bytes: int | None
    """None: absent from the first trace."""
    after_bytes: int | None
    """None: absent from the second trace."""
    change_bytes: int
    """Bytes after minus bytes before."""
    before_blocks: float | None
    """Number of blocks; None: absent, or the first trace holds totals and no blocks."""
    after_blocks: float | None
    """The same for the second trace."""


@dataclass(frozen=True)
class TraceTotals:
    """Key figures of one trace. None: the trace does not record them, or it has no steps."""

    peak_bytes: int
    """Peak of the requested bytes, summed over the devices."""
    num_steps: int | None
    """Number of all steps; the medians are over the compared steps."""
    median_step_peak_bytes: int | None
    """Median of the peaks of the steps."""
    median_step_allocated_bytes: int | None
    """Median of the bytes that a step allocates."""
    median_step_allocations: int | None
    """Median of the number of allocations of a step."""
    median_step_duration_ns: int | None
    """Median duration of a step."""


@dataclass(frozen=True)
class StepPeaks:
    """The peaks of a step that both traces have."""

    step: int
    """Number of the step."""
    before_bytes: int
    """Its peak in the first trace."""
    after_bytes: int
    """Its peak in the second trace."""


@dataclass(frozen=True)
class TraceComparison(Displayed):
    """The differences between two traces."""

    before: TraceTotals
    """Key figures of the first trace."""
    after: TraceTotals
    """Key figures of the second trace."""
    changes: tuple[MemoryChange, ...]
    """What differs, the largest change first."""
    steps: tuple[StepPeaks, ...]
    """Peaks of the steps that both traces have."""


@dataclass(frozen=True)
class GroupTotal:
    """Bytes and blocks of a category, module or allocation site."""

    num_bytes: int
    num_blocks: float | None
    """None: the trace holds totals and no blocks."""


Totals = dict[Grouping, dict[str | None, GroupTotal]]
"""For each grouping the totals by name; None: the blocks whose category, module or site is unknown."""


@dataclass(frozen=True)
class DiffFacts:
    """What a comparison needs of one of its traces."""

    has_warm_up: bool
    """Whether there are steps after warm-up."""
    live_at_peak: Totals
    allocated_per_step: Totals | None
    """Medians over the compared steps; None: the trace holds totals and no blocks."""
    totals: TraceTotals
    steps: dict[int, int]
    """Peak bytes of all steps by number, in order."""


def compare_traces(before: Trace, after: Trace) -> TraceComparison:
    """Return the differences between two single-rank traces, summed over their devices.

    An allocation site that only moved within its function counts as the same site. If one of the files holds totals
    instead of blocks, only the bytes of the categories at the peak are compared.
    """
    shared = shared_steps(before, after)
    old, new = _facts(before, shared), _facts(after, shared)
    changes = _find_changes("live_at_peak", old.live_at_peak, new.live_at_peak)
    if old.allocated_per_step is not None and new.allocated_per_step is not None:
        changes += _find_changes("allocated_per_step", old.allocated_per_step, new.allocated_per_step)
    else:
        changes = [change for change in changes if change.grouping == "category"]
    changes.sort(key=lambda change: -abs(change.change_bytes))
    return TraceComparison(old.totals, new.totals, tuple(changes), _steps(old.steps, new.steps))


def diff_facts(trace: Trace, compared_steps: tuple[int, ...] | None = None) -> DiffFacts:
    """Return what a comparison needs of one of its traces.

    Args:
        trace: a single-rank trace.
        compared_steps: steps over which medians are taken; None: those after warm-up.
    """
    steps = np.unique(steps_after_warm_up(trace)) if compared_steps is None else np.array(compared_steps, np.int64)
    columns = step_columns(trace)
    return DiffFacts(
        has_warm_up=has_warm_up(trace),
        live_at_peak=live_at_peak(trace),
        allocated_per_step=_allocated_per_step(trace, steps) if trace.has_blocks else None,
        totals=_trace_totals(trace, steps),
        steps=dict(zip(columns.step.tolist(), columns.peak_bytes.tolist(), strict=True)),
    )


def shared_steps(before: Trace, after: Trace) -> tuple[int, ...] | None:
    """Return the steps that two traces have, if one of them is too short to leave out warm-up steps; else None."""
    old, new = _facts(before), _facts(after)
    shared = tuple(sorted(set(old.steps) & set(new.steps)))
    return shared if shared and not (old.has_warm_up and new.has_warm_up) else None


def _facts(trace: Trace, compared_steps: tuple[int, ...] | None = None) -> DiffFacts:
    arguments = () if compared_steps is None else (compared_steps,)
    return trace.rank_result(trace.ranks[0], diff_facts, *arguments)


def changes_table(before: Trace, after: Trace) -> pd.DataFrame:
    """Return one row per change of ``compare_traces``, with the fields of ``MemoryChange`` as columns."""
    import pandas as pd

    rows = [asdict(change) for change in compare_traces(before, after).changes]
    table: pd.DataFrame = pd.DataFrame(rows, columns=[field.name for field in fields(MemoryChange)])
    return table


def live_at_peak(trace: Trace, devices: Sequence[str] | None = None) -> Totals:
    """Return what is live at the peak of each device of a single-rank trace, summed over the devices.

    Args:
        trace: a single-rank trace.
        devices: some of ``trace.devices``; default: all.
    """
    totals: Totals = {grouping: {} for grouping in GROUPINGS}
    for device in trace.devices if devices is None else devices:
        live = find_peak(trace, device).live
        group_functions = (group_by_category, group_by_module_pattern, group_by_site)
        for grouping, group_blocks in zip(GROUPINGS, group_functions, strict=True):
            for group in group_blocks(trace, live):
                other = totals[grouping].get(group.name)
                total_bytes = group.bytes + (other.num_bytes if other else 0)
                total_blocks = group.num_blocks + ((other.num_blocks or 0.0) if other else 0.0)
                totals[grouping][group.name] = GroupTotal(total_bytes, total_blocks if trace.has_blocks else None)
    return totals


def _allocated_per_step(trace: Trace, steps: Array) -> Totals:
    """Return what each group allocates in a step: the median over ``steps``, of bytes and of blocks."""
    columns = blocks(trace)
    in_steps = np.isin(columns.step, steps)
    step_index = np.searchsorted(steps, columns.step[in_steps])
    group_columns: dict[Grouping, tuple[Array, list[str | None]]] = {
        "category": (columns.category.astype(np.int64), [*CATEGORIES, None]),
        "module": _code_by_text(columns.module, lambda name: _module_pattern(trace.name(name))),
        "site": _code_by_text(columns.stack, lambda stack: allocation_site(trace, stack)),
    }
    num_steps = max(len(steps), 1)
    totals: Totals = {}
    for grouping, (code, names) in group_columns.items():
        cell, num_cells = code[in_steps] * num_steps + step_index, len(names) * num_steps
        size = np.bincount(cell, weights=columns.size[in_steps], minlength=num_cells).reshape(-1, num_steps)
        count = np.bincount(cell, minlength=num_cells).reshape(-1, num_steps)
        totals[grouping] = {
            names[group]: GroupTotal(int(np.median(size[group])), float(np.median(count[group])))
            for group in np.flatnonzero(count.any(axis=1)).tolist()
        }
    return totals


def _code_by_text(ids: Array, text_of: Callable[[int], str | None]) -> tuple[Array, list[str | None]]:
    """Return for each id the index of its text, and the distinct texts; several ids can have the same text."""
    distinct_ids, index = np.unique(ids, return_inverse=True)
    texts: dict[str | None, int] = {}
    code = np.array([texts.setdefault(text_of(number), len(texts)) for number in distinct_ids.tolist()], np.int64)
    return code[index] if len(ids) else index, list(texts)


def _module_pattern(name: str | None) -> str | None:
    return name and ".".join("*" if part.isdigit() else part for part in name.split("."))


def _find_changes(measure: Measure, before: Totals, after: Totals) -> list[MemoryChange]:
    changes: list[MemoryChange | None] = []
    for grouping in GROUPINGS:
        old, new = before[grouping], after[grouping]
        old_names = match_moved_sites(old, new) if grouping == "site" else {}
        changes += [
            _make_change(measure, grouping, name, old.get(old_names.get(name, name)), new[name]) for name in new
        ]
        disappeared = [name for name in old if name not in new and name not in old_names.values()]
        changes += [_make_change(measure, grouping, name, old[name], None) for name in disappeared]
    return [change for change in changes if change is not None]


def _make_change(
    measure: Measure, grouping: Grouping, name: str | None, before: GroupTotal | None, after: GroupTotal | None
) -> MemoryChange | None:
    """Return the change between two totals; None if the bytes are the same."""
    change_bytes = (after.num_bytes if after else 0) - (before.num_bytes if before else 0)
    kind: ChangeKind
    if before is None or after is None:
        kind = "appeared" if before is None else "disappeared"
    elif change_bytes == 0:
        return None
    else:
        kind = "grew" if change_bytes > 0 else "shrank"
    return MemoryChange(
        kind=kind,
        measure=measure,
        grouping=grouping,
        name=name,
        before_bytes=before.num_bytes if before else None,
        after_bytes=after.num_bytes if after else None,
        change_bytes=change_bytes,
        before_blocks=before.num_blocks if before else None,
        after_blocks=after.num_blocks if after else None,
    )


def match_moved_sites(
    old: dict[str | None, GroupTotal], new: dict[str | None, GroupTotal]
) -> dict[str | None, str | None]:
    """Return the old site for each new site that differs from it only in the line number.

    A site counts as moved if it is the only unmatched one of its function on both sides.
    """
    only_old, only_new = _sites_by_function(old, new), _sites_by_function(new, old)
    return {
        sites[0]: only_old[function][0]
        for function, sites in only_new.items()
        if len(sites) == 1 and len(only_old.get(function, ())) == 1
    }


def _sites_by_function(
    totals: dict[str | None, GroupTotal], others: dict[str | None, GroupTotal]
) -> dict[str, list[str]]:
    """Return the sites that ``others`` lacks, by file and function."""
    sites: dict[str, list[str]] = {}
    for site in totals:
        if site is not None and site not in others:
            sites.setdefault(_LINE_NUMBER.sub(": ", site), []).append(site)
    return sites


def _trace_totals(trace: Trace, steps: Array) -> TraceTotals:
    columns = step_columns(trace)
    is_compared = np.isin(columns.step, steps)

    def median(name: str) -> int | None:
        return round(float(np.median(getattr(columns, name)[is_compared]))) if is_compared.any() else None

    return TraceTotals(
        peak_bytes=sum(find_peak(trace, device).requested.bytes for device in trace.devices),
        num_steps=len(columns) if trace.has_blocks else None,
        median_step_peak_bytes=median("peak_bytes"),
        median_step_allocated_bytes=median("allocated_bytes"),
        median_step_allocations=median("num_allocs"),
        median_step_duration_ns=median("duration_ns") if trace.has_times else None,
    )


def _steps(old: dict[int, int], new: dict[int, int]) -> tuple[StepPeaks, ...]:
    return tuple(StepPeaks(step, old[step], peak_bytes) for step, peak_bytes in new.items() if step in old)
