"""The formats that a trace can be exported to, and how a file of one is written: whole or not at all."""

from __future__ import annotations

import gzip
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final, cast

from memtrace.errors import MemtraceError
from memtrace.exporters.chrome import write_chrome_trace
from memtrace.exporters.csv_tables import CSV_TABLES, write_csv_tables
from memtrace.exporters.options import FORMATS, MEASURES
from memtrace.exporters.perfetto import write_perfetto
from memtrace.exporters.pprof import write_pprof
from memtrace.exporters.snapshot import write_snapshot
from memtrace.exporters.speedscope import write_speedscope
from memtrace.format.schema import NO_BLOCKS
from memtrace.format.storage import AnyPath, to_path
from memtrace.format.storage_writer import local_output
from memtrace.trace import Trace

_GZIP_LEVEL: Final = 4
"""Twice as quick as the default level, and the files are hardly larger."""


@dataclass(frozen=True)
class FileFormat:
    """A format that is written to one file."""

    write: Callable[[Trace, IO[bytes], Sequence[str]], None]
    """Writes a trace; the measures matter only to STACK_FORMATS."""
    can_compress: bool = False
    """Whether its readers open the file with gzip compression."""
    comfortable_bytes: int | None = None
    """Size up to which a browser opens the file; None: files are small."""


def _all_measures(write: Callable[[Trace, IO[bytes]], None]) -> Callable[[Trace, IO[bytes], Sequence[str]], None]:
    return lambda trace, file, _: write(trace, file)


FILE_FORMATS: Final = {
    "perfetto": FileFormat(_all_measures(write_perfetto), can_compress=True, comfortable_bytes=512 << 20),
    "pprof": FileFormat(write_pprof),
    "speedscope": FileFormat(write_speedscope, can_compress=True),
    "snapshot": FileFormat(_all_measures(write_snapshot), comfortable_bytes=256 << 20),
    "chrome": FileFormat(_all_measures(write_chrome_trace), can_compress=True, comfortable_bytes=256 << 20),
}
"""The members of FORMATS that are files; ``csv`` is a folder."""


def export_trace(
    trace: Trace, output: str | AnyPath, *, format: str, measures: Sequence[str] = MEASURES, overwrite: bool = False
) -> AnyPath:
    """Write a trace in a format that other tools read.

    Args:
        trace: the trace; of one rank, except for Perfetto.
        output: file to write, or folder for ``csv``; a path, or a URL in a storage. A name that ends in ``.gz`` is
            written compressed.
        format: one of ``FORMATS``.
        measures: for ``pprof`` and ``speedscope``, which of ``peak``, ``allocations`` and ``churn`` to write.
        overwrite: replace the file, or the CSV tables in the folder.

    Returns:
        The path of the file or folder.

    Raises:
        MemtraceError: the trace holds totals only, the output exists already, or the output cannot be written.
        ValueError: an unknown format or measure.
    """
    if format not in FORMATS:
        raise ValueError(f"unknown format {format!r}; the formats are {', '.join(FORMATS)}")
    if not measures or set(measures) - set(MEASURES):
        raise ValueError(f"measures must be some of {', '.join(MEASURES)}")
    for rank in trace.ranks:
        if not trace.rank(rank).has_blocks:
            raise MemtraceError(f"{trace.path or 'The trace'} cannot be exported: {NO_BLOCKS}.")
    chosen = FILE_FORMATS.get(format)
    try:
        with local_output(output, overwrite=overwrite) as target:
            if chosen is None:
                _write_folder(trace, target, overwrite=overwrite)
            else:
                _write_file(chosen, trace, target, measures, overwrite=overwrite)
    except OSError as error:
        raise MemtraceError(f"{output} cannot be written: {error.strerror or error}.") from error
    return to_path(output)


def _write_file(chosen: FileFormat, trace: Trace, target: Path, measures: Sequence[str], *, overwrite: bool) -> None:
    if os.path.lexists(target):
        if not target.is_file():
            raise MemtraceError(f"{target} exists already and is not a file. Choose another name with -o.")
        if not overwrite:
            raise MemtraceError(_exists(target))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    try:
        with temporary.open("wb") as file:
            if target.suffix == ".gz" and chosen.can_compress:
                with gzip.GzipFile("", "wb", _GZIP_LEVEL, file, mtime=0) as compressed:
                    chosen.write(trace, cast("IO[bytes]", compressed), measures)
            else:
                chosen.write(trace, file, measures)
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _write_folder(trace: Trace, folder: Path, *, overwrite: bool) -> None:
    if os.path.lexists(folder):
        if not folder.is_dir():
            raise MemtraceError(f"{folder} exists already and is not a folder. Choose another name with -o.")
        if not overwrite and any(folder.iterdir()):
            raise MemtraceError(_exists(folder))
    folder.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".export-", dir=folder))
    try:
        write_csv_tables(trace, temporary)
        for name in CSV_TABLES:
            (temporary / name).replace(folder / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _exists(target: Path) -> str:
    return f"{target} exists already. Choose another name with -o, or pass --overwrite to replace it."
