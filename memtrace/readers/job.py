"""Ranks: one file holds one rank, and several files are the ranks of one job."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

from memtrace.errors import TraceError
from memtrace.format.manifest import Manifest
from memtrace.readers.isolated import read_isolated
from memtrace.readers.limits import ReadLimits
from memtrace.readers.rank import ReadRank
from memtrace.readers.tables import clean

_RANK_IN_NAME: Final = re.compile(r"rank[-_=]?(\d{1,6})", re.IGNORECASE)


def read(
    path: str | Path,
    *,
    limits: ReadLimits | None = None,
    work_during_read: Callable[[], None] | None = None,
) -> list[ReadRank]:
    """Read each rank in a file of another tool.

    Args:
        path: the file.
        limits: limits on the process that reads the file; by default they follow from the size of the file.
        work_during_read: called once in this process. It runs while another process reads the file, where this process
            can be forked, and before the file is read elsewhere.

    Raises:
        TraceError: the file cannot be read, whatever it contains.
    """
    return read_isolated(Path(path), limits, work_during_read)


def read_job(paths: Sequence[str | Path]) -> list[ReadRank]:
    """Read the files of one job and number its ranks (see ``number_ranks``).

    Returns:
        The ranks in ascending order.

    Raises:
        TraceError: a file cannot be read, or two files belong to the same rank.
    """
    ranks = [(Path(path), rank) for path in paths for rank in read(path)]
    manifests = number_ranks([(path, rank.manifest) for path, rank in ranks])
    numbered = [replace(rank, manifest=manifest) for (_, rank), manifest in zip(ranks, manifests, strict=True)]
    return sorted(numbered, key=lambda rank: rank.manifest.rank)


def number_ranks(sources: Sequence[tuple[Path, Manifest]]) -> list[Manifest]:
    """Return the manifests of a job with the rank of each.

    The rank that a file or trace states itself is kept. The others get the rank in their file names (``rank3``); if
    that leaves two with the same rank, they get the free numbers in the order in which they were given.

    Args:
        sources: the file and the manifest of each rank.

    Raises:
        TraceError: no file was given, or two files state the same rank.
    """
    if not sources:
        raise TraceError("No file was given. Give at least one file to read.")
    stated_ranks = ((index, _stated_rank(manifest)) for index, (_, manifest) in enumerate(sources))
    rank_of = {index: rank for index, rank in stated_ranks if rank is not None}
    if repeated := [rank for rank, times in Counter(rank_of.values()).items() if times > 1]:
        files = " and ".join(sources[index][0].name for index, rank in rank_of.items() if rank == repeated[0])
        raise TraceError(f"{files} are both of rank {repeated[0]}. Give the files of one job, one file per rank.")
    stated = set(rank_of)
    others = [index for index in range(len(sources)) if index not in stated]
    assigned = {index: int(ranks[-1]) for index in others if (ranks := _RANK_IN_NAME.findall(sources[index][0].name))}
    origin = "taken from the file name"
    if len({*rank_of.values(), *assigned.values()}) < len(sources):
        free_ranks = (number for number in count() if number not in rank_of.values())
        assigned = dict(zip(others, free_ranks, strict=False))
        origin = "taken from the order of the files"
    rank_of |= assigned
    manifests = []
    for index, (path, manifest) in enumerate(sources):
        world_size = max(len(sources), max(rank_of.values()) + 1, manifest.world_size)
        numbered = replace(manifest, rank=rank_of[index], world_size=world_size)
        if len(sources) > 1:
            rank_origin = "stated by the file" if index in stated else origin
            numbered = numbered.with_notes(f"Rank {rank_of[index]} is {clean(path.name)} (rank {rank_origin})")
        manifests.append(numbered)
    return manifests


def _stated_rank(manifest: Manifest) -> int | None:
    """Return the rank of a manifest; None for the rank 0 of a process that was not part of a job."""
    return manifest.rank if manifest.rank_is_known or manifest.world_size > 1 else None
