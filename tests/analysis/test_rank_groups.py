"""Which ranks are peers, and which of them differ from their peers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis.rank_groups import (
    MIN_RANKS,
    MeshLayout,
    describe_outliers,
    find_outliers,
    group_ranks,
    parse_mesh,
    place_ranks,
)
from memtrace.analysis.rank_summary import RankSummary
from memtrace.errors import MemtraceError


def summary(rank: int, peak_bytes: int | None, stage: int | None = None) -> RankSummary:
    coordinates = {} if stage is None else {"pp": stage, "dp": rank}
    return RankSummary(rank=rank, peak_bytes=peak_bytes, coordinates=coordinates, finished=True)


def pipeline(ranks_of_stage: int, differing: dict[int, int]) -> list[RankSummary]:
    """Four stages of 400, 300, 200 and 100 bytes, and ranks with other peaks."""
    stages = [(rank, rank // ranks_of_stage) for rank in range(4 * ranks_of_stage)]
    return [summary(rank, differing.get(rank, 400 - 100 * stage), stage) for rank, stage in stages]


def test_a_rank_is_compared_with_its_stage() -> None:
    summaries = pipeline(128, {371: 300})
    assert find_outliers(summaries, group_ranks(pipeline(128, {}))) != ()
    (outlier,) = find_outliers(summaries, group_ranks(summaries))
    assert (outlier.rank, outlier.measure, outlier.value, outlier.median, outlier.peers) == (
        371,
        "peak",
        300,
        200,
        "pp=2",
    )
    assert describe_outliers((outlier,)) == {371: "peak memory 150 % of the median rank of pp=2"}
    # The same peak is usual among all ranks.
    assert find_outliers(summaries) == ()


def test_stages_that_differ_have_no_outliers() -> None:
    summaries = pipeline(8, {})
    groups = group_ranks(summaries)
    assert [(group.label, group.median_peak_bytes, len(group.ranks)) for group in groups] == [
        ("pp=0", 400, 8),
        ("pp=1", 300, 8),
        ("pp=2", 200, 8),
        ("pp=3", 100, 8),
    ]
    assert find_outliers(summaries, groups) == ()


def test_a_job_without_known_stages_has_one_group_of_peers() -> None:
    assert group_ranks([summary(rank, 10) for rank in range(8)]) == ()
    assert group_ranks([summary(rank, 10, stage=0) for rank in range(8)]) == ()
    assert group_ranks([summary(0, 10, stage=0), summary(1, 10, stage=1), summary(2, 10)]) == ()
    unreadable = RankSummary(rank=2, problem="damaged")
    assert len(group_ranks([summary(0, 10, stage=0), summary(1, 10, stage=1), unreadable])) == 2


def test_the_ranks_of_a_group_without_memory_events_have_unknown_peaks() -> None:
    first, second = group_ranks([summary(0, None, stage=0), summary(1, 7, stage=1), summary(2, None, stage=1)])
    assert (first.median_peak_bytes, first.highest_rank) == (None, None)
    assert (second.lowest_peak_bytes, second.highest_peak_bytes, second.highest_rank) == (7, 7, 1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_a_mesh_places_ranks_as_numpy_does(sizes: list[int]) -> None:
    mesh = MeshLayout(tuple((f"d{number}", size) for number, size in enumerate(sizes)))
    ranks = np.arange(math.prod(sizes)).reshape(sizes)
    assert mesh.num_ranks == ranks.size
    for rank in range(mesh.num_ranks):
        assert ranks[tuple(mesh.coordinates(rank).values())] == rank


def test_a_mesh_is_read_from_text() -> None:
    assert parse_mesh("pp=4, dp=16,tp=8") == MeshLayout((("pp", 4), ("dp", 16), ("tp", 8)))
    assert parse_mesh("pp=2").coordinates(1) == {"pp": 1}
    for text in ("", "pp", "pp=0", "=4", "pp=x", "pp=2,pp=3", "pp=-1", "pp=4,"):
        with pytest.raises(MemtraceError):
            parse_mesh(text)


def test_a_mesh_of_another_size_is_refused() -> None:
    ranks = [summary(rank, 10) for rank in range(8)]
    assert place_ranks(ranks, parse_mesh("pp=2,dp=4"), 8)[5].coordinates == {"pp": 1, "dp": 1}
    with pytest.raises(MemtraceError, match="6 ranks, but the job has 8"):
        place_ranks(ranks, parse_mesh("pp=3,dp=2"), 8)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=12), min_size=2, max_size=4))
def test_outliers_of_stages_are_those_of_each_stage_alone(peaks_of_stages: list[list[int]]) -> None:
    stages = [(stage, peak) for stage, peaks in enumerate(peaks_of_stages) for peak in peaks]
    summaries = [summary(rank, peak, stage) for rank, (stage, peak) in enumerate(stages)]
    found = find_outliers(summaries, group_ranks(summaries))
    expected = set()
    for stage, peaks in enumerate(peaks_of_stages):
        members = [item for item in summaries if item.coordinates["pp"] == stage]
        assert len(members) == len(peaks)
        median = np.median(peaks)
        deviation = 1.4826 * np.median(np.abs(np.array(peaks) - median))
        for item, peak in zip(members, peaks, strict=True):
            if len(peaks) >= MIN_RANKS and abs(peak - median) > max(3.5 * deviation, 0.05 * median):
                expected.add(item.rank)
    assert {outlier.rank for outlier in found} == expected
