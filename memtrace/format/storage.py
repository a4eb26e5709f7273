"""Paths of files on disk, and URLs of files in any storage that fsspec opens: S3, Google Cloud Storage, HDFS, HTTP.

A path becomes readable in one place, ``to_path``. Reading code takes both kinds of paths and uses what they share.
Access to the storage is configured as fsspec documents it: by the environment, by the files of the storage's own tools,
or by ``fsspec.config``. fsspec is imported for URLs only.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeAlias, TypeVar

from memtrace.errors import MemtraceError
from memtrace.text import to_printable

T = TypeVar("T")
R = TypeVar("R")

MAX_REQUESTS: Final = 16
"""Requests to a storage that wait for their answers at the same time."""
MAX_NAME_LENGTH: Final = 200
_URL: Final = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.\-]+::)*(?P<protocol>[A-Za-z][A-Za-z0-9+.\-]+)://")
_COLLAPSED_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/(?!/)")
_PASSWORD: Final = re.compile(r"(://[^/@:]*):[^/@]*@")
_SIGNATURE: Final = re.compile(r"(?<=.)\?(?=[^?]*=).*")
_LOCAL_PROTOCOLS: Final = ("file", "local")
_EXTRAS: Final = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "hdfs": "hdfs", "http": "http", "https": "http"}
"""The extra of memtrace that installs the package for a protocol."""
_UNLISTED: Final = ("http", "https")
"""Protocols without listings of folders: the manifest names the files."""
_FLAT: Final = ("s3", "s3a", "gs", "gcs")
"""Protocols of storages that list the files of many folders at once, by the beginning of their names."""


class StorageError(OSError):
    """A storage cannot be used. The message names the URL, what is wrong, and what to do."""


@dataclass(frozen=True)
class Entry:
    """A file in a listing."""

    size_bytes: int | None
    """None: the storage does not list sizes."""
    version: str = ""
    """Changes with the content of the file: an ETag, or a time of modification; empty where the storage has neither."""


@dataclass(frozen=True)
class StorageStat:
    """What ``pathlib`` calls the status of a file."""

    st_size: int


@dataclass(frozen=True)
class StoragePath:
    """A file or folder in a storage, with those members of ``pathlib.Path`` that reading a trace needs."""

    url: str
    """Also a chain of fsspec, such as ``zip://run.memtrace::s3://bucket/archive.zip``: the first path in it counts."""

    def __str__(self) -> str:
        """Return the URL on one line, without a password or a signature in it."""
        return to_printable(_SIGNATURE.sub("?...", _PASSWORD.sub(r"\1:***@", self.url)))

    def __truediv__(self, name: str) -> StoragePath:
        """Return a file or folder in this folder."""
        before, path, after = self._split()
        return StoragePath(f"{before}{path}{'/' if path else ''}{name}{after}")

    def _split(self) -> tuple[str, str, str]:
        """Return the URL up to its first path, that path, and the rest of the chain."""
        match = _URL.match(self.url)
        assert match is not None
        path, chain, rest = self.url[match.end() :].partition("::")
        return match.group(), path, chain + rest

    @property
    def protocol(self) -> str:
        """The protocol of the storage, such as ``s3``."""
        match = _URL.match(self.url)
        assert match is not None
        return match["protocol"].lower()

    @property
    def is_chain(self) -> bool:
        """Whether the URL is a chain of fsspec, such as a file in an archive."""
        return "::" in self.url

    @property
    def is_listed(self) -> bool:
        """Whether the storage can list the files of a folder."""
        return self.protocol not in _UNLISTED

    @property
    def name(self) -> str:
        """The last part of the path."""
        path = self._split()[1]
        return (path if self.is_listed else path.partition("?")[0]).rpartition("/")[2]

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return Path(self.name).stem

    @property
    def suffix(self) -> str:
        """The suffix of the name, such as ``.memtrace``."""
        return Path(self.name).suffix

    @property
    def parts(self) -> tuple[str, ...]:
        """The protocol and the parts of the path."""
        before, path, _ = self._split()
        return (before, *path.split("/"))

    @property
    def parent(self) -> StoragePath:
        """The folder that contains it."""
        before, path, after = self._split()
        return StoragePath(f"{before}{path.rpartition('/')[0]}{after}")

    def with_name(self, name: str) -> StoragePath:
        """Return a neighbor of this file or folder."""
        return self.parent / name

    # Access. Errors are FileNotFoundError, or StorageError for everything else.

    def open_filesystem(self) -> tuple[Any, str]:
        """Return the file system of fsspec, and the path in it."""
        with self.errors():
            from fsspec.core import url_to_fs

            filesystem, path = url_to_fs(self.url)
            return filesystem, str(path)

    def exists(self) -> bool:
        """Whether there is a file or folder; StorageError where the storage cannot be asked."""
        # ``exists`` and ``isdir`` of fsspec answer False for every error.
        try:
            self.entry()
        except FileNotFoundError:
            return self.is_listed and any(self.list_folder())
        except IsADirectoryError:
            pass
        return True

    def is_file(self) -> bool:
        """Whether it is a file."""
        try:
            self.entry()
        except (FileNotFoundError, IsADirectoryError):
            return False
        return True

    def is_dir(self) -> bool:
        """Whether it is a folder: object stores have one where the names of objects begin with its path."""
        if not self.is_listed:
            return (self / "manifest.json").is_file() or (self / "rank=0" / "manifest.json").is_file()
        try:
            return any(self.list_folder())
        except StorageError as error:
            if isinstance(error.__cause__, PermissionError) and self.is_file():  # files can be read, but not listed
                return False
            raise

    def entry(self) -> Entry:
        """Return what the storage knows about a file."""
        filesystem, path = self.open_filesystem()
        with self.errors():
            filesystem.invalidate_cache()
            info = filesystem.info(path)
        if info.get("type") == "directory":
            raise IsADirectoryError(f"{self} is a folder")
        return _entry(info)

    def list_folder(self) -> tuple[dict[str, Entry], list[str]]:
        """Return the files directly in a folder by name, and the names of its folders; both empty where it is absent.

        Only plain names are returned, whatever the storage lists: nothing leads out of the folder.
        """
        filesystem, path = self.open_filesystem()
        with self.errors():
            return list_folder(filesystem, path)

    def read_bytes(self, max_bytes: int | None = None, entry: Entry | None = None) -> bytes:
        """Return the content of a file.

        Args:
            max_bytes: a larger file is refused with OSError.
            entry: the file in a listing; None: the storage is asked for its size if need be.
        """
        if max_bytes is not None:
            size_bytes = (entry or self.entry()).size_bytes
            if size_bytes is not None and size_bytes > max_bytes:
                raise OSError(f"larger than {max_bytes:,} bytes")
        filesystem, path = self.open_filesystem()
        # s3fs asks for the size of a file first, unless a range is requested; empty files have none.
        is_listed = self.protocol in ("s3", "s3a") and entry is not None and entry.size_bytes
        with self.errors():
            return bytes(filesystem.cat_file(path, start=0) if is_listed else filesystem.cat_file(path))

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the content of a text file."""
        return self.read_bytes().decode(encoding)

    def read_range(self, start: int, end: int) -> bytes:
        """Return the bytes of a file from ``start`` up to ``end``."""
        if start >= end:
            return b""
        filesystem, path = self.open_filesystem()
        with self.errors():
            content = bytes(filesystem.cat_file(path, start=start, end=end))
            if len(content) > end - start:  # a server of HTTP without ranges sends the whole file
                content = content[start:end]
            if len(content) != end - start:
                raise EOFError(f"{len(content):,} bytes instead of {end - start:,}: the file has changed or was cut")
            return content

    def stat(self) -> StorageStat:
        """Return the size of a file."""
        return StorageStat(self.entry().size_bytes or 0)

    @contextmanager
    def downloaded(self) -> Iterator[Path]:
        """Copy a file to a temporary folder, under its own name, and delete the copy at the end."""
        filesystem, path = self.open_filesystem()
        with TemporaryDirectory(prefix="memtrace-", ignore_cleanup_errors=True) as folder:
            local = Path(folder) / (re.sub(r"[^\w.+=-]+", "-", self.name)[-MAX_NAME_LENGTH:].lstrip("-.") or "file")
            with self.errors():
                if self.entry().size_bytes is None:
                    local.write_bytes(filesystem.cat_file(path))
                else:
                    filesystem.get_file(path, str(local))
            yield local

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn errors of fsspec, and of the packages that it uses, into StorageError."""
        try:
            yield
        except (StorageError, FileNotFoundError, IsADirectoryError, MemoryError):
            raise
        except Exception as error:
            raise StorageError(f"{self}: {describe_error(error, self.protocol)}") from error


