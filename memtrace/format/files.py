"""Writes whole files in one step, in a process whose other code may close any descriptor at any time."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_DESCRIPTOR: Final = 512
"""memtrace's descriptors have at least this number. A program that closes descriptors it does not know, such as with
``os.closerange(3, 256)``, misses them, and its next ``open`` takes the smallest free number, which is not theirs."""

FileIdentity = tuple[int, int]
"""Device and inode."""


def replace_file(path: Path, content: bytes | memoryview, check: Callable[[Path], object] | None = None) -> None:
    """Write a file under a temporary name and rename it into place, so that it is whole or absent at every moment.

    Args:
        path: the file.
        content: its bytes.
        check: called with the temporary file before it is renamed; it may change the file.

    Raises:
        OSError: the file cannot be written, or other code of the process closed its descriptor. The temporary file is
            removed, if that is possible.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        _write(temporary, content)
        if check is not None:
            check(temporary)
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _write(path: Path, content: bytes | memoryview) -> None:
    descriptor, identity = open_protected(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        rest = memoryview(content).cast("B")
        while rest:
            if not is_file(descriptor, identity):
                raise OSError(errno.EBADF, "other code of the program closed the file", str(path))
            rest = rest[os.write(descriptor, rest) :]
    finally:
        close_protected(descriptor, identity)


def open_protected(path: Path, flags: int) -> tuple[int, FileIdentity]:
    """Open a file or folder with a descriptor of at least FIRST_DESCRIPTOR where possible; return its identity too."""
    descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666)
    status = path.stat()
    identity = (status.st_dev, status.st_ino)
    if sys.platform == "win32":
        return descriptor, identity
    import fcntl

    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_DESCRIPTOR)
    except OSError:  # the limit on descriptors is lower, or reached
        return descriptor, identity
    close_protected(descriptor, identity)
    return high, identity


def is_file(descriptor: int, identity: FileIdentity) -> bool:
    """Whether a descriptor still refers to the file: after ``os.closerange`` its number may belong to another one."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return False
    return (status.st_dev, status.st_ino) == identity


def close_protected(descriptor: int, identity: FileIdentity) -> None:
    """Close a descriptor unless it refers to another file by now."""
    if is_file(descriptor, identity):
        with suppress(OSError):  # a network file system may report a failed write here; the part is checked when read
            os.close(descriptor)
