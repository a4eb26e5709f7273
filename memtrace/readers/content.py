"""The bytes of a foreign file: what it begins with, and a bounded stream of what it holds once unzipped."""

from __future__ import annotations

import io
import os
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from memtrace.errors import TraceError

HEAD_BYTES: Final = 1 << 16
CHUNK_BYTES: Final = 1 << 18
# Real traces unzip to at most 30 times their size, DEFLATE itself to at most 1032 times.
FREE_BYTES: Final = 64 << 20
MAX_EXPANSION: Final = 100
_USUAL_BYTES: Final = 16 << 20
_USUAL_EXPANSION: Final = 40

_GZIP = b"\x1f\x8b"
_REFUSED: Final = (
    (b"version https://git-lfs", "is a git-LFS pointer, not the file itself. Run `git lfs pull` where it came from"),
    (
        b"PK\x03\x04",
        "is a zip archive (torch.save writes those, and they hold no trace). Unpack it and give a file in it",
    ),
    (b"\x28\xb5\x2f\xfd", "is compressed with zstd. Decompress it first: `zstd -d`"),
    (b"\xfd7zXZ", "is compressed with xz. Decompress it first: `xz -d`"),
    (b"BZh", "is compressed with bzip2. Decompress it first: `bzip2 -d`"),
    (b"PAR1", "is one Parquet part. Give the folder it lies in (*.memtrace)"),
    (b"SQLite format 3", "is an SQLite database, such as Nsight Systems writes; memtrace does not read those"),
)


@dataclass(frozen=True)
class Content:
    """A foreign file. ``head`` is the beginning of what it holds, unzipped where it is gzip."""

    path: Path
    zipped: bool
    head: bytes
    size: int
    """Bytes that it holds, unzipped: for gzip what its trailer claims, within what is usual."""

    @classmethod
    def of(cls, path: Path) -> Content:
        """Look at a file. TraceError where it cannot be read or is of a kind known to hold no trace."""
        try:
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                raise TraceError(f"{path} is a folder, and not one that memtrace wrote.")
            if not stat.S_ISREG(status.st_mode):
                raise TraceError(f"{path} is not a regular file. Save it to a file first.")
            with path.open("rb") as file:
                zipped = file.read(2) == _GZIP
                size = _claimed_size(file, status.st_size) if zipped else status.st_size
            content = cls(path, zipped, b"", size)
            with content.open() as stream:
                head = stream.read(HEAD_BYTES)
        except FileNotFoundError:
            raise TraceError(f"{path} does not exist.") from None
        except OSError as error:
            raise TraceError(f"{path} cannot be read: {error.strerror or error}.") from error
        if not head:
            raise TraceError(f"{path} is empty. Was the program that wrote it killed? Dump it again.")
        for magic, sentence in _REFUSED:
            if head.startswith(magic):
                raise TraceError(f"{path} {sentence}.")
        if head.startswith(_GZIP):
            raise TraceError(f"{path} is gzip within gzip. Decompress it once: `gzip -d`.")
        return cls(path, zipped, head, size)

    def open(self) -> BinaryIO:
        """What the file holds from its beginning, unzipped on the way; TraceError once it unzips beyond reason."""
        file = io.FileIO(self.path)
        source = _Unzipped(io.BufferedReader(file, CHUNK_BYTES), self.path) if self.zipped else file
        return io.BufferedReader(source, CHUNK_BYTES)


def _claimed_size(file: BinaryIO, packed: int) -> int:
    """The last four bytes of gzip hold the size modulo 2**32. They may lie, so they are capped at what is usual."""
    file.seek(-min(packed, 4), os.SEEK_END)
    return min(int.from_bytes(file.read(4), "little"), _USUAL_BYTES + _USUAL_EXPANSION * packed)


class _Unzipped(io.RawIOBase):
    """A gzip stream that gives up on decompression bombs, on damage and on a missing end."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._inflate = zlib.decompressobj(wbits=31)
        self._pending = b""
        self._taken = 0
        self._given = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def close(self) -> None:
        """Close the file beneath as well."""
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; 0 at the end of the last gzip member."""
        view = memoryview(buffer).cast("B")
        if not len(view):
            return 0
        while True:
            if self._inflate.eof and not self._next_member():
                return 0
            if not self._inflate.unconsumed_tail and not self._pending:
                self._pending = self._file.read(CHUNK_BYTES)
                self._taken += len(self._pending)
            at_end = not self._pending and not self._inflate.unconsumed_tail
            # Even without input there may be output that did not fit last time.
            data = self._expand(len(view))
            if data:
                view[: len(data)] = data
                return len(data)
            if at_end and not self._inflate.eof:
                raise TraceError(f"{self._path} is truncated: its gzip stream has no end. Copy it again, whole.")

    def _expand(self, limit: int) -> bytes:
        source = self._inflate.unconsumed_tail or self._pending
        try:
            data = self._inflate.decompress(source, limit)
        except zlib.error as error:
            raise TraceError(f"{self._path} is damaged: its gzip stream does not unzip ({error}).") from error
        self._pending = b""
        self._given += len(data)
        if self._given > FREE_BYTES + MAX_EXPANSION * self._taken:
            raise TraceError(
                f"{self._path} unzips to more than {MAX_EXPANSION} times its size, which no trace does: refused as a "
                "decompression bomb. If you trust it, unzip it yourself and give the result."
            )
        return data

    def _next_member(self) -> bool:
        """Gzip files may be several, one behind the other; zeros behind the last are padding."""
        rest = (self._inflate.unused_data or self._file.read(CHUNK_BYTES)).lstrip(b"\0")
        self._taken += 0 if self._inflate.unused_data else len(rest)
        if not rest.startswith(_GZIP):
            return False
        self._inflate = zlib.decompressobj(wbits=31)
        self._pending = rest
        return True
