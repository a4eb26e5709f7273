"""Runs the command line in a process of its own, as a user does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_memtrace(
    *arguments: str | Path, cwd: Path | None = None, columns: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``memtrace`` with these arguments; ``columns`` is the width of the output."""
    environment = dict(os.environ)
    environment.pop("COLUMNS", None)
    if columns is not None:
        environment["COLUMNS"] = str(columns)
    command = [sys.executable, "-m", "memtrace.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)
