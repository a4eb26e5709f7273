"""The versions of Python and torch that recordings are tested with."""

from __future__ import annotations

import re
import sys
from typing import Final

Version = tuple[int, int]

TESTED: Final[tuple[tuple[Version, Version], ...]] = (
    ((3, 10), (2, 9)),
    ((3, 11), (2, 10)),
    ((3, 12), (2, 11)),
    ((3, 13), (2, 12)),
    ((3, 11), (2, 13)),
    ((3, 12), (2, 14)),
    ((3, 13), (2, 15)),
    ((3, 14), (2, 15)),
)
"""Versions of Python and torch that CI and ``make test-compat`` install together, from the oldest to the newest."""
OLDEST_PYTHON: Final = min(python for python, _ in TESTED)
NEWEST_PYTHON: Final = max(python for python, _ in TESTED)
OLDEST_TORCH: Final = min(torch for _, torch in TESTED)
NEWEST_TORCH: Final = max(torch for _, torch in TESTED)


def describe_untested_versions() -> str | None:
    """Return which of this process's versions is outside the tested range; None if both are inside.

    The native observer uses interfaces of torch that are not public, so it is not used with versions that were never
    tried.
    """
    import torch

    python = sys.version_info[:2]
    if not OLDEST_PYTHON <= python <= NEWEST_PYTHON:
        return _outside("Python", format_version(python), OLDEST_PYTHON, NEWEST_PYTHON)
    numbers = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    version = (int(numbers[1]), int(numbers[2])) if numbers else None
    if version is None or not OLDEST_TORCH <= version <= NEWEST_TORCH:
        return _outside("torch", str(torch.__version__), OLDEST_TORCH, NEWEST_TORCH)
    return None


def _outside(package: str, version: str, oldest: Version, newest: Version) -> str:
    return f"{package} {version} is outside the tested range {format_version(oldest)} to {format_version(newest)}"


def format_version(version: Version) -> str:
    """Return a version as it is written: 3.10."""
    return ".".join(map(str, version))
