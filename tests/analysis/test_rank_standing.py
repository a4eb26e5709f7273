"""Which of several ranks that ran out of memory is the one to look at."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from memtrace.analysis.rank_standing import RankStanding, find_first_failure, measure_standing
from memtrace.analysis.ranks import compare_ranks
from memtrace.format.manifest import ClockOffset, FileCoverage, Manifest
from memtrace.planning.verdict import choose_rank, judge_job
from memtrace.trace import Trace
from tests.analysis.test_compare import job
from tests.builders import event, trace_of, with_manifest


def failing_rank(peak_bytes: int, failed_ns: int | None, offset_ns: int) -> Trace:
    """A rank that fails at a time by the clock of rank 0; its own clock is behind by an offset. None: it never fails."""
    events = [event("alloc", 0, 1, peak_bytes)]
    if failed_ns is not None:
        events.append(event("oom", None, failed_ns - offset_ns, 1 << 20))
    return with_manifest(
        trace_of(events=events), clock=ClockOffset(offset_ns=offset_ns), t0_epoch_ns=10**18 - offset_ns
    )


def test_ranks_and_summary_name_the_rank_that_failed_first() -> None:
    # By the clocks of the ranks themselves rank 2 was the first; rank 3 has the highest peak.
    trace = job(
        {
            0: failing_rank(400, None, 0),
            1: failing_rank(300, 5_000, -7_000),
            2: failing_rank(200, 6_000, 5_500),
            3: failing_rank(900, 8_000, 0),
        }
    )
    comparison = compare_ranks(trace)
    assert comparison.rank_to_inspect == choose_rank(trace) == judge_job(trace).judged.rank == 1
    assert comparison.reason == "it ran out of memory before the others"


def test_the_only_rank_that_failed_is_named_whatever_its_peak() -> None:
    trace = job({0: failing_rank(900, None, 0), 1: failing_rank(5, 10, 0), 2: failing_rank(900, None, 0)})
    comparison = compare_ranks(trace)
    assert (comparison.rank_to_inspect, comparison.reason) == (choose_rank(trace), "it ran out of memory") == (
        1, "it ran out of memory",
    )  # fmt: skip


def test_without_times_the_fullest_of_the_ranks_that_failed_is_named() -> None:
    without_times = FileCoverage(lost_events=0, has_times=False)
    ranks = {
        number: with_manifest(failing_rank(peak, 10 if fails else None, 0), coverage=without_times)
        for number, (peak, fails) in enumerate([(50, True), (70, True), (90, False)])
    }
    assert measure_standing(ranks[0]) == RankStanding(0, 50, True, None)
    comparison = compare_ranks(job(ranks))
    assert comparison.rank_to_inspect == choose_rank(job(ranks)) == 1
    assert comparison.reason == "it ran out of memory, and has the highest peak of the ranks that did"


@given(
    st.lists(
        st.tuples(
            st.one_of(st.none(), st.integers(0, 1 << 40)), st.integers(-(1 << 40), 1 << 40), st.integers(0, 1 << 40)
        ),
        min_size=1,
        max_size=8,
        unique_by=lambda rank: rank[0] if rank[0] is not None else object(),
    ),
    st.booleans(),
)
def test_the_first_failure_is_that_of_the_smallest_aligned_time(
    ranks: list[tuple[int | None, int, int]], has_offsets: bool
) -> None:
    standings, manifests = [], {}
    for number, (failed_ns, offset_ns, peak_bytes) in enumerate(ranks):
        own_ns = None if failed_ns is None else failed_ns - offset_ns
        standings.append(RankStanding(number, peak_bytes, failed_ns is not None, own_ns))
        # Without measured offsets the wall clocks, at which the times of the ranks begin, relate them.
        clock = ClockOffset(offset_ns=offset_ns) if has_offsets else None
        manifests[number] = replace(Manifest(), rank=number, clock=clock, t0_epoch_ns=offset_ns + (1 << 41))
    failed = {number: failed_ns for number, (failed_ns, _, _) in enumerate(ranks) if failed_ns is not None}
    expected = min(failed, key=lambda number: failed[number], default=None)
    assert find_first_failure(standings, manifests) == expected
