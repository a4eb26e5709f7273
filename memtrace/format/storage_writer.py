"""Writes to storages: every file appears under its name whole or not at all."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from memtrace.errors import MemtraceError
from memtrace.format.files import replace_file
from memtrace.format.schema import MANIFEST_NAME
from memtrace.format.storage import AnyPath, Entry, StorageError, StoragePath, describe_error, list_folder, to_path

_WHOLE_OBJECTS: Final = (
    *("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oci", "oss", "tos", "r2", "memory"),
)
"""Protocols of storages in which an object is visible only when all of it is there. Elsewhere a file is written under a
temporary name and renamed."""
MAX_SINGLE_BYTES: Final = 64 << 20
"""Larger files are sent in several requests, and not read into memory at once."""
CONNECT_TIMEOUT_SECONDS: Final = 10
READ_TIMEOUT_SECONDS: Final = 60


class StorageWriter:
    """Writes files in a storage.

    It has a file system object of its own, which shares neither listings nor retries with the program. Nothing is
    retried here.

    Args:
        root: a path in the storage.
        is_shared: use the file system object that reading uses instead, with its connections and retries.

    Raises:
        StorageError: the package for the storage is missing.
    """

    def __init__(self, root: StoragePath, *, is_shared: bool = False) -> None:
        self._is_whole = root.protocol in _WHOLE_OBJECTS
        self._filesystem: Any
        if is_shared:
            self._filesystem, _ = root.open_filesystem()
            return
        with root.errors():
            from fsspec.core import url_to_fs

            self._filesystem = url_to_fs(root.url, **_options(root.protocol))[0]
            if root.protocol in ("s3", "s3a"):
                self._filesystem.retries = 1

    def list_folder(self, path: StoragePath) -> tuple[dict[str, Entry], list[str]]:
        """Return the files in a folder and the names of its folders; see ``StoragePath.list_folder``."""
        with path.errors():
            return list_folder(self._filesystem, self._strip(path))

    def read(self, path: StoragePath) -> bytes | None:
        """Return the content of a file; None where it is absent."""
        try:
            with path.errors():
                return bytes(self._filesystem.cat_file(self._strip(path)))
        except FileNotFoundError:
            return None

    def put(self, path: StoragePath, content: Path | bytes) -> None:
        """Write or replace a file.

        Args:
            path: the file.
            content: its content, or a file with it.

        Raises:
            FileNotFoundError: the file on disk, or the bucket, does not exist.
            StorageError: the storage does not take the file.
        """
        size_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
        if isinstance(content, Path) and size_bytes <= MAX_SINGLE_BYTES:
            content = content.read_bytes()
        with _write_errors(path):
            if self._is_whole:
                self._write(self._strip(path), content)
                return
            temporary, final = self._strip(path.with_name(f".{path.name}.tmp")), self._strip(path)
            self._filesystem.makedirs(self._strip(path.parent), exist_ok=True)
            self._write(temporary, content)
            if self._filesystem.exists(final):
                self._filesystem.rm_file(final)  # some file systems rename to free names only
            self._filesystem.mv(temporary, final)

    def create(self, path: StoragePath, content: bytes) -> bool:
        """Write a file that does not exist; return whether it is this writer's now.

        Where the storage can do that, only one of several writers succeeds.

        Raises:
            StorageError: the storage cannot be used.
        """
        name = self._strip(path)
        with _write_errors(path):
            if not self._is_whole:
                if self._filesystem.exists(name):
                    return bool(self._filesystem.cat_file(name) == content)
                self.put(path, content)
                return True
            if self._exists(name):  # older versions of fsspec ignore the mode
                return bool(self._filesystem.cat_file(name) == content)
            try:
                self._filesystem.pipe_file(name, content, mode="create")
            except FileExistsError:
                pass
            except (FileNotFoundError, PermissionError):
                raise
            except Exception as error:  # the answer may have been lost, or the storage cannot create exclusively
                if not self._exists(name):
                    is_unsupported = isinstance(error, TypeError | ValueError | NotImplementedError)
                    if not is_unsupported and getattr(error, "errno", None) != errno.ENOSYS:
                        raise
                    self._filesystem.pipe_file(name, content)
            else:
                return True
            return bool(self._filesystem.cat_file(name) == content)

    def delete(self, path: StoragePath) -> None:
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError), _write_errors(path):
            self._filesystem.rm_file(self._strip(path))

    def _exists(self, name: str) -> bool:
        try:
            self._filesystem.info(name)
        except FileNotFoundError:
            return False
        return True

    def _strip(self, path: StoragePath) -> str:
        return str(self._filesystem._strip_protocol(path.url))

    def _write(self, name: str, content: Path | bytes) -> None:
        if isinstance(content, bytes):
            self._filesystem.pipe_file(name, content)
        else:
            self._filesystem.put_file(str(content), name)


@contextmanager
def _write_errors(path: StoragePath) -> Iterator[None]:
    """Turn every error, of a missing bucket too, into StorageError."""
    try:
        with path.errors():
            yield
    except FileNotFoundError as error:
        raise StorageError(f"{path}: {describe_error(error, path.protocol)}") from error


def _options(protocol: str) -> dict[str, Any]:
    """Return options for a file system of one's own, with timeouts unless the user has configured some."""
    options: dict[str, Any] = {"skip_instance_cache": True, "use_listings_cache": False}
    if protocol in ("s3", "s3a"):
        from fsspec.config import conf

        if not any("config_kwargs" in conf.get(name, {}) for name in ("s3", "s3a")):
            options["config_kwargs"] = {
                "connect_timeout": CONNECT_TIMEOUT_SECONDS,
                "read_timeout": READ_TIMEOUT_SECONDS,
                "retries": {"max_attempts": 0},
            }
    return options