def list_folder(filesystem: Any, path: str) -> tuple[dict[str, Entry], list[str]]:
    """Return what ``StoragePath.list_folder`` returns, for a path in a file system of fsspec."""
    prefix = path.rstrip("/") + "/" if path.strip("/") else path
    try:
        filesystem.invalidate_cache()
        listing = filesystem.ls(path, detail=True)
    except FileNotFoundError:
        return {}, []
    files: dict[str, Entry] = {}
    folders: list[str] = []
    for info in listing:
        listed = str(info["name"]).rstrip("/")
        name = listed.removeprefix(prefix) if listed.startswith(prefix) else listed.removeprefix(prefix.lstrip("/"))
        if not is_plain_name(name):
            continue
        if info.get("type") == "directory":
            folders.append(name)
        else:
            files[name] = _entry(info)
    return files, sorted(folders)


def list_folders(path: StoragePath, prefix: str, names: Sequence[str]) -> list[dict[str, Entry]]:
    """Return the files directly in each of some folders in ``path``, by name.

    Args:
        path: the folder that contains them.
        prefix: what their names begin with.
        names: their names.
    """
    if path.protocol not in _FLAT or path.is_chain or len(names) < 2:
        return map_requests(lambda name: (path / name).list_folder()[0], names, path)
    filesystem, root = path.open_filesystem()
    with path.errors():
        filesystem.invalidate_cache()
        listing = filesystem.find(root, prefix=prefix, detail=True)
    files: dict[str, dict[str, Entry]] = {name: {} for name in names}
    above = root.rstrip("/") + "/"
    for listed, info in listing.items():
        folder, _, name = str(listed).removeprefix(above).partition("/")
        if folder in files and is_plain_name(name):
            files[folder][name] = _entry(info)
    return [files[name] for name in names]


