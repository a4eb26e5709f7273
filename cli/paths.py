"""The type of arguments that name a file or folder, on disk or in a storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from memtrace.format.storage import AnyPath, StoragePath, to_path


class PathOrUrl(click.Path):
    """A path on disk, or a URL of a storage; the value is a ``Path`` or a ``StoragePath``."""

    def convert(  # type: ignore[override]
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> AnyPath:
        """Return the path; what is on disk is checked as ``click.Path`` does."""
        path = to_path(value)
        return path if isinstance(path, StoragePath) else Path(str(super().convert(str(path), param, ctx)))
