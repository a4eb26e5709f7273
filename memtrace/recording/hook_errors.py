"""Keeps errors of memtrace's own hooks away from the recorded program."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec

from memtrace.errors import MemtraceError
from memtrace.recording.untraced import never_compiled

logger = logging.getLogger("memtrace")
_Parameters = ParamSpec("_Parameters")
_WHAT_IS_MISSING: Final = "names, labels, steps and phases are missing in the trace from then on"


class HookErrors:
    """Counts the errors of hooks. The first one is reported and ends the work of all hooks; the program continues.

    Only exceptions are caught. A KeyboardInterrupt that arrives while a hook runs belongs to the program.

    Args:
        add_note: receives the sentence for the manifest.

    Attributes:
        num_errors: the number of errors so far.
    """

    def __init__(self, add_note: Callable[[str], None]) -> None:
        self._add_note = add_note
        self.num_errors = 0

    def caught(self, error: Exception) -> None:
        """Take note of an error, unless the program is at its recursion limit, where any call fails."""
        if isinstance(error, RecursionError):
            return
        self.num_errors += 1
        if self.num_errors == 1:
            self.report(f"a hook of memtrace failed ({type(error).__name__}: {error}); {_WHAT_IS_MISSING}")

    def note(self, text: str) -> None:
        """Add a note to the manifest, without a warning."""
        self._add_note(text)

    def report(self, text: str) -> None:
        """Warn the user and add a note to the manifest."""
        self._add_note(text)
        try:
            logger.warning("memtrace: training continues, but %s", text)
        except Exception:  # a logging handler of the program
            self.num_errors += 1

    def protect(self, hook: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
        """Return ``hook`` without its exceptions, which does nothing after the first error of any hook."""

        @wraps(hook)
        def protected(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> None:
            if self.num_errors == 0:
                try:
                    hook(*args, **kwargs)
                except Exception as error:
                    self.caught(error)

        return never_compiled(protected)


def describe_error(error: BaseException) -> str:
    """Return what an error of memtrace's says, for a warning."""
    if isinstance(error, MemoryError):
        return f"out of memory: {error}" if str(error) else "out of memory"
    return str(error) if isinstance(error, (OSError, MemtraceError)) else f"{type(error).__name__}: {error}"
