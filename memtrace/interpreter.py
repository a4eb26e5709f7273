"""Runs Python code in a separate process."""

from __future__ import annotations

import os
import sys


def run_python(code: str, argument: str, *, silent: bool) -> int:
    """Run ``code`` in a new Python process with the import path of this one, and wait for it.

    The process has no input, and its standard output is discarded.

    Args:
        code: Python source.
        argument: ``sys.argv[1]`` of the process.
        silent: whether to discard its standard error too.

    Returns:
        The exit status; the negative signal number if a signal ended the process.
    """
    import subprocess

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    discard = subprocess.DEVNULL
    return subprocess.run(
        [sys.executable, "-c", code, argument],
        check=False,
        env=environment,
        stdin=discard,
        stdout=discard,
        stderr=discard if silent else None,
    ).returncode
