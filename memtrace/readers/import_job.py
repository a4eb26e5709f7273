"""Writes the ranks that were read from files of other tools as a trace folder, whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from memtrace.errors import TraceError
from memtrace.format.decode import decode_columns
from memtrace.format.manifest import write_manifest
from memtrace.format.schema import EVENT_KINDS, MANIFEST_NAME
from memtrace.format.split import write_parts
from memtrace.format.storage import AnyPath
from memtrace.format.storage_writer import local_output
from memtrace.readers.rank import ReadRank


def write_trace(ranks: Sequence[ReadRank], output: AnyPath, *, overwrite: bool = False) -> None:
    """Write the ranks of a job to a folder (``rank=N/manifest.json`` and Parquet parts).

    The folder appears under its name only once it is whole.

    Args:
        ranks: manifest and tables of each rank, as ``memtrace.readers.read_job`` returns them.
        output: the trace to write: a folder, or a URL in a storage.
        overwrite: replace the trace that is there; in a storage, no trace is replaced.

    Raises:
        TraceError: something is there already and is not to be replaced, or the disk does not take the files.
    """
    with local_output(output, overwrite=False) as folder:
        _write_folder(ranks, folder, overwrite=overwrite)


def _write_folder(ranks: Sequence[ReadRank], folder: Path, *, overwrite: bool) -> None:
    _check_replaceable(folder, overwrite=overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
            new = Path(temporary) / "new"
            for rank in ranks:
                _write_rank(rank, new / f"rank={rank.manifest.rank}")
            _move_into_place(new, folder, Path(temporary) / "old")
    except OSError as error:
        raise TraceError(f"{folder} cannot be written: {error.strerror or error}.") from error


def _check_replaceable(folder: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise TraceError(f"{folder} exists already. Choose another name with -o, or pass --overwrite to replace it.")
    is_trace = folder.is_dir() and not folder.is_symlink() and any(folder.glob(f"rank=*/{MANIFEST_NAME}"))
    if not is_trace:
        raise TraceError(
            f"{folder} exists already and is not a memtrace trace, so it is not overwritten. Choose another name."
        )


def _move_into_place(new: Path, folder: Path, aside: Path) -> None:
    """Rename ``new`` to ``folder``; the old folder goes ``aside``, or back to its place if that fails."""
    if not folder.exists():
        new.rename(folder)
        return
    folder.rename(aside)
    try:
        new.rename(folder)
    except OSError:
        aside.rename(folder)
        raise


def _write_rank(rank: ReadRank, folder: Path) -> None:
    folder.mkdir(parents=True)
    kinds = decode_columns("events", [rank.tables["events"]], ("kind",), ())["kind"]
    has_accesses = bool(np.isin(kinds, (EVENT_KINDS.index("read"), EVENT_KINDS.index("write"))).any())
    parts = write_parts(rank.tables, folder)
    coverage = replace(rank.manifest.coverage, has_accesses=has_accesses)
    write_manifest(folder, replace(rank.manifest, coverage=coverage, num_events=len(kinds), parts=parts))
