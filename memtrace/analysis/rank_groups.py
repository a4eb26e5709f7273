"""Which ranks of a job should have the same memory, and which of them differ from these peers.

Ranks of one pipeline stage hold the same layers, whatever their place among data-parallel and tensor-parallel ranks, so
they are peers. Where no pipeline is known all ranks of the job are peers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from memtrace.analysis.rank_summary import RankSummary
from memtrace.categories import CATEGORY_LABELS
from memtrace.errors import MemtraceError
from memtrace.units import format_bytes, format_share

MIN_RANKS: Final = 4
"""Smallest number of peers of which some can be outliers."""
MIN_DEVIATION: Final = 0.05
"""An outlier differs from the median of its peers by at least this share of it."""
OUTLIER_DEVIATIONS: Final = 3.5
"""An outlier is at least this many standard deviations from the median, estimated by the median absolute deviation."""
MAX_MEASURES: Final = 3
"""Largest number of measures that are named for one rank."""
PIPELINE_DIMENSIONS: Final = ("pp", "pipe", "pipeline", "pipeline_parallel", "stage")
"""Names of the dimension of pipeline stages: of torchtitan, DeepSpeed and others."""
_MEASURE_LABELS: Final = {"peak": "peak memory", "end": "live bytes at the end", "compute": "compute time per step"}
_DEVIATIONS_PER_MAD: Final = 1.4826
"""Standard deviation of normally distributed values, in median absolute deviations."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that should have the same memory, because they hold the same pipeline stage."""

    dimension: str
    """Name of the dimension of pipeline stages."""
    index: int
    """Number of the stage in this dimension."""
    ranks: tuple[int, ...]
    median_peak_bytes: int | None
    """None: no rank of the group has memory events."""
    lowest_peak_bytes: int | None
    highest_peak_bytes: int | None
    highest_rank: int | None
    """The rank with the highest peak."""

    @property
    def label(self) -> str:
        """The group as the program names it, such as ``pp=3``."""
        return f"{self.dimension}={self.index}"


@dataclass(frozen=True)
class RankOutlier:
    """A rank that differs from its peers."""

    rank: int
    measure: str
    """What differs: ``peak``, ``end``, ``compute``, or a category (live bytes at the peak)."""
    value: int
    """Bytes, or nanoseconds of ``compute``."""
    median: int
    """The same of the median peer."""
    peers: str | None = None
    """The group of peers, such as ``pp=3``; None: all ranks of the job."""

    def describe(self) -> str:
        """Return the difference in words, such as ``peak memory 140 %``: its share of the median peer."""
        label = _MEASURE_LABELS.get(self.measure) or CATEGORY_LABELS.get(self.measure, self.measure)
        if not self.median:
            return f"{label} {format_bytes(self.value)} instead of none"
        return f"{label} {format_share(self.value, self.median)}"


