"""The folder in which compiled modules are kept.

What lies there is loaded into the user's process, so the folder must belong to the user (or to root) and must not be
writable by anybody else. Others may read it: the cache that root fills in a container image serves every user. The
folder is opened once, checked through its descriptor, and used through it: another user cannot exchange it in between.
Everything in it is read without following links.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pwd
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from memtrace.native_build.build_lock import hold_lock

LOCK_NAME: Final = "lock"
RETRY_SECONDS: Final = 3600
"""A build that lacked memory, disk space or time is tried again after this time."""
_MAX_RECORD_BYTES: Final = 1 << 16
_MAX_MODULE_BYTES: Final = 64 << 20
_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_OPEN: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_SAFE_FOLDER: Final = "set MEMTRACE_CACHE to a folder of your own"


class CacheError(Exception):
    """The cache cannot be used. The message says why and what to do."""


@dataclass(frozen=True)
class CachedModule:
    """A compiled module in the cache."""

    content: bytes
    compiler: str
    cuda_headers: str | None


@dataclass(frozen=True)
class _Record:
    """What is noted beside a module when it is stored; only a file that still has this hash is loaded."""

    key: str
    sha256: str
    compiler: str
    cuda_headers: str | None


@dataclass(frozen=True)
class _Failure:
    key: str
    message: str
    retry_after_epoch_s: float | None


def cache_folders() -> tuple[Path, ...]:
    """Return the folders to try, in order.

    $MEMTRACE_CACHE alone if it is set and can be written to; otherwise ``memtrace`` in the user's cache folder, then
    ``memtrace-<user id>`` in the folder for temporary files. A read-only $MEMTRACE_CACHE, such as one that belongs to
    a container image, comes before these.
    """
    configured = os.environ.get("MEMTRACE_CACHE")
    folders = [Path(os.path.realpath(configured))] if configured else []
    if folders and not _is_read_only(folders[0]):
        return tuple(folders)
    temporary = Path(os.environ.get("TMPDIR") or "/tmp") / f"memtrace-{os.geteuid()}"
    # The user's own links are followed here; one in the folder for temporary files can be anybody's.
    return (*folders, *(Path(os.path.realpath(folder)) for folder in _user_cache_folders()), temporary)


def _is_read_only(folder: Path) -> bool:
    return folder.is_dir() and not os.access(folder, os.W_OK)


def _user_cache_folders() -> Iterator[Path]:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the XDG specification ignores relative paths
        yield base / "memtrace"
        return
    home = Path(os.environ.get("HOME", ""))
    if not home.is_absolute():
        with suppress(KeyError):  # a user id without an account
            home = Path(pwd.getpwuid(os.geteuid()).pw_dir)
    if home.is_absolute() and home.is_dir():
        yield home / ".cache" / "memtrace"


class BuildCache:
    """An open cache folder. Close it after use."""

    def __init__(self, path: Path) -> None:
        """Open a folder, or create it so that the user alone can write to it.

        Raises:
            CacheError: it cannot be created or read, or another user can write to it.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.mkdir(mode=0o755)
            self._folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _OPEN)
        except OSError as error:
            raise CacheError(f"the cache folder {path} cannot be used ({error.strerror}); {_SAFE_FOLDER}") from error
        try:
            _check_owner(os.fstat(self._folder), f"the cache folder {path}")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the folder."""
        os.close(self._folder)

    def module_path(self, key: str) -> Path:
        """Return where the module of a key is stored."""
        return self.path / f"{key}.so"

    def read_module(self, key: str) -> CachedModule | None:
        """Return the module that was stored under a key; None if there is none or it has changed since."""
        fields = self._read_record(f"{key}.json")
        try:
            record = _Record(**fields)
        except TypeError:
            return None
        content = self._read(f"{key}.so", _MAX_MODULE_BYTES)
        if record.key != key or content is None or hashlib.sha256(content).hexdigest() != record.sha256:
            return None
        return CachedModule(content, record.compiler, record.cuda_headers)

    def store_module(self, key: str, module: CachedModule) -> None:
        """Store a module under a key.

        Raises:
            CacheError: it cannot be written.
        """
        record = _Record(key, hashlib.sha256(module.content).hexdigest(), module.compiler, module.cuda_headers)
        self._write(f"{key}.so", module.content)
        self._write(f"{key}.json", json.dumps(asdict(record)).encode())

    def read_failure(self, key: str) -> str | None:
        """Return the message of a failure that was remembered under a key and is not to be tried again yet."""
        try:
            failure = _Failure(**self._read_record(f"{key}.failed.json"))
        except TypeError:
            return None
        until = failure.retry_after_epoch_s
        if failure.key != key or not isinstance(failure.message, str) or not isinstance(until, int | float | None):
            return None
        is_due = until is not None and not 0 <= until - time.time() <= RETRY_SECONDS
        return None if is_due else failure.message

    def store_failure(self, key: str, message: str, *, is_transient: bool) -> None:
        """Remember a failure under a key, for a limited time if it is transient.

        Raises:
            CacheError: it cannot be written.
        """
        failure = _Failure(key, message, time.time() + RETRY_SECONDS if is_transient else None)
        self._write(f"{key}.failed.json", json.dumps(asdict(failure)).encode())

    def _read_record(self, name: str) -> dict[str, Any]:
        with suppress(ValueError, RecursionError):
            fields = json.loads(self._read(name, _MAX_RECORD_BYTES) or b"{}")
            if isinstance(fields, dict):
                return fields
        return {}

    def _read(self, name: str, max_bytes: int) -> bytes | None:
        try:
            descriptor = os.open(name, os.O_RDONLY | _OPEN, dir_fd=self._folder)
        except OSError:
            return None
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size > max_bytes:
                return None
            try:
                _check_owner(status, name)
                return file.read(max_bytes)
            except (CacheError, OSError):
                return None

    def _write(self, name: str, content: bytes) -> None:
        """Write a file whole: other processes see all of it or nothing."""
        temporary = f".{name}.{secrets.token_hex(8)}"
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _OPEN
            descriptor = os.open(temporary, flags, 0o644, dir_fd=self._folder)
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                os.rename(temporary, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=self._folder)
                raise
        except OSError as error:
            raise CacheError(f"cannot write to the cache folder {self.path} ({error.strerror})") from error

    @contextmanager
    def locked(self, on_wait: Callable[[], None]) -> Iterator[Callable[[], None]]:
        """Keep other processes from building at the same time; yields a function to call while building.

        Args:
            on_wait: called once if another process has the lock.

        Raises:
            CacheError: the folder is read-only, or its lock is not a file of the user's.
        """
        try:
            descriptor = os.open(LOCK_NAME, os.O_RDWR | os.O_CREAT | _OPEN, 0o600, dir_fd=self._folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise CacheError(f"{self.path / LOCK_NAME} is a symbolic link; delete it") from error
            raise CacheError(
                f"cannot write to the cache folder {self.path} ({error.strerror}); {_SAFE_FOLDER}"
            ) from error
        try:
            status = os.fstat(descriptor)
            _check_owner(status, f"{self.path / LOCK_NAME}")
            if not stat.S_ISREG(status.st_mode):
                raise CacheError(f"{self.path / LOCK_NAME} is not a file; delete it")
            with hold_lock(descriptor, self._folder, on_wait) as touch:
                yield touch
        finally:
            os.close(descriptor)


def _check_owner(status: os.stat_result, what: str) -> None:
    if status.st_uid not in (0, os.geteuid()):
        raise CacheError(f"{what} belongs to another user (user id {status.st_uid}); {_SAFE_FOLDER}")
    if status.st_mode & _WRITABLE_BY_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise CacheError(f"{what} can be written by other users (mode {mode:o}); make it 700, or {_SAFE_FOLDER}")
