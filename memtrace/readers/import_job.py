"""Keeps what was read from foreign files as a trace folder, whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from memtrace.errors import TraceError
from memtrace.format.schema import MANIFEST_NAME

if TYPE_CHECKING:
    import pyarrow as pa

    from memtrace.readers.rank import ReadRank

# Columns that grow by small steps; the others repeat, and are encoded by dictionary.
_RISING: Final = {"time_ns", "block_id", "op_id", "start_ns", "id", "address"}
_PLAIN: Final = {"frames", "recompute", "small", "expandable"}


def keep(ranks: Sequence[ReadRank], folder: Path, *, overwrite: bool = False) -> None:
    """Write the ranks of a job to ``folder`` (``rank=N/manifest.json`` and Parquet parts).

    It appears under its name only once it is whole. What is there already is left alone: TraceError, unless
    ``overwrite`` is given and it is a trace. TraceError too where the disk does not take it.
    """
    _may_replace(folder, overwrite=overwrite)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as place:
            new = Path(place) / "new"
            for rank in ranks:
                _write_rank(rank.manifest, rank.tables, new / f"rank={rank.manifest['rank']}")
            _put(new, folder, Path(place) / "old")
    except OSError as error:
        raise TraceError(f"{folder} cannot be written: {error.strerror or error}.") from error


def _may_replace(folder: Path, *, overwrite: bool) -> None:
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise TraceError(f"{folder} exists already. Choose another name with -o, or give --overwrite to replace it.")
    is_trace = folder.is_dir() and not folder.is_symlink() and any(folder.glob(f"rank=*/{MANIFEST_NAME}"))
    if not is_trace:
        raise TraceError(
            f"{folder} exists already and is no memtrace trace, so it is not overwritten. Choose another name."
        )


def _put(new: Path, folder: Path, aside: Path) -> None:
    """Give ``new`` its name; what bore it goes ``aside``, or back where it was if that fails."""
    if not folder.exists():
        new.rename(folder)
        return
    folder.rename(aside)
    try:
        new.rename(folder)
    except OSError:
        aside.rename(folder)
        raise


def _write_rank(manifest: dict[str, Any], tables: dict[str, pa.Table], folder: Path) -> None:
    folder.mkdir(parents=True)
    parts = {}
    for name, table in tables.items():
        if table.num_rows:
            _write_part(table, folder / f"{name}-00000.parquet")
            parts[name] = 1
    (folder / MANIFEST_NAME).write_text(
        json.dumps(manifest | {"parts": parts}, indent=1, sort_keys=True), encoding="utf-8"
    )


def _write_part(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    rising = [name for name in table.column_names if name in _RISING]
    pq.write_table(
        table,
        path,
        compression="zstd",
        write_statistics=False,
        use_dictionary=[name for name in table.column_names if name not in _RISING | _PLAIN],
        column_encoding=dict.fromkeys(rising, "DELTA_BINARY_PACKED"),
    )
