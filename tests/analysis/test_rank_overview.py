"""All ranks of a job at a glance: their memory, the peaks of their steps, and which of them are outliers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis.rank_groups import find_outliers
from memtrace.analysis.rank_overview import step_peak_grid, survey_ranks
from memtrace.analysis.rank_summary import DeviceLoad, RankSummary
from memtrace.analysis.ranks import compare_ranks
from memtrace.planning.verdict import choose_rank
from memtrace.trace import MAX_KEPT_RANKS, Trace, load
from tests.analysis.test_compare import job, sized_trace
from tests.builders import event, trace_of, with_manifest


def test_loads_are_the_peaks_of_every_rank_and_device(gpt_trace: Path) -> None:
    two_devices = trace_of(events=[event("alloc", 0, 1, 7, device="cuda:1"), event("alloc", 1, 2, 5)])
    overview = survey_ranks(job({0: load(gpt_trace), 1: two_devices}))
    peaks = {(load.rank, load.device): load.peak_bytes for load in overview.loads}
    (first, *_) = overview.comparison.ranks
    assert peaks == {(0, "cpu"): first.peak_bytes, (1, "cpu"): 5, (1, "cuda:1"): 7}
    assert [(load.rank, load.device) for load in overview.main_loads] == [(0, "cpu"), (1, "cuda:1")]
    assert all(sum(load.bytes_by_category.values()) == load.peak_bytes for load in overview.loads)


def test_many_ranks_give_the_same_results_without_being_kept() -> None:
    traces = {rank: sized_trace([10, 20 + 5 * (rank == 17)]) for rank in range(MAX_KEPT_RANKS + 4)}
    many = job(traces)
    overview = survey_ranks(many)
    assert overview.comparison == compare_ranks(many)
    assert [summary.peak_bytes for summary in overview.comparison.ranks] == [25 if n == 17 else 20 for n in traces]
    assert overview.comparison.rank_to_inspect == choose_rank(many) == 17
    assert {outlier.rank for outlier in overview.comparison.outliers} == {17}
    # Nothing that was computed of a single rank stays with the trace of the job.
    assert not any(function is Trace._only_rank for function, *_ in many._results)


def test_an_unreadable_rank_is_named_and_the_others_are_surveyed() -> None:
    broken = job({0: sized_trace([10]), 1: sized_trace([10])})
    broken.unreadable[2] = "rank 2: the manifest is missing"
    overview = survey_ranks(broken)
    assert [summary.problem for summary in overview.comparison.ranks][2] == "rank 2: the manifest is missing"
    assert [load.rank for load in overview.loads] == [0, 1]


def summary(rank: int, peak_bytes: int | None, **more: int) -> RankSummary:
    return RankSummary(rank=rank, peak_bytes=peak_bytes, **more)  # type: ignore[arg-type]


def test_outliers_differ_from_most_ranks() -> None:
    peaks = [100, 101, 99, 100, 100, 160, 40, 102]
    outliers = find_outliers([summary(rank, peak) for rank, peak in enumerate(peaks)])
    assert [(outlier.rank, outlier.measure, outlier.value, outlier.median) for outlier in outliers] == [
        (5, "peak", 160, 100),
        (6, "peak", 40, 100),
    ]


def test_few_ranks_and_ranks_that_spread_evenly_have_no_outliers() -> None:
    assert find_outliers([summary(0, 10), summary(1, 99), summary(2, None)]) == ()
    assert find_outliers([summary(rank, 100 + 30 * rank) for rank in range(8)]) == ()
    assert find_outliers([summary(rank, 1000 + rank) for rank in range(8)]) == ()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.dictionaries(st.integers(0, 30), st.integers(1, 99), min_size=1), min_size=1, max_size=6),
    st.integers(2, 10),
)
def test_the_grid_has_the_peaks_of_its_steps_and_the_highest_of_all(
    peaks_of_ranks: list[dict[int, int]], max_steps: int
) -> None:
    loads = [
        DeviceLoad(rank, "cpu", max(peaks.values()), {}, np.array(sorted(peaks)), np.array([peaks[n] for n in sorted(peaks)]))
        for rank, peaks in enumerate(peaks_of_ranks)
    ]  # fmt: skip
    grid = step_peak_grid(loads, max_steps)
    assert len(grid.step) <= max_steps
    assert grid.num_steps == len({step for peaks in peaks_of_ranks for step in peaks})
    for row, peaks in enumerate(peaks_of_ranks):
        for column, number in enumerate(grid.step.tolist()):
            value = grid.peak_bytes[row, column]
            assert value == peaks[number] if number in peaks else np.isnan(value)
    assert np.nanmax(grid.peak_bytes) == max(max(peaks.values()) for peaks in peaks_of_ranks)


def test_ranks_without_steps_have_an_empty_grid() -> None:
    loads = survey_ranks(job({0: with_manifest(sized_trace([]), world_size=2)})).main_loads
    assert step_peak_grid(loads, 5).peak_bytes.shape == (0, 0)
