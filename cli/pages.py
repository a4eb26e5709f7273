"""What the commands that write a file for people to look at have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from memtrace.errors import MemtraceError
from memtrace.format.storage import StoragePath, to_path
from memtrace.format.storage_writer import check_writable_url


def check_output_folder(output: str) -> None:
    """Reject a path in a folder that does not exist, before any work is done.

    Raises:
        MemtraceError: the folder does not exist, or the URL cannot be written to.
    """
    target = to_path(output)
    if isinstance(target, StoragePath):
        check_writable_url(target)
        return
    folder = target.parent
    if not folder.is_dir():
        raise MemtraceError(f"{output}: the folder {folder} does not exist. Create it, or pass another path with -o.")


@contextmanager
def output_errors(output: str) -> Iterator[None]:
    """Turn an error of the file system into one sentence that names the file."""
    try:
        yield
    except OSError as error:
        raise MemtraceError(f"{output}: cannot write the file: {error.strerror or error}") from error
