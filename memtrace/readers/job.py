"""One file is one rank, several files are the ranks of one job."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memtrace.errors import TraceError
from memtrace.readers.isolated import read_isolated
from memtrace.readers.limits import Limits

if TYPE_CHECKING:
    import pyarrow as pa

    Rank = tuple[dict[str, Any], dict[str, pa.Table]]

_NAMED_RANK = re.compile(r"rank[-_=]?(\d{1,6})", re.IGNORECASE)


def read(path: str | Path, *, limits: Limits | None = None) -> list[Rank]:
    """The manifest and the tables of each rank in a foreign file, in the shape of ``memtrace.schema``.

    The file is read in a process of its own, within ``limits`` (by default by its size). Raises TraceError with one
    sentence where it cannot be read, whatever is in it.
    """
    return read_isolated(Path(path), limits)


def read_job(paths: Sequence[str | Path]) -> list[Rank]:
    """The ranks in several files of one job, in order of rank, numbered by ``number_ranks``."""
    found = [(Path(path), rank) for path in paths for rank in read(path)]
    number_ranks([(path, manifest) for path, (manifest, _) in found])
    return sorted((rank for _, rank in found), key=lambda rank: int(rank[0]["rank"]))


def number_ranks(found: Sequence[tuple[Path, dict[str, Any]]]) -> None:
    """Give each manifest its rank in the job that all of them together are; paths say where they are from.

    A rank is what the file or the trace says itself; where not all say, what their names say (``rank3``); else their
    order here. TraceError where two say the same.
    """
    ranks, how = _numbers(found)
    for (path, manifest), number in zip(found, ranks, strict=True):
        manifest["rank"] = number
        manifest["world_size"] = max(len(found), max(ranks) + 1, int(manifest.get("world_size") or 1))
        if len(found) > 1:
            manifest.setdefault("coverage", {}).setdefault("notes", []).append(f"rank {number} is {path.name}, {how}")


def _says(manifest: Mapping[str, Any]) -> int | None:
    """The rank of a manifest; None where it is only what a process without a job calls itself."""
    knows = manifest.get("rank_told") or int(manifest.get("world_size") or 1) > 1
    return int(manifest["rank"]) if knows else None


def _numbers(found: Sequence[tuple[Path, dict[str, Any]]]) -> tuple[list[int], str]:
    """The ranks and how they were told."""
    if not found:
        raise TraceError("No file was given to read.")
    told = [_says(manifest) for _, manifest in found]
    sure = [number for number in told if number is not None]
    if len(sure) == len(found):
        if len(set(sure)) < len(sure):
            twice = next(number for number in sure if sure.count(number) > 1)
            files = " and ".join(path.name for (path, _), number in zip(found, sure, strict=True) if number == twice)
            raise TraceError(f"{files} are both of rank {twice}: give the files of one job, one a rank.")
        return sure, "as it says"
    named = [_NAMED_RANK.findall(path.name) for path, _ in found]
    numbers = [int(hits[-1]) for hits in named if hits]
    if len(numbers) == len(found) and len(set(numbers)) == len(numbers):
        return numbers, "by its name"
    return list(range(len(found))), "by the order in which the files were given"