def is_plain_name(name: str) -> bool:
    """Whether a name in a listing leads to a file or folder directly in the folder."""
    return name not in ("", ".", "..") and "/" not in name and "\\" not in name


AnyPath: TypeAlias = Path | StoragePath


def _entry(info: Mapping[str, Any]) -> Entry:
    versions = (info.get(key) for key in ("ETag", "etag", "md5Hash", "generation", "LastModified", "mtime", "created"))
    size = info.get("size")
    return Entry(int(size) if size is not None else None, str(next((v for v in versions if v is not None), "")))


def is_url(path: object) -> bool:
    """Whether a path is the URL of a storage, rather than one of a file on disk."""
    match = _URL.match(path) if isinstance(path, str) else None
    return match is not None and ("::" in str(path) or match["protocol"].lower() not in _LOCAL_PROTOCOLS)


def is_of_this_process(path: AnyPath) -> bool:
    """Whether a path is in a storage in the memory of this process, or in one that the program registered."""
    if isinstance(path, Path):
        return False
    protocols = {part.partition("://")[0].lower() for part in path.url.split("::")}
    registry = sys.modules.get("fsspec.registry")
    registered = () if registry is None else registry.registry.keys() - registry.known_implementations.keys()
    return "memory" in protocols or not protocols.isdisjoint(registered)


def to_path(path: str | os.PathLike[str] | StoragePath) -> AnyPath:
    """Return a path on disk, or the path in a storage where ``path`` is a URL.

    Raises:
        MemtraceError: the URL went through ``pathlib``, which removes one of its slashes.
    """
    if isinstance(path, StoragePath):
        return path
    text = str(path)
    if is_url(text):
        return StoragePath(text if text.endswith("://") else text.rstrip("/"))
    match = _URL.match(text)
    if match is not None:  # file://
        return Path(text[match.end() :])
    if isinstance(path, Path) and _COLLAPSED_URL.match(text) and not path.parent.exists():
        raise MemtraceError(f"{path}: pathlib has removed a slash from a URL. Pass the URL as a string.")
    return Path(path)


def describe_error(error: BaseException, protocol: str) -> str:
    """Return what is wrong with a storage, and what to do, as text that follows the URL and a colon.

    Args:
        error: what fsspec, or a package that it uses, raised.
        protocol: the protocol of the URL.
    """
    lines = to_printable(" ".join(str(error).split()))[:300].rstrip(". ")
    reason = lines or type(error).__name__
    if isinstance(error, ImportError):
        extra = _EXTRAS.get(protocol)
        package = f'pip install "memtrace[{extra}]"' if extra else "pip, as the documentation of fsspec says"
        return f"a package for {protocol}:// is missing ({reason}). Install it with {package}."
    if isinstance(error, ValueError) and "rotocol not known" in reason:
        return f"the protocol {protocol}:// is unknown to fsspec. Check the URL."
    if isinstance(error, PermissionError) or "redentials" in reason or "redentials" in type(error).__name__:
        return f"access is denied ({reason}). Check the credentials of {protocol}:// and the rights that they give."
    if isinstance(error, FileNotFoundError):
        return f"the bucket or folder does not exist ({reason}). Check the URL."
    kind = "" if isinstance(error, OSError) and lines else f"{type(error).__name__}: "
    return f"the storage cannot be used ({kind}{reason}). Check the network and the URL, and try again."


def map_requests(function: Callable[[T], R], items: Sequence[T], path: AnyPath) -> list[R]:
    """Return the results of a function that reads files at ``path``: several at a time where each is a request."""
    if isinstance(path, Path) or len(items) < 2:
        return [function(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(MAX_REQUESTS, len(items)), thread_name_prefix="memtrace-storage") as pool:
        return list(pool.map(function, items))


def is_permanent(error: BaseException) -> bool:
    """Whether an error will stay until somebody corrects something, unlike an outage."""
    return (
        isinstance(error, ImportError | PermissionError | FileNotFoundError | ValueError)
        or "redentials" in f"{error} {type(error).__name__}"
    )
