"""Reads a file of another tool in a separate process.

The content of a file can exhaust memory, take unlimited time or crash the process, and neither an unpickler nor a JSON
parser can prevent that. A child process therefore reads the file under limits of the operating system and writes Arrow
files; whatever happens to the child becomes one error message in this process. The millions of small objects of a
snapshot also stay out of this process.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from memtrace.errors import MemtraceError, TraceError
from memtrace.interpreter import run_python
from memtrace.readers.limits import ReadLimits
from memtrace.readers.rank import ReadRank
from memtrace.units import format_bytes

if TYPE_CHECKING:
    import pyarrow as pa

_ERROR_FILE: Final = "error.txt"
_RANKS_FILE: Final = "ranks.json"
_STATUS_READ: Final = 0
_STATUS_ERROR: Final = 2
# References that keep what a reader holds alive until the child exits: freeing a million small objects takes a third
# of a second.
_KEPT_ALIVE: Final[list[object]] = []
# Children that have reported their status and are still exiting.
_EXITING_CHILDREN: Final[list[int]] = []


def read_isolated(
    path: Path, limits: ReadLimits | None = None, work_during_read: Callable[[], object] | None = None
) -> list[ReadRank]:
    """Read each rank in a file in a child process. See ``memtrace.readers.read`` for the arguments.

    Raises:
        TraceError: the file cannot be read, whatever it does to the child.
    """
    from memtrace.readers.content import Content

    limits = limits or ReadLimits.for_file_size(Content.of(path).size_bytes)
    if _can_fork():
        reading = ForkedRead(path, limits)
        try:
            if work_during_read is not None:
                work_during_read()
        except BaseException:
            reading.kill()
            raise
        return reading.collect()
    if work_during_read is not None:
        work_during_read()
    with _temporary_folder() as folder_name:
        folder = Path(folder_name)
        return _collect_ranks(path, folder, limits, _read_in_new_interpreter(path, folder, limits))


def read_files(
    paths: Sequence[Path], num_processes: int, work_during_read: Callable[[], object] | None = None
) -> Iterator[list[ReadRank] | TraceError]:
    """Yield the ranks in each file, in the order of the files, or why the file cannot be read.

    Args:
        paths: the files.
        num_processes: number of files that are read at the same time.
        work_during_read: called once in this process while others read.
    """
    if not _can_fork():
        if work_during_read is not None:
            work_during_read()
        with ThreadPoolExecutor(num_processes) as pool:
            yield from pool.map(partial(_read_or_error, num_processes=num_processes), paths)
        return
    waiting = deque(enumerate(paths))
    running: dict[int, ForkedRead] = {}
    finished: dict[int, list[ReadRank] | TraceError] = {}
    try:
        for number in range(len(paths)):
            while number not in finished:
                while waiting and len(running) < num_processes:
                    index, path = waiting.popleft()
                    try:
                        limits = ReadLimits.for_file_size(_content_bytes(path), num_processes)
                        running[index] = ForkedRead(path, limits)
                    except TraceError as error:
                        finished[index] = error
                if work_during_read is not None:
                    work_during_read()
                    work_during_read = None
                for index in _wait_for_one(running):
                    finished[index] = _collect_or_error(running.pop(index))
            yield finished.pop(number)
    finally:
        for reading in running.values():
            reading.kill()


def _wait_for_one(running: Mapping[int, ForkedRead]) -> list[int]:
    """Return which children have ended or reported; waits for one of them."""
    with selectors.DefaultSelector() as selector:
        for index, reading in running.items():
            selector.register(reading.status_pipe, selectors.EVENT_READ, index)
        return [key.data for key, _ in selector.select()] if running else []


def _collect_or_error(reading: ForkedRead) -> list[ReadRank] | TraceError:
    try:
        return reading.collect()
    except TraceError as error:
        return error


def _read_or_error(path: Path, num_processes: int) -> list[ReadRank] | TraceError:
    try:
        return read_isolated(path, ReadLimits.for_file_size(_content_bytes(path), num_processes))
    except TraceError as error:
        return error


def _content_bytes(path: Path) -> int:
    from memtrace.readers.content import Content

    return Content.of(path).size_bytes


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="memtrace-", ignore_cleanup_errors=True)


def _can_fork() -> bool:
    """Forking is fast, but it is safe only if no other thread can hold a lock and no GPU is in use."""
    if sys.platform != "linux" or threading.active_count() > 1:
        return False
    torch = sys.modules.get("torch")
    return torch is None or not torch.cuda.is_initialized()


class ForkedRead:
    """A file that a fork of this process reads.

    Args:
        path: the file.
        limits: limits on the fork.
    """

    def __init__(self, path: Path, limits: ReadLimits) -> None:
        # Imported before the fork because both processes need it.
        import pyarrow  # noqa: F401

        _reap_children()
        self._path = path
        self._limits = limits
        self._folder = _temporary_folder()
        self.status_pipe, status_writer = os.pipe()
        with warnings.catch_warnings():
            # Python warns of forks beside other threads. Those of the thread pools of numpy and Arrow survive a fork.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child = os.fork()
        if self._child == 0:
            status = 1
            try:
                _silence_output()
                status = _read_and_save(path, Path(self._folder.name), limits)
                os.write(status_writer, bytes([status]))
            finally:
                # os._exit skips the exit handlers of the parent and the freeing of a million objects.
                os._exit(status)
        os.close(status_writer)

    def collect(self) -> list[ReadRank]:
        """Wait for the fork and return what it read.

        Raises:
            TraceError: the file cannot be read, whatever it does to the fork.
        """
        try:
            reported_status = os.read(self.status_pipe, 1)
            if reported_status:
                # The child gives its memory back on another core while this process goes on.
                _EXITING_CHILDREN.append(self._child)
                status = reported_status[0]
            else:
                _, wait_status = os.waitpid(self._child, 0)
                status = os.waitstatus_to_exitcode(wait_status)
        except BaseException:
            self.kill()
            raise
        os.close(self.status_pipe)
        with self._folder as folder:
            return _collect_ranks(self._path, Path(folder), self._limits, status)

    def kill(self) -> None:
        """End the fork and delete what it wrote."""
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        os.close(self.status_pipe)
        self._folder.cleanup()


def _reap_children() -> None:
    """Collect the exit status of children that have ended."""
    _EXITING_CHILDREN[:] = [child for child in _EXITING_CHILDREN if not _has_ended(child)]


def _has_ended(child: int) -> bool:
    try:
        return os.waitpid(child, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return True  # the program that uses memtrace waits for all its children and has reaped this one


def _silence_output() -> None:
    """Discard whatever a hostile file makes the interpreter print; the parent reports errors."""
    null_device = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_device, 1)
    os.dup2(null_device, 2)


def _read_in_new_interpreter(path: Path, folder: Path, limits: ReadLimits) -> int:
    """Read in a new interpreter.

    Returns:
        The exit status of the interpreter, negative for a signal.
    """
    request = json.dumps([str(path), str(folder), limits.memory_bytes, limits.cpu_seconds])
    return run_python("from memtrace.readers import isolated; isolated.main()", request, silent=True)


def main() -> None:
    """Read one file in a new interpreter; the request is its only command-line argument."""
    path, folder, memory_bytes, cpu_seconds = json.loads(sys.argv[1])
    sys.exit(_read_and_save(Path(path), Path(folder), ReadLimits(memory_bytes, cpu_seconds)))


def _read_and_save(path: Path, folder: Path, limits: ReadLimits) -> int:
    """In the child: read the file and leave either its tables or an error message in ``folder``.

    Returns:
        The exit status of the child.
    """
    try:
        error_message = _try_read(path, folder, limits)
    except MemoryError:
        error_message = _describe_memory_limit(path, limits)
    if error_message is None:
        return _STATUS_READ
    (folder / _ERROR_FILE).write_text(error_message, encoding="utf-8", errors="replace")
    return _STATUS_ERROR


def _try_read(path: Path, folder: Path, limits: ReadLimits) -> str | None:
    """Read a file into Arrow files in ``folder``; return an error message, or None on success."""
    # Libraries and readers are imported before the limits apply, because their size does not depend on the file.
    import numpy  # noqa: F401
    import pyarrow  # noqa: F401

    from memtrace.readers.content import Content
    from memtrace.readers.registry import find_reader

    # A snapshot is millions of objects without cycles; collecting garbage doubles the time that reading takes.
    gc.disable()
    try:
        content = Content.of(path)
        reader = find_reader(content)
        _KEPT_ALIVE.append(reader)
        limits.impose()
        _save_ranks(reader.read(content), folder)
    except MemtraceError as error:
        return str(error)
    except RecursionError:
        return f"{path}: nested too deeply to be a memory trace, so it was not read."
    except OSError as error:
        return f"{path}: cannot be read ({error.strerror or error})."
    except (MemoryError, SystemError):
        # Python's import system can report exhausted memory as a SystemError.
        raise MemoryError from None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return (
            f"{path}: could not be read because of a bug in memtrace ({type(error).__name__} in "
            f"{Path(frame.filename).name}:{frame.lineno}). Please report it and attach the file."
        )
    return None


def _save_ranks(ranks: Sequence[ReadRank], folder: Path) -> None:
    """Write each table as an Arrow file, and the manifests and the names of the tables as JSON."""
    import pyarrow as pa

    listing = []
    for index, rank in enumerate(ranks):
        for name, table in rank.tables.items():
            # Columns without values are left out; _restore_columns adds them again.
            fields = zip(table.column_names, table.columns, strict=True)
            table = table.select([field for field, column in fields if _has_values(column)])
            with (
                pa.OSFile(str(folder / f"{index}-{name}.arrow"), "wb") as sink,
                pa.ipc.new_file(sink, table.schema) as arrow_file,
            ):
                arrow_file.write_table(table)
        listing.append({"manifest": rank.manifest.to_json(), "tables": list(rank.tables)})
    (folder / _RANKS_FILE).write_text(json.dumps(listing), encoding="utf-8")


def _has_values(column: pa.ChunkedArray) -> bool:
    return not len(column) or bool(column.null_count < len(column))


def _collect_ranks(path: Path, folder: Path, limits: ReadLimits, status: int) -> list[ReadRank]:
    """Map what the child wrote into memory. Raises TraceError if the child wrote an error message or nothing."""
    if (folder / _ERROR_FILE).exists():
        raise TraceError((folder / _ERROR_FILE).read_text(encoding="utf-8"))
    if status != _STATUS_READ or not (folder / _RANKS_FILE).exists():
        raise TraceError(_describe_crash(path, limits, status))
    import pyarrow as pa

    from memtrace.format.manifest import parse_manifest

    ranks = []
    for index, entry in enumerate(json.loads((folder / _RANKS_FILE).read_text(encoding="utf-8"))):
        tables = {}
        for name in entry["tables"]:
            # The mapping stays valid when the folder is deleted.
            with pa.memory_map(str(folder / f"{index}-{name}.arrow")) as source:
                tables[name] = _restore_columns(name, pa.ipc.open_file(source).read_all())
        ranks.append(ReadRank(parse_manifest(entry["manifest"], str(path)), tables))
    return ranks


def _restore_columns(name: str, table: pa.Table) -> pa.Table:
    """Add the columns without values that ``_save_ranks`` left out; memory that nobody writes to costs nothing."""
    import pyarrow as pa

    from memtrace.format.schema import arrow_schema

    schema = arrow_schema(name)
    present = set(table.column_names)
    columns = [
        table.column(field.name) if field.name in present else pa.nulls(table.num_rows, field.type) for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _describe_memory_limit(path: Path, limits: ReadLimits) -> str:
    return (
        f"{path}: reading it takes more than {format_bytes(limits.memory_bytes)} of memory, which is too much for a "
        "file of its size or for this machine. The file is damaged or hostile; if you trust it, read it on a machine "
        "with more free memory."
    )


def _describe_crash(path: Path, limits: ReadLimits, status: int) -> str:
    if sys.platform != "win32" and status == -signal.SIGXCPU:
        return (
            f"{path}: reading it takes more than {limits.cpu_seconds} s, far longer than a memory trace of its size "
            "needs. The file is damaged or hostile; record it again."
        )
    if sys.platform != "win32" and status in (-signal.SIGKILL, -signal.SIGABRT):
        return _describe_memory_limit(path, limits)
    return (
        f"{path}: the process that read it ended with status {status}. The file is damaged or hostile; copy it or "
        "record it again."
    )
