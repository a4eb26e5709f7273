"""Any number of runs side by side: peak memory by category, module and site, access intervals, and swap candidates.

The figures of each run are those that "Pinpointing the Memory Behaviors of DNN Training" (ISPASS 2021) compares between
models, data sets and batch sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from memtrace.analysis.block_accesses import has_accesses
from memtrace.analysis.diff import GROUPINGS, ChangeKind, Grouping, Totals, live_at_peak, match_moved_sites
from memtrace.analysis.intervals import access_intervals, device_intervals
from memtrace.analysis.peak import find_peak, peak_by_category
from memtrace.analysis.steps import device_step_peaks, step_columns
from memtrace.analysis.swap import assumed_bandwidths, device_swap_totals
from memtrace.analysis.warm_up import steps_after_warm_up
from memtrace.display import Displayed
from memtrace.errors import TraceError
from memtrace.format.arrays import Array
from memtrace.format.storage import AnyPath
from memtrace.trace import Trace

TRACE_SUFFIX: Final = ".memtrace"


@dataclass(frozen=True)
class Run:
    """One device of one rank of a trace, which is compared with those of other runs."""

    label: str
    trace: Trace
    """A trace of one rank."""
    device: str
    num_ranks: int = 1
    """Number of ranks of the whole run."""

    @property
    def rank(self) -> int:
        """The compared rank."""
        return self.trace.ranks[0]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """Key figures of one device of one run. None: the trace does not record them, or it has no steps."""

    label: str
    rank: int
    num_ranks: int
    """Number of ranks of the whole run."""
    device: str
    peak_bytes: int
    """Peak of the requested bytes of the device."""
    peak_step: int | None
    """Step in which the peak is reached; None: outside the steps."""
    peak_phase: str | None
    bytes_by_category: dict[str, int]
    """Live bytes at the peak by category."""
    num_steps: int | None
    median_step_peak_bytes: int | None
    """Median of the peaks of the steps after warm-up."""
    median_step_duration_ns: int | None
    """Median duration of the steps after warm-up."""
    num_intervals: int | None
    """Number of access intervals of the device; None where accesses or times are unknown."""
    median_interval_ns: int | None
    """Median length of these intervals."""
    num_swap_intervals: int | None
    """Number of intervals that are long enough, each for itself, to swap their block."""
    swappable_at_peak_bytes: int | None
    """Bytes that can all be in host memory at the peak."""


@dataclass(frozen=True)
class GroupComparison:
    """What a category, module or allocation site holds at the peak of each run."""

    grouping: Grouping
    """What ``name`` is: a category, a module or an allocation site."""
    name: str | None
    """The category, module or site, as in the last run that has it; None: unknown."""
    kind: ChangeKind | None
    """How the last run differs from the first; None: these two are equal, or neither of them has the group."""
    bytes_by_run: tuple[int | None, ...]
    """Bytes at the peak of each run; None: the run has no such block at its peak."""
    change_bytes: int
    """Bytes of the last run minus bytes of the first run."""
    spread_bytes: int
    """Difference between the largest and the smallest of the runs."""


@dataclass(frozen=True)
class RunComparison(Displayed):
    """Any number of runs side by side."""

    runs: tuple[RunSummary, ...]
    groups: tuple[GroupComparison, ...]
    """Categories, modules and sites that differ between the runs, the largest difference first."""
    notes: tuple[str, ...] = field(default=())
    """Sentences about what limits the comparison."""


def match_runs(
    traces: Sequence[Trace], labels: Sequence[str] = (), *, rank: int | None = None, device: str | None = None
) -> tuple[Run, ...]:
    """Return the runs with the rank and the device of each trace that can be compared with those of the others.

    Of jobs with several ranks the same rank is compared: of the ranks that all of them have, the one with the highest
    peak. The device is the accelerator that all runs have (of several, the one with the highest peak); runs without a
    common accelerator are compared by the fullest device of each.

    Args:
        traces: traces of one or several ranks.
        labels: one label for each trace; default: the shortest ends of their paths that differ.
        rank: rank to compare, for traces of several ranks; default: see above.
        device: device to compare, such as ``cuda:0``; default: see above.

    Raises:
        TraceError: a trace has no such rank, no such device, or no memory events.
        ValueError: the number of labels is not the number of traces.
    """
    if labels and len(labels) != len(traces):
        raise ValueError(f"{len(labels)} labels were given for {len(traces)} traces")
    names = unique_labels(labels) if labels else label_paths([trace.path for trace in traces])
    ranks = _choose_ranks(traces, rank)
    peaks = [trace.rank_result(number, device_peaks) for trace, number in zip(traces, ranks, strict=True)]
    devices = [device] * len(ranks) if device is not None else _choose_devices(peaks, names)
    for name, of_rank, each in zip(names, peaks, devices, strict=True):
        if each not in of_rank:
            raise TraceError(f"{name}: the trace has no device {each}. It has {', '.join(of_rank) or 'none'}.")
    return tuple(
        Run(name, trace.rank(number), each, len(trace.ranks))
        for name, trace, number, each in zip(names, traces, ranks, devices, strict=True)
    )


def compare_runs(runs: Sequence[Run]) -> RunComparison:
    """Compare runs; the order of the runs is kept, and the first one is the baseline of the differences."""
    return RunComparison(
        tuple(_summarize(run) for run in runs), tuple(_compare_groups(runs)), tuple(_describe_limits(runs))
    )


def interval_quantiles(run: Run, num_quantiles: int) -> Array:
    """Return evenly spaced quantiles of the access intervals of a run in nanoseconds, from the shortest to the longest.

    Empty where accesses were not recorded. The quantiles are lengths of intervals of the run, not interpolated ones.
    """
    rows = device_intervals(run.trace, run.device)
    lengths = np.sort(access_intervals(run.trace).duration_ns[rows])
    if not len(lengths):
        return lengths
    place = np.linspace(0, len(lengths) - 1, min(num_quantiles, len(lengths)))
    quantiles: Array = lengths[np.round(place).astype(np.int64)]
    return quantiles


def label_paths(paths: Sequence[AnyPath | None]) -> tuple[str, ...]:
    """Return a label for each trace: the shortest end of its path that no other trace has."""
    absolute = [_absolute_parts(path) for path in paths]
    for depth in range(1, max(map(len, absolute), default=0) + 1):
        ends = ["/".join(parts[-depth:]).removesuffix(TRACE_SUFFIX) for parts in absolute]
        if len(set(ends)) == len(ends):
            return tuple(ends)
    return unique_labels([parts[-1].removesuffix(TRACE_SUFFIX) for parts in absolute])


def _absolute_parts(path: AnyPath | None) -> tuple[str, ...]:
    if path is None:
        return ("trace",)
    return path.absolute().parts if isinstance(path, Path) else path.parts


def unique_labels(labels: Sequence[str]) -> tuple[str, ...]:
    """Return labels that differ: those that occur several times get a number."""
    counts, seen = Counter(labels), Counter[str]()
    unique = []
    for label in labels:
        seen[label] += 1
        unique.append(label if counts[label] == 1 else f"{label} ({seen[label]})")
    return tuple(unique)


def _choose_ranks(traces: Sequence[Trace], rank: int | None) -> list[int]:
    jobs = [trace for trace in traces if len(trace.ranks) > 1]
    if rank is None and jobs:
        common = set(jobs[0].ranks).intersection(*(trace.ranks for trace in jobs[1:]))
        if common:
            rank = max(sorted(common), key=lambda number: max(_fullest_bytes(trace, number) for trace in jobs))
    chosen = []
    for trace in traces:
        if len(trace.ranks) == 1:
            # The only rank of a run is compared, whatever its number.
            chosen.append(trace.ranks[0])
        elif rank is not None:
            chosen.append(rank)
        else:
            chosen.append(max(trace.ranks, key=partial(_fullest_bytes, trace)))
    return chosen


def device_peaks(trace: Trace) -> dict[str, int]:
    """Return the peak of the requested bytes of each device of a single-rank trace."""
    return {device: find_peak(trace, device).requested.bytes for device in trace.devices}


def _fullest_bytes(trace: Trace, rank: int) -> int:
    peaks = trace.rank_result(rank, device_peaks)
    fullest = _fullest_device(peaks)
    return -1 if fullest is None else peaks[fullest]


def _fullest_device(peaks: Mapping[str, int]) -> str | None:
    """Return the device with the highest peak, accelerators before the CPU; None without devices."""
    return max([device for device in peaks if device != "cpu"] or peaks, key=peaks.__getitem__, default=None)


def _choose_devices(peaks: Sequence[Mapping[str, int]], names: Sequence[str]) -> list[str]:
    fullest = []
    for name, of_rank in zip(names, peaks, strict=True):
        device = _fullest_device(of_rank)
        if device is None:
            raise TraceError(f"{name}: the trace has no memory events.")
        fullest.append(device)
    common = set(peaks[0]).intersection(*peaks[1:]) - {"cpu"}
    if not common:
        return fullest
    device = max(sorted(common), key=lambda each: max(of_rank[each] for of_rank in peaks))
    return [device] * len(peaks)


@dataclass(frozen=True)
class RunFacts:
    """What a comparison needs of one device of a run."""

    summary: RunSummary
    """Its label is empty."""
    live_at_peak: Totals


def run_facts(trace: Trace, device: str) -> RunFacts:
    """Return what a comparison needs of one device of a single-rank trace."""
    top, columns = find_peak(trace, device), step_columns(trace)
    is_compared = np.isin(columns.step, steps_after_warm_up(trace))
    records_accesses = has_accesses(trace) and trace.has_times
    rows = device_intervals(trace, device) if records_accesses else np.empty(0, np.int64)
    swappable = device_swap_totals(trace, device, assumed_bandwidths(trace)) if records_accesses else None
    summary = RunSummary(
        label="",
        rank=trace.ranks[0],
        num_ranks=1,
        device=device,
        peak_bytes=top.requested.bytes,
        peak_step=top.step,
        peak_phase=top.phase,
        bytes_by_category={group.name or "unknown": group.bytes for group in peak_by_category(trace, device)},
        num_steps=len(columns) if trace.has_blocks else None,
        median_step_peak_bytes=_median(device_step_peaks(trace, device)[is_compared]),
        median_step_duration_ns=_median(columns.duration_ns[is_compared]) if trace.has_times else None,
        num_intervals=len(rows) if records_accesses else None,
        median_interval_ns=_median(access_intervals(trace).duration_ns[rows]),
        num_swap_intervals=swappable.num_intervals if swappable else None,
        swappable_at_peak_bytes=swappable.bytes_at_peak if swappable else None,
    )
    return RunFacts(summary, live_at_peak(trace, [device]))


def _facts(run: Run) -> RunFacts:
    return run.trace.rank_result(run.rank, run_facts, run.device)


def _summarize(run: Run) -> RunSummary:
    return replace(_facts(run).summary, label=run.label, num_ranks=run.num_ranks)


def _median(values: Array) -> int | None:
    return round(float(np.median(values))) if len(values) else None


def _compare_groups(runs: Sequence[Run]) -> list[GroupComparison]:
    """Return the groups that differ between the runs, the largest difference first."""
    totals = [_facts(run).live_at_peak for run in runs]
    groups = []
    for grouping in GROUPINGS:
        if grouping != "category" and not all(run.trace.has_blocks for run in runs):
            continue
        for name, sizes in _bytes_by_name(totals, grouping).items():
            present = [size or 0 for size in sizes]
            spread = max(present) - min(present)
            if spread or None in sizes:
                change = present[-1] - present[0]
                groups.append(GroupComparison(grouping, name, _change_kind(sizes), tuple(sizes), change, spread))
    return sorted(groups, key=lambda group: -group.spread_bytes)


def _bytes_by_name(totals: Sequence[Totals], grouping: Grouping) -> dict[str | None, list[int | None]]:
    """Return the bytes of each run by name; a site that only moved within its function is one site."""
    rows: dict[str | None, list[int | None]] = {}
    for place, by_grouping in enumerate(totals):
        groups = by_grouping[grouping]
        if grouping == "site" and place:
            # ``rows`` has the sites of the earlier runs under their latest names.
            earlier = {name: total for each in totals[:place] for name, total in each[grouping].items() if name in rows}
            for new_name, old_name in match_moved_sites(earlier, groups).items():
                rows[new_name] = rows.pop(old_name)
        for name, total in groups.items():
            rows.setdefault(name, [None] * len(totals))[place] = total.num_bytes
    return rows


def _change_kind(sizes: Sequence[int | None]) -> ChangeKind | None:
    first, last = sizes[0], sizes[-1]
    if first is None or last is None:
        return None if first is last else "appeared" if first is None else "disappeared"
    return None if first == last else "grew" if last > first else "shrank"


def _describe_limits(runs: Sequence[Run]) -> list[str]:
    notes = []
    without_blocks = [run.label for run in runs if not run.trace.has_blocks]
    if without_blocks:
        notes.append(
            f"Modules and allocation sites are not compared: {_list(without_blocks)} "
            f"{'has' if len(without_blocks) == 1 else 'have'} totals instead of blocks."
        )
    if len({run.device for run in runs}) > 1:
        notes.append(
            "The runs have no accelerator in common: "
            + ", ".join(f"{run.label} is compared by {run.device}" for run in runs)
            + "."
        )
    if any(run.num_ranks > 1 for run in runs):
        notes.append(", ".join(f"{run.label}: rank {run.rank} of {run.num_ranks}" for run in runs) + ".")
    return notes


def _list(names: Sequence[str]) -> str:
    return " and ".join(", ".join(names).rsplit(", ", 1))
