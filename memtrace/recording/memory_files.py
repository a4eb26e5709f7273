"""Parts of a trace that stay in memory until they are needed on disk (``memtrace.record(on_oom=True)``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from memtrace.format.files import replace_file

MAX_HELD_BYTES: Final = 256 << 20
"""Most bytes of compressed parts that are kept, however few steps they contain."""

Check = Callable[[Path], object] | None


class MemoryFiles:
    """Takes the place of ``format.files.replace_file`` for the parts of one trace.

    After ``save``, the folder contains what a recording on disk would have there: what was deleted since the last
    ``save`` is deleted, and what is new is written.
    """

    def __init__(self) -> None:
        self._held: dict[str, tuple[bytes, Check]] = {}  # by name, in the order of writing
        self._saved: set[str] = set()
        self._stale: list[str] = []

    @property
    def num_bytes(self) -> int:
        """Bytes in memory."""
        return sum(len(content) for content, _ in self._held.values())

    def write(self, path: Path, content: bytes | memoryview, check: Check = None) -> None:
        """Keep a file; see ``replace_file``. ``check`` is called when the file is saved."""
        self._held[path.name] = (bytes(content), check)

    def delete(self, path: Path) -> None:
        """Delete a file, on disk with the next ``save``."""
        self._held.pop(path.name, None)
        if path.name in self._saved:
            self._saved.remove(path.name)
            self._stale.append(path.name)

    def save(self, folder: Path) -> None:
        """Bring a folder up to date. Raises OSError."""
        while self._stale:
            (folder / self._stale.pop(0)).unlink(missing_ok=True)
        while self._held:
            name = next(iter(self._held))
            content, check = self._held[name]
            replace_file(folder / name, content, check)
            self._saved.add(name)
            self._held.pop(name)


def delete_file(path: Path) -> None:
    """Delete a file on disk, if it is there."""
    path.unlink(missing_ok=True)
