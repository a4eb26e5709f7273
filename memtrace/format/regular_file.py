"""Refuses what is not a file on disk: reading from a pipe or a device does not end."""

from __future__ import annotations

import stat
from pathlib import Path


def require_regular_file(path: Path, max_bytes: int | None = None) -> None:
    """Raise OSError where ``path`` is a folder, a pipe or a device, or is larger than ``max_bytes``."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError("not a regular file")
    if max_bytes is not None and status.st_size > max_bytes:
        raise OSError(f"larger than {max_bytes:,} bytes")
