"""The versions of Python and torch that recordings are tested with."""

from __future__ import annotations

import re
import sys
from typing import Final

OLDEST_PYTHON: Final = (3, 10)
NEWEST_PYTHON: Final = (3, 14)
OLDEST_TORCH: Final = (2, 9)
NEWEST_TORCH: Final = (2, 15)


def describe_untested_versions() -> str | None:
    """Return which of this process's versions is outside the tested range; None if both are inside.

    The native observer uses interfaces of torch that are not public, so it is not used with versions that were never
    tried.
    """
    import torch

    python = sys.version_info[:2]
    if not OLDEST_PYTHON <= python <= NEWEST_PYTHON:
        return f"Python {_text(python)} is outside the tested range {_text(OLDEST_PYTHON)} to {_text(NEWEST_PYTHON)}"
    numbers = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    version = (int(numbers[1]), int(numbers[2])) if numbers else None
    if version is None or not OLDEST_TORCH <= version <= NEWEST_TORCH:
        return f"torch {torch.__version__} is outside the tested range {_text(OLDEST_TORCH)} to {_text(NEWEST_TORCH)}"
    return None


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
