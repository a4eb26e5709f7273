"""What a fix is: one change to a program, and what it would save. ``fixes.py`` finds them."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Final

from memtrace.trace import Trace
from memtrace.units import format_bytes

NO_COST: Final = "none"


@dataclass(frozen=True)
class Fix:
    """One change, and what it would save."""

    what: str
    """What to change and where, in a sentence."""
    paste: str | None
    """What to paste: an environment setting, code, or a command; None: the sentence says it all."""
    saved_bytes: int
    """By how much it lowers the peak: of the requested bytes, or of the reserved bytes for a setting of the
    allocator."""
    cost: str
    """What it costs, such as ``4 % longer steps``."""
    is_enough: bool | None
    """Whether memory would have sufficed: for the request that failed, or within the capacity that the user states.
    None: unknown."""


def describe_saving(fix: Fix) -> str:
    """Return sentences such as ``Saves 2.00 GiB, which is enough. Cost: 4 % longer steps.``"""
    enough = {True: ", which is enough", False: ", which alone is not enough", None: ""}
    return f"Saves {format_bytes(fix.saved_bytes)}{enough[fix.is_enough]}. Cost: {fix.cost.rstrip('.')}."


def trace_argument(trace: Trace) -> str:
    """Return a trace as an argument of a shell command."""
    return shlex.quote(str(trace.path)) if trace.path else "TRACE"


@dataclass(frozen=True)
class Shortfall:
    """By how much memory was too small."""

    lacking_bytes: int
    """A saving below this is not enough."""
    certain_bytes: int
    """A saving from this on is enough; in between it depends on where the freed blocks lie."""

    def is_covered_by(self, saved_bytes: int) -> bool | None:
        """Return whether a saving is enough; None: it depends on where the freed blocks lie."""
        if saved_bytes >= self.certain_bytes:
            return True
        return False if saved_bytes < self.lacking_bytes else None
