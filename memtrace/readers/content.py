"""The content of a file: its first bytes, and a stream of its decompressed bytes that refuses decompression bombs."""

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
# Memory traces expand to at most 30 times their compressed size, DEFLATE itself to at most 1032 times.
UNLIMITED_BYTES: Final = 64 << 20
MAX_EXPANSION: Final = 100
_TYPICAL_BYTES: Final = 16 << 20
_TYPICAL_EXPANSION: Final = 40

_GZIP_MAGIC: Final = b"\x1f\x8b"
_UNSUPPORTED_FORMATS: Final = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself. Run `git lfs pull` in its repository."),
    (b"PK\x03\x04", "a zip archive. Pass a memory trace; the archives that torch.save writes contain none."),
    (b"\x28\xb5\x2f\xfd", "compressed with zstd. Decompress it with `zstd -d` first."),
    (b"\xfd7zXZ", "compressed with xz. Decompress it with `xz -d` first."),
    (b"BZh", "compressed with bzip2. Decompress it with `bzip2 -d` first."),
    (b"PAR1", "a single Parquet file. Pass the *.memtrace folder that contains it."),
    (b"SQLite format 3", "an SQLite database, as Nsight Systems writes. memtrace cannot read it; pass another trace."),
)


@dataclass(frozen=True)
class Content:
    """A file of another tool."""

    path: Path
    is_gzip: bool
    head: bytes
    """The first ``HEAD_BYTES`` bytes, decompressed."""
    size_bytes: int
    """Size of the decompressed content. For gzip it is what the trailer states, capped at a typical expansion."""

    @classmethod
    def of(cls, path: Path) -> Content:
        """Inspect a file.

        Raises:
            TraceError: the file cannot be read, or it has a format that holds no memory trace.
        """
        try:
            status = path.stat()
            if stat.S_ISDIR(status.st_mode):
                raise TraceError(f"{path}: a folder, but not a memtrace trace. Pass a file or a *.memtrace folder.")
            if not stat.S_ISREG(status.st_mode):
                raise TraceError(f"{path}: not a regular file. Save its content to a file and pass that.")
            with path.open("rb") as file:
                is_gzip = file.read(2) == _GZIP_MAGIC
                size_bytes = _stated_size(file, status.st_size) if is_gzip else status.st_size
            content = cls(path, is_gzip, b"", size_bytes)
            with content.open() as stream:
                head = stream.read(HEAD_BYTES)
        except FileNotFoundError:
            raise TraceError(f"{path}: the file does not exist. Check the path.") from None
        except OSError as error:
            raise TraceError(f"{path}: cannot be read ({error.strerror or error}).") from error
        if not head:
            raise TraceError(f"{path}: the file is empty. Perhaps the program that wrote it was killed; run it again.")
        for magic, problem in _UNSUPPORTED_FORMATS:
            if head.startswith(magic):
                raise TraceError(f"{path}: {problem}")
        if head.startswith(_GZIP_MAGIC):
            raise TraceError(f"{path}: compressed with gzip twice. Decompress it with `gzip -d` once.")
        return cls(path, is_gzip, head, size_bytes)

    def open(self) -> BinaryIO:
        """Open a stream of the decompressed content.

        Reading from the stream raises TraceError where the data is damaged, truncated, or a decompression bomb.
        """
        file = io.FileIO(self.path)
        source = _GzipStream(io.BufferedReader(file, CHUNK_BYTES), self.path) if self.is_gzip else file
        return io.BufferedReader(source, CHUNK_BYTES)


def _stated_size(file: BinaryIO, file_bytes: int) -> int:
    """Return the decompressed size in the last four bytes of a gzip file (modulo 2**32), capped because it may lie."""
    file.seek(-min(file_bytes, 4), os.SEEK_END)
    return min(int.from_bytes(file.read(4), "little"), _TYPICAL_BYTES + _TYPICAL_EXPANSION * file_bytes)


class _GzipStream(io.RawIOBase):
    """Decompresses gzip and raises TraceError for decompression bombs, damaged data and a missing end."""

    def __init__(self, file: BinaryIO, path: Path) -> None:
        self._file = file
        self._path = path
        self._inflate = zlib.decompressobj(wbits=31)
        self._pending = b""
        self._compressed_bytes = 0
        self._decompressed_bytes = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the stream and the compressed file."""
        self._file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer and return the number of bytes written to it, 0 at the end of the last gzip member."""
        view = memoryview(buffer).cast("B")
        if not len(view):
            return 0
        while True:
            if self._inflate.eof and not self._next_member():
                return 0
            if not self._inflate.unconsumed_tail and not self._pending:
                self._pending = self._file.read(CHUNK_BYTES)
                self._compressed_bytes += len(self._pending)
            at_end = not self._pending and not self._inflate.unconsumed_tail
            # Output that did not fit into the previous buffer can be left even without new input.
            data = self._decompress(len(view))
            if data:
                view[: len(data)] = data
                return len(data)
            if at_end and not self._inflate.eof:
                raise TraceError(f"{self._path}: the gzip stream is truncated. Copy the file again.")

    def _decompress(self, limit: int) -> bytes:
        source = self._inflate.unconsumed_tail or self._pending
        try:
            data = self._inflate.decompress(source, limit)
        except zlib.error as error:
            raise TraceError(f"{self._path}: the gzip stream is damaged ({error}). Copy the file again.") from error
        self._pending = b""
        self._decompressed_bytes += len(data)
        if self._decompressed_bytes > UNLIMITED_BYTES + MAX_EXPANSION * self._compressed_bytes:
            raise TraceError(
                f"{self._path}: the file expands to more than {MAX_EXPANSION} times its size, like a decompression "
                "bomb. If you trust it, decompress it with `gzip -d` and pass the result."
            )
        return data

    def _next_member(self) -> bool:
        """Begin the next gzip member if there is one; zeros after the last member are padding."""
        rest = (self._inflate.unused_data or self._file.read(CHUNK_BYTES)).lstrip(b"\0")
        self._compressed_bytes += 0 if self._inflate.unused_data else len(rest)
        if not rest.startswith(_GZIP_MAGIC):
            return False
        self._inflate = zlib.decompressobj(wbits=31)
        self._pending = rest
        return True