def check_writable_url(url: StoragePath) -> None:
    """Check that a URL can be written to.

    Raises:
        MemtraceError: it is a chain of fsspec, is read-only, or names no file in a bucket.
    """
    if url.is_chain:
        raise MemtraceError(f"{url}: a chain of URLs cannot be written to. Pass the URL of the storage itself.")
    if not url.is_listed:
        raise MemtraceError(f"{url}: {url.protocol}:// is read-only. Pass a URL such as s3://bucket/{url.name}.")
    if not url.name:
        raise MemtraceError(f"{url}: the URL names no file or folder. Pass a URL such as {url.protocol}://bucket/name.")


def write_file(path: AnyPath, content: bytes) -> None:
    """Write or replace a file on disk or in a storage, so that it is whole or absent at every moment.

    Raises:
        MemtraceError: the URL cannot be written to.
        OSError: the file cannot be written.
    """
    if isinstance(path, Path):
        replace_file(path, content)
        return
    check_writable_url(path)
    StorageWriter(path, is_shared=True).put(path, content)


@contextmanager
def local_output(output: str | AnyPath, *, overwrite: bool = True) -> Iterator[Path]:
    """Yield the path on disk to write an output to; where the output is a URL, it is uploaded from there afterwards.

    Args:
        output: the file or folder to write.
        overwrite: where the output is a URL, whether something that is there may be replaced.

    Raises:
        MemtraceError: the URL cannot be written to, or there is something already.
    """
    target = to_path(output)
    if isinstance(target, Path):
        yield target
        return
    check_writable_url(target)
    try:
        if not overwrite and target.exists():
            raise MemtraceError(f"{target} exists already. Choose another name.")
        writer = StorageWriter(target)
        with TemporaryDirectory(prefix="memtrace-", ignore_cleanup_errors=True) as folder:
            local = Path(folder) / (re.sub(r"[^\w.+=-]+", "-", target.name) or "output")
            yield local
            if local.is_file():
                writer.put(target, local)
            elif local.is_dir():
                files = [path for path in local.rglob("*") if path.is_file()]
                # A manifest comes after the parts that it names.
                for file in sorted(files, key=lambda path: (path.name == MANIFEST_NAME, path)):
                    inner = target
                    for part in file.relative_to(local).parts:
                        inner = inner / part
                    writer.put(inner, file)
    except StorageError as error:
        raise MemtraceError(str(error)) from error
