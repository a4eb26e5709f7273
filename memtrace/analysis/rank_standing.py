"""Which rank of a job to look at first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from memtrace.analysis.attribution import KIND
from memtrace.analysis.peak import find_peak
from memtrace.analysis.rank_clocks import clock_shift_ns
from memtrace.format.manifest import Manifest
from memtrace.trace import Trace


@dataclass(frozen=True)
class RankStanding:
    """What decides which rank to look at first."""

    rank: int
    highest_peak_bytes: int
    """Highest peak of any device."""
    ran_out_of_memory: bool = False
    """Whether an allocation failed."""
    failed_ns: int | None = None
    """Time of the first allocation that failed, by the clock of the rank; None: none failed, or its time is unknown."""


def measure_standing(trace: Trace) -> RankStanding:
    """Return the standing of a single-rank trace among the ranks of its job."""
    events = trace.columns("events", "kind", "time_ns")
    failures = events["time_ns"][events["kind"] == KIND["oom"]]
    peak = max((find_peak(trace, device).requested.bytes for device in trace.devices), default=0)
    failed_ns = int(failures[0]) if len(failures) and trace.has_times else None
    return RankStanding(trace.manifest.rank, peak, len(failures) > 0, failed_ns)


def find_first_failure(standings: Sequence[RankStanding], manifests: Mapping[int, Manifest]) -> int | None:
    """Return the rank that ran out of memory first by the aligned clocks; None where no allocation failed.

    A launcher ends the other ranks when one fails, or they fail later for the same reason: the first one is the cause.
    Where no time is known it is the one of them with the highest peak.

    Args:
        standings: one for each rank.
        manifests: those of the ranks, for their clocks.
    """
    failed = [standing for standing in standings if standing.ran_out_of_memory]
    times = {standing.rank: standing.failed_ns for standing in failed if standing.failed_ns is not None}
    if times:
        reference = manifests[next(iter(times))]
        return min(times, key=lambda rank: times[rank] + clock_shift_ns(manifests[rank], reference))
    return max(failed, key=lambda standing: standing.highest_peak_bytes).rank if failed else None


def choose_standing(standings: Sequence[RankStanding], manifests: Mapping[int, Manifest]) -> int:
    """Return the rank to look at first: the one that ran out of memory first, else the one with the highest peak.

    Args:
        standings: one for each rank.
        manifests: those of the ranks, for their clocks.
    """
    first = find_first_failure(standings, manifests)
    return max(standings, key=lambda standing: standing.highest_peak_bytes).rank if first is None else first
