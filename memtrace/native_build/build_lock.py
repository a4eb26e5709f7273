"""The lock that keeps processes from building the native observer at the same time.

The lock of a file (``flock``) ends with the process that holds it, also when that is killed, and reaches other machines
through NFS. On file systems without such locks, a file that one process at a time can create takes its place. In both
cases the holder touches the file while it builds: a holder that does not is stopped or gone, and is not waited for.
Building twice is harmless.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

STALE_SECONDS: Final = 20
"""A process that builds touches its lock more often than this. One that does not is stopped, or builds nothing."""
EXCLUSIVE_NAME: Final = "building"
"""File whose existence is the lock where files cannot be locked."""
_POLL_SECONDS: Final = 0.05
_TOUCH_SECONDS: Final = 1
_IS_HELD: Final = (errno.EAGAIN, errno.EACCES)


@contextmanager
def hold_lock(descriptor: int, folder: int, on_wait: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Hold the lock, or go on without it if its holder no longer touches it; yields a function to call while building.

    Args:
        descriptor: of the file to lock.
        folder: descriptor of the folder that contains it.
        on_wait: called once if another process holds the lock.
    """
    wait = _Wait(on_wait)
    try:
        is_locked = _lock_file(descriptor, wait)
    except OSError:  # a file system without locks
        with _exclusive_file(folder, wait) as touch:
            yield touch
        return
    try:
        yield _Touch(descriptor) if is_locked else _do_nothing
    finally:
        if is_locked:
            # Explicitly, because a child that another thread has forked still has the descriptor open.
            fcntl.flock(descriptor, fcntl.LOCK_UN)


def _lock_file(descriptor: int, wait: _Wait) -> bool:
    """Lock a file; False if its holder is stopped.

    Raises:
        OSError: the file system has no locks.
    """
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in _IS_HELD:
                raise
        if wait.is_over(os.fstat(descriptor).st_mtime_ns):
            return False


@contextmanager
def _exclusive_file(folder: int, wait: _Wait) -> Iterator[Callable[[], None]]:
    descriptor = _create_exclusively(folder, wait)
    if descriptor is None:
        yield _do_nothing
        return
    try:
        yield _Touch(descriptor)
    finally:
        os.close(descriptor)
        with suppress(OSError):
            os.unlink(EXCLUSIVE_NAME, dir_fd=folder)


def _create_exclusively(folder: int, wait: _Wait) -> int | None:
    """Create the file; None if that is not possible. One that a killed process left is deleted."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            return os.open(EXCLUSIVE_NAME, flags, 0o600, dir_fd=folder)
        except FileExistsError:
            pass
        except OSError:
            return None
        with suppress(FileNotFoundError):  # its holder has just finished
            touched_ns = os.stat(EXCLUSIVE_NAME, dir_fd=folder, follow_symlinks=False).st_mtime_ns
            if wait.is_over(touched_ns):
                try:
                    os.unlink(EXCLUSIVE_NAME, dir_fd=folder)
                except IsADirectoryError:
                    return None


class _Wait:
    """A wait for a holder of the lock, as long as it touches the lock."""

    def __init__(self, on_wait: Callable[[], None]) -> None:
        self._on_wait = on_wait
        self._touched_ns: int | None = None
        self._seen = time.monotonic()

    def is_over(self, touched_ns: int) -> bool:
        """Wait a moment, or return True if the holder has not touched the lock for STALE_SECONDS."""
        if self._touched_ns is None:
            self._on_wait()
        if touched_ns != self._touched_ns:
            self._touched_ns, self._seen = touched_ns, time.monotonic()
        elif time.monotonic() - self._seen > STALE_SECONDS:
            return True
        time.sleep(_POLL_SECONDS)
        return False


class _Touch:
    """Touches the lock when called, but at most once in _TOUCH_SECONDS."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._touched = 0.0

    def __call__(self) -> None:
        if time.monotonic() - self._touched > _TOUCH_SECONDS:
            self._touched = time.monotonic()
            with suppress(OSError):
                os.utime(self._descriptor)


def _do_nothing() -> None:
    pass
