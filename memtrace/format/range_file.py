"""A file of a storage that is read in ranges."""

from __future__ import annotations

import io
import os
from typing import Any

from memtrace.format.storage import StoragePath


class RangeFile(io.RawIOBase):
    """A file of a storage that is read in ranges, one request for each.

    Args:
        path: the file.
        size_bytes: its size.
        tail: its last bytes, which are known already.
    """

    def __init__(self, path: StoragePath, size_bytes: int, tail: bytes = b"") -> None:
        super().__init__()
        self._path = path
        self._size_bytes = size_bytes
        self._tail = tail
        self._place = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a place in the file and return it."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size_bytes}[whence]
        self._place = max(0, base + offset)
        return self._place

    def tell(self) -> int:
        """Return the place of the next byte to read."""
        return self._place

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes."""
        start = min(self._place, self._size_bytes)
        end = self._size_bytes if size is None or size < 0 else min(self._size_bytes, start + size)
        tail_start = self._size_bytes - len(self._tail)
        if start >= tail_start:
            content = self._tail[start - tail_start : end - tail_start]
        else:
            content = self._path.read_range(start, end)
        self._place = end
        return content

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer and return the number of bytes written to it."""
        view = memoryview(buffer).cast("B")
        content = self.read(len(view))
        view[: len(content)] = content
        return len(content)
