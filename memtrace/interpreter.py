"""Another interpreter beside this one, for work that this process must not or cannot do itself."""

from __future__ import annotations

import os
import sys


def run_python(code: str, argument: str, *, silent: bool) -> int:
    """Run ``code`` in a new interpreter that imports from where this one does; its exit status, negative for a signal.

    It reads no input and prints nothing; ``silent``: not even errors.
    """
    import subprocess

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    nothing = subprocess.DEVNULL
    return subprocess.run(
        [sys.executable, "-c", code, argument],
        check=False,
        env=environment,
        stdin=nothing,
        stdout=nothing,
        stderr=nothing if silent else None,
    ).returncode
