"""A window of steps of a trace, whether its steps were marked or are found in the events."""

from __future__ import annotations

from memtrace.errors import TraceError
from memtrace.trace import Trace


def step_window(trace: Trace, first_step: int | None, last_step: int | None) -> Trace:
    """Return the part of a trace from the start of ``first_step`` to the end of ``last_step``."""
    raise TraceError(f"{trace.path}: windows of steps are not supported yet; leave out --from-step and --to-step")
