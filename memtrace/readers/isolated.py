"""Reads a foreign file in a process of its own.

What a file holds can cost memory, time or the process itself, and neither an unpickler nor a JSON parser can bound
that. So a child process reads it under limits of the operating system and leaves Arrow files behind; whatever happens
to the child ends as one sentence here. It also keeps the millions of small objects of a snapshot out of this process.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from memtrace.errors import MemtraceError, TraceError
from memtrace.interpreter import run_python
from memtrace.readers.limits import GIB, MIB, Limits

if TYPE_CHECKING:
    import pyarrow as pa

    from memtrace.format.manifest import Manifest

    Rank = tuple[Manifest, dict[str, pa.Table]]

_FAULT: Final = "fault.txt"
_RANKS: Final = "ranks.json"
# What a reader holds is left to the end of the process: freeing a million small objects takes a third of a second.
_UNFREED: Final[list[object]] = []
_LEAVING: Final[list[int]] = []


def read_isolated(
    path: Path, limits: Limits | None = None, work_during_read: Callable[[], None] | None = None
) -> list[Rank]:
    """The ranks in a foreign file, read by a child process within ``limits`` (by default by the file's size).

    Raises TraceError with one sentence whatever the file does to the child.
    """
    from memtrace.readers.content import Content

    bounds = limits or Limits.for_size(Content.of(path).size)
    with tempfile.TemporaryDirectory(prefix="memtrace-", ignore_cleanup_errors=True) as folder:
        fork = partial(_fork, work_during_read=work_during_read)
        status = fork(path, Path(folder), bounds) if _may_fork() else _spawn(path, Path(folder), bounds)
        return _collect(path, Path(folder), bounds, status)


def _may_fork() -> bool:
    """Forking is quick, but only safe where no other thread holds a lock and no GPU is in use."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


def _fork(path: Path, folder: Path, limits: Limits, work_during_read: Callable[[], None] | None) -> int:
    """Read in a fork of this process; its exit status, negative for a signal."""
    # Both need it: imported once, before there are two.
    import pyarrow  # noqa: F401

    _reap()
    done, tell = os.pipe()
    with warnings.catch_warnings():
        # Threads of numpy's and Arrow's pools are not ours, and both survive a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            _be_silent()
            status = _work(path, folder, limits)
            os.write(tell, bytes([status]))
        finally:
            # Not sys.exit: neither handlers of the parent nor a million frees are wanted.
            os._exit(status)
    os.close(tell)
    try:
        with os.fdopen(done, "rb") as answer:
            if work_during_read is not None:
                work_during_read()
            told = answer.read(1)
        if told:
            # Its memory goes back on another core meanwhile.
            _LEAVING.append(child)
            return told[0]
        _, waited = os.waitpid(child, 0)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return os.waitstatus_to_exitcode(waited)


def _reap() -> None:
    """Take leave of children that have ended since."""
    _LEAVING[:] = [child for child in _LEAVING if not _has_ended(child)]


def _has_ended(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True  # the program around us waits for its children, and took this for one


def _be_silent() -> None:
    """Whatever a hostile file makes the interpreter print goes nowhere: what there is to say is said by the parent."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _spawn(path: Path, folder: Path, limits: Limits) -> int:
    """Read in a new interpreter; its exit status, negative for a signal."""
    request = json.dumps([str(path), str(folder), limits.memory_bytes, limits.cpu_seconds])
    return run_python("from memtrace.readers import isolated; isolated.main()", request, silent=True)


def _work(path: Path, folder: Path, limits: Limits) -> int:
    """The child: read, and leave the tables or a sentence in ``folder``; the exit status."""
    try:
        fault = _read_into(path, folder, limits)
    except MemoryError:
        fault = _memory_sentence(path, limits)
    if fault is None:
        return 0
    (folder / _FAULT).write_text(fault, encoding="utf-8", errors="replace")
    return 2


def _read_into(path: Path, folder: Path, limits: Limits) -> str | None:
    """Read ``path`` into Arrow files in ``folder``; the fault as a sentence, None where there is none."""
    # Libraries first: the bounds are for the file, and a library that does not fit is no fault of it.
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401

    from memtrace.readers.content import Content
    from memtrace.readers.registry import reader_for

    # A snapshot is millions of objects without cycles: collecting doubles the time it takes to read.
    gc.disable()
    limits.impose()
    try:
        content = Content.of(path)
        reader = reader_for(content)
        _UNFREED.append(reader)
        _leave(reader.read(content), folder)
    except MemtraceError as error:
        return str(error)
    except RecursionError:
        return f"{path} is nested deeper than any trace: refused."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}."
    except MemoryError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{path} could not be read: {type(error).__name__} in {Path(place.filename).name}:{place.lineno}. This "
            "is a "
            "fault of memtrace's reader: please report it with the file."
        )
    return None


def _leave(ranks: list[Rank], folder: Path) -> None:
    """Write each table as an Arrow file, and what there is as JSON."""
    import pyarrow as pa

    listing = []
    for number, (manifest, tables) in enumerate(ranks):
        for name, whole in tables.items():
            # A column without a value is not worth writing: see _whole.
            told = [field for field, column in zip(whole.column_names, whole.columns, strict=True) if _tells(column)]
            table = whole.select(told)
            with (
                pa.OSFile(str(folder / f"{number}-{name}.arrow"), "wb") as sink,
                pa.ipc.new_file(sink, table.schema) as out,
            ):
                out.write_table(table)
        listing.append({"manifest": manifest.to_json(), "tables": list(tables)})
    (folder / _RANKS).write_text(json.dumps(listing), encoding="utf-8")


def _tells(column: pa.ChunkedArray) -> bool:
    return not len(column) or bool(column.null_count < len(column))


def _collect(path: Path, folder: Path, limits: Limits, status: int) -> list[Rank]:
    """What the child left, mapped into memory; TraceError where it left a sentence or nothing."""
    if (folder / _FAULT).exists():
        raise TraceError((folder / _FAULT).read_text(encoding="utf-8"))
    if status != 0 or not (folder / _RANKS).exists():
        raise TraceError(_death_sentence(path, limits, status))
    import pyarrow as pa

    from memtrace.format.manifest import parse_manifest

    ranks: list[Rank] = []
    for number, entry in enumerate(json.loads((folder / _RANKS).read_text(encoding="utf-8"))):
        tables = {}
        for name in entry["tables"]:
            # The mapping outlives the file's name.
            with pa.memory_map(str(folder / f"{number}-{name}.arrow")) as source:
                tables[name] = _whole(name, pa.ipc.open_file(source).read_all())
        ranks.append((parse_manifest(entry["manifest"], str(path)), tables))
    return ranks


def _whole(name: str, told: pa.Table) -> pa.Table:
    """A table with the columns that were left out: memory that nobody writes to costs nothing."""
    import pyarrow as pa

    from memtrace.format.schema import arrow_schema

    schema = arrow_schema(name)
    present = set(told.column_names)
    columns = [
        told.column(field.name) if field.name in present else pa.nulls(told.num_rows, field.type) for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _memory_sentence(path: Path, limits: Limits) -> str:
    size = limits.memory_bytes
    amount = f"{size / GIB:.1f} GiB" if size >= GIB else f"{size // MIB} MiB"
    return (
        f"{path} takes more than {amount} of memory to read, which is too much for a file of its size or for this "
        "machine: refused as hostile or damaged, or read it where more memory is free."
    )


def _death_sentence(path: Path, limits: Limits, status: int) -> str:
    if sys.platform != "win32" and status == -signal.SIGXCPU:
        return (
            f"{path} takes more than {limits.cpu_seconds} s to read, which no trace of its size does: refused as "
            "hostile."
        )
    if sys.platform != "win32" and status in (-signal.SIGKILL, -signal.SIGABRT):
        return _memory_sentence(path, limits)
    return f"{path} could not be read: the process that read it ended with status {status}. It is damaged or hostile."


def main() -> None:
    """The new interpreter's whole work: the request is its argument."""
    path, folder, memory_bytes, cpu_seconds = json.loads(sys.argv[1])
    sys.exit(_work(Path(path), Path(folder), Limits(memory_bytes, cpu_seconds)))
