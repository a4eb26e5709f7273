"""Ranks: one file holds one rank, and several files are the ranks of one job."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Final

from memtrace.errors import TraceError
from memtrace.format.manifest import Manifest
from memtrace.format.storage import AnyPath, StorageError, to_path
from memtrace.readers.isolated import read_files, read_isolated
from memtrace.readers.limits import ReadLimits, count_processes
from memtrace.readers.pickle_scanner import find_scanner
from memtrace.readers.rank import ReadRank
from memtrace.readers.tables import clean

_RANK_IN_NAME: Final = re.compile(r"rank[-_=]?(\d{1,6})", re.IGNORECASE)
_NUMBER: Final = re.compile(r"(\d+)")
_PICKLE_MAGIC: Final = b"\x80"


def read(
    path: str | AnyPath,
    *,
    limits: ReadLimits | None = None,
    work_during_read: Callable[[], object] | None = None,
) -> list[ReadRank]:
    """Read each rank in a file of another tool.

    Args:
        path: the file, or its URL in a storage, from which it is downloaded.
        limits: limits on the process that reads the file; by default they follow from the size of the file.
        work_during_read: called once in this process. It runs while another process reads the file, where this process
            can be forked, and before the file is read elsewhere.

    Raises:
        TraceError: the file cannot be read, whatever it contains.
    """
    path = to_path(path)
    if isinstance(path, Path):
        _prepare_scanner([path])
        return read_isolated(path, limits, work_during_read)
    try:
        with path.downloaded() as local:
            try:
                return read_isolated(local, limits, work_during_read)
            except TraceError as error:
                raise TraceError(str(error).replace(str(local), str(path))) from None
    except FileNotFoundError:
        raise TraceError(f"{path}: the file does not exist. Check the URL.") from None
    except OSError as error:
        raise TraceError(str(error) if isinstance(error, StorageError) else f"{path}: {error}.") from error


def read_each(
    paths: Sequence[AnyPath],
    *,
    num_processes: int | None = None,
    work_during_read: Callable[[], object] | None = None,
) -> Iterator[list[ReadRank] | TraceError]:
    """Yield the ranks in each file of another tool, in the order of the files, or why the file cannot be read.

    Args:
        paths: the files.
        num_processes: number of files that are read at the same time, each in a process of its own; None: as many as
            the machine has cores and memory for.
        work_during_read: called once in this process, while others read where this process can be forked.
    """
    local_paths = [path for path in paths if isinstance(path, Path)]
    sizes = [path.stat().st_size if path.is_file() else 0 for path in local_paths]
    _prepare_scanner(local_paths)
    num_processes = min(num_processes or count_processes(max(sizes, default=0)), max(len(local_paths), 1))
    local_answers = read_files(local_paths, num_processes, work_during_read)
    for path in paths:
        if isinstance(path, Path):
            yield next(local_answers)
            continue
        try:
            yield read(path)
        except TraceError as error:
            yield error


def _prepare_scanner(paths: Sequence[Path]) -> None:
    """Load the scanner before the processes start, so that they share it; build it if that is worth its time."""
    find_scanner(sum(map(_pickle_bytes, paths)))


def _pickle_bytes(path: Path) -> int:
    """Return the size of a file if it is a pickle, otherwise 0."""
    try:
        if not path.is_file():
            return 0
        with path.open("rb") as file:
            return path.stat().st_size if file.read(1) == _PICKLE_MAGIC else 0
    except OSError:
        return 0  # the process that reads the file reports it


def read_job(paths: Sequence[str | AnyPath]) -> list[ReadRank]:
    """Read the files of one job and number its ranks (see ``number_ranks``).

    Returns:
        The ranks in ascending order.

    Raises:
        TraceError: a file cannot be read, or two files belong to the same rank.
    """
    files = [to_path(path) for path in paths]
    ranks = []
    for path, answer in zip(files, read_each(files), strict=True):
        if isinstance(answer, TraceError):
            raise answer
        ranks += [(path, rank) for rank in answer]
    manifests = number_ranks([(path, rank.manifest) for path, rank in ranks])
    numbered = [replace(rank, manifest=manifest) for (_, rank), manifest in zip(ranks, manifests, strict=True)]
    return sorted(numbered, key=lambda rank: rank.manifest.rank)


def number_ranks(sources: Sequence[tuple[AnyPath, Manifest]]) -> list[Manifest]:
    """Return the manifests of a job with the rank of each.

    The rank that a file or trace states itself is kept. The others get the rank in their file names: the number behind
    ``rank`` (torchtitan's ``rank3_memory_snapshot.pickle``, Megatron's ``oom_rank-3_snapshot.pickle``), or else the
    number in which the names differ, if it counts the files from 0. If that leaves two with the same rank, they get the
    free numbers in the order in which they were given.

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
    assigned = _ranks_in_names({index: sources[index][0].name for index in others})
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


def _ranks_in_names(names: Mapping[int, str]) -> dict[int, int]:
    """Return the ranks in file names; names without one are left out."""
    ranks = {index: int(found[-1]) for index, name in names.items() if (found := _RANK_IN_NAME.findall(name))}
    if ranks or not names:
        return ranks
    split = {index: _NUMBER.split(name) for index, name in names.items()}
    if len({tuple(parts[::2]) for parts in split.values()}) > 1:
        return {}
    for numbers in reversed(list(zip(*(parts[1::2] for parts in split.values()), strict=True))):
        if sorted(map(int, numbers)) == list(range(len(names))):
            return dict(zip(names, map(int, numbers), strict=True))
    return {}


def _stated_rank(manifest: Manifest) -> int | None:
    """Return the rank of a manifest; None for the rank 0 of a process that was not part of a job."""
    return manifest.rank if manifest.rank_is_known or manifest.world_size > 1 else None
