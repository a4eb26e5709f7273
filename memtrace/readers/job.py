"""One file is one rank, several files are the ranks of one job."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from memtrace.errors import TraceError
from memtrace.readers.isolated import read_isolated
from memtrace.readers.limits import Limits
from memtrace.readers.tables import clean

if TYPE_CHECKING:
    import pyarrow as pa

    from memtrace.format.manifest import Manifest

    Rank = tuple[Manifest, dict[str, pa.Table]]

_NAMED_RANK = re.compile(r"rank[-_=]?(\d{1,6})", re.IGNORECASE)


def read(
    path: str | Path, *, limits: Limits | None = None, work_during_read: Callable[[], None] | None = None
) -> list[Rank]:
    """The manifest and the tables of each rank in a foreign file, in the shape of ``memtrace.format.schema``.

    The file is read in a process of its own, within ``limits`` (by default by its size). Raises TraceError with one
    sentence where it cannot be read, whatever is in it.
    """
    return read_isolated(Path(path), limits, work_during_read)


def read_job(paths: Sequence[str | Path]) -> list[Rank]:
    """The ranks in several files of one job, in order of rank, numbered by ``number_ranks``."""
    found = [(Path(path), rank) for path in paths for rank in read(path)]
    manifests = number_ranks([(path, manifest) for path, (manifest, _) in found])
    ranks = [(manifest, tables) for manifest, (_, (_, tables)) in zip(manifests, found, strict=True)]
    return sorted(ranks, key=lambda rank: rank[0].rank)


def number_ranks(found: Sequence[tuple[Path, Manifest]]) -> list[Manifest]:
    """The manifests with their ranks in the job that all of them together are; paths say where they are from.

    A rank is what the file or the trace says itself. The others have what their names say (``rank3``), or where that
    does not tell them apart the numbers that are left, in their order here. TraceError where two say the same.
    """
    if not found:
        raise TraceError("No file was given to read.")
    told = {place: rank for place, (_, manifest) in enumerate(found) if (rank := _own(manifest)) is not None}
    if twice := [rank for rank, times in Counter(told.values()).items() if times > 1]:
        files = " and ".join(found[place][0].name for place, rank in told.items() if rank == twice[0])
        raise TraceError(f"{files} are both of rank {twice[0]}: give the files of one job, one a rank.")
    said = set(told)
    silent = [place for place in range(len(found)) if place not in said]
    named = {place: int(hits[-1]) for place in silent if (hits := _NAMED_RANK.findall(found[place][0].name))}
    how = "by its name"
    if len({*told.values(), *named.values()}) < len(found):
        free = (number for number in count() if number not in told.values())
        named = dict(zip(silent, free, strict=False))
        how = "by the order in which the files were given"
    told |= named
    manifests = []
    for place, (path, manifest) in enumerate(found):
        world_size = max(len(found), max(told.values()) + 1, manifest.world_size)
        numbered = replace(manifest, rank=told[place], world_size=world_size)
        if len(found) > 1:
            numbered = numbered.with_notes(
                f"rank {told[place]} is {clean(path.name)}, {'as it says' if place in said else how}"
            )
        manifests.append(numbered)
    return manifests


def _own(manifest: Manifest) -> int | None:
    """The rank of a manifest; None where it is only what a process without a job calls itself."""
    return manifest.rank if manifest.world_size > 1 or manifest.rank_is_known else None