@dataclass(frozen=True)
class MeshLayout:
    """How the ranks of a job are laid out over the dimensions of its parallelism; the last dimension varies fastest."""

    sizes: tuple[tuple[str, int], ...]
    """Name and size of each dimension."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks in the mesh."""
        return int(np.prod([size for _, size in self.sizes], dtype=np.int64))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank in each dimension."""
        places: dict[str, int] = {}
        for name, size in reversed(self.sizes):
            rank, places[name] = divmod(rank, size)
        return dict(reversed(places.items()))


def parse_mesh(text: str) -> MeshLayout:
    """Return the layout that a text such as ``pp=4,dp=16,tp=8`` describes.

    Raises:
        MemtraceError: the text has another form, or names a dimension twice.
    """
    sizes: list[tuple[str, int]] = []
    for item in text.split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        if not name or not (size.isascii() and size.isdigit()) or not 1 <= int(size) < 1 << 24:
            raise MemtraceError(f"{item.strip()!r} is not a dimension of a mesh; write it as name=size, such as pp=4")
        if name in dict(sizes):
            raise MemtraceError(f"the mesh has the dimension {name!r} twice")
        sizes.append((name, int(size)))
    return MeshLayout(tuple(sizes))


def place_ranks(summaries: Sequence[RankSummary], mesh: MeshLayout, world_size: int) -> list[RankSummary]:
    """Return the summaries with the coordinates that the ranks have in a mesh.

    Raises:
        MemtraceError: the job has another number of ranks than the mesh.
    """
    if mesh.num_ranks != world_size:
        raise MemtraceError(f"the mesh has {mesh.num_ranks:,} ranks, but the job has {world_size:,}")
    return [replace(summary, coordinates=mesh.coordinates(summary.rank)) for summary in summaries]


def group_ranks(summaries: Sequence[RankSummary]) -> tuple[RankGroup, ...]:
    """Return the ranks by pipeline stage; empty where stages are unknown, or where there is only one.

    A job that does not name the stage of every readable rank has no groups.
    """
    members: dict[int, list[RankSummary]] = {}
    names = {name for summary in summaries for name in summary.coordinates}
    dimension = next((name for name in PIPELINE_DIMENSIONS if name in names), None)
    readable = [summary for summary in summaries if summary.finished is not None]
    if dimension is None or any(dimension not in summary.coordinates for summary in readable):
        return ()
    for summary in readable:
        members.setdefault(summary.coordinates[dimension], []).append(summary)
    if len(members) < 2:
        return ()
    return tuple(_describe_group(dimension, index, members[index]) for index in sorted(members))


def _describe_group(dimension: str, index: int, members: Sequence[RankSummary]) -> RankGroup:
    peaks = {summary.rank: summary.peak_bytes for summary in members if summary.peak_bytes is not None}
    highest = max(peaks, key=lambda rank: peaks[rank], default=None)
    return RankGroup(
        dimension,
        index,
        tuple(summary.rank for summary in members),
        median_peak_bytes=round(float(np.median([*peaks.values()]))) if peaks else None,
        lowest_peak_bytes=min(peaks.values(), default=None),
        highest_peak_bytes=None if highest is None else peaks[highest],
        highest_rank=highest,
    )


def describe_outliers(outliers: Sequence[RankOutlier]) -> dict[int, str]:
    """Return in words how each outlier differs from its peers, the largest deviation first.

    Of each rank at most ``MAX_MEASURES`` measures are named, those with the largest deviations in bytes first.
    """
    of_rank: dict[int, list[RankOutlier]] = {}
    for outlier in outliers:
        of_rank.setdefault(outlier.rank, []).append(outlier)
    sentences: dict[int, str] = {}
    for rank, measures in of_rank.items():
        measures.sort(key=lambda outlier: 0 if outlier.measure == "compute" else -abs(outlier.value - outlier.median))
        peers = "median rank" if measures[0].peers is None else f"median rank of {measures[0].peers}"
        named = ", ".join(outlier.describe() for outlier in measures[:MAX_MEASURES])
        sentences[rank] = f"{named} of the {peers}"
    return sentences


def find_outliers(summaries: Sequence[RankSummary], groups: Sequence[RankGroup] = ()) -> tuple[RankOutlier, ...]:
    """Return the ranks that differ from the median of their peers, the largest deviation first.

    An outlier deviates by more than ``MIN_DEVIATION`` of the median and by ``OUTLIER_DEVIATIONS`` robust standard
    deviations. Groups with fewer than ``MIN_RANKS`` ranks have none.

    Args:
        summaries: all ranks.
        groups: the peers; empty: all ranks are peers.
    """
    outliers: list[tuple[float, RankOutlier]] = []
    if groups:
        by_rank = {summary.rank: summary for summary in summaries}
        for group in groups:
            outliers += _outliers_among([by_rank[rank] for rank in group.ranks], group.label)
    else:
        outliers += _outliers_among(summaries, None)
    outliers.sort(key=lambda outlier: (-outlier[0], outlier[1].rank))
    return tuple(outlier for _, outlier in outliers)


def _outliers_among(summaries: Sequence[RankSummary], peers: str | None) -> Iterator[tuple[float, RankOutlier]]:
    """Yield the outliers of one group with their deviations as shares of the median."""
    for measure, values in _measures(summaries):
        numbers = np.array(list(values.values()), np.float64)
        median = float(np.median(numbers))
        distance = np.abs(numbers - median)
        spread = _DEVIATIONS_PER_MAD * float(np.median(distance))
        largest = max(OUTLIER_DEVIATIONS * spread, MIN_DEVIATION * median)
        ranks = list(values)
        for place in np.flatnonzero(distance > largest).tolist():
            share = distance[place] / median if median else np.inf
            yield share, RankOutlier(ranks[place], measure, values[ranks[place]], round(median), peers)


def _measures(summaries: Sequence[RankSummary]) -> Iterator[tuple[str, Mapping[int, int]]]:
    """Yield the measures that enough ranks have, with the value of each rank."""
    known = [summary for summary in summaries if summary.peak_bytes is not None]
    categories = dict.fromkeys(name for summary in known for name in summary.bytes_by_category)
    columns: dict[str, dict[int, int | None]] = {
        "peak": {summary.rank: summary.peak_bytes for summary in known},
        "end": {summary.rank: summary.end_bytes for summary in known},
        "compute": {summary.rank: summary.compute_ns for summary in known},
        **{name: {summary.rank: summary.bytes_by_category.get(name, 0) for summary in known} for name in categories},
    }
    for measure, column in columns.items():
        values = {rank: value for rank, value in column.items() if value is not None}
        if len(values) >= MIN_RANKS:
            yield measure, values
