"""memtrace: a memory profiler for PyTorch training.

    with memtrace.record("run.memtrace"):
        train()

    trace = memtrace.load("run.memtrace")

Attributes are imported on first use, so that ``import memtrace`` imports neither torch nor pandas.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrace.errors import MemtraceError, TraceError
    from memtrace.recording.session import record
    from memtrace.trace import Trace, load

__version__ = "0.1.0"
__all__ = ["MemtraceError", "Trace", "TraceError", "load", "record"]

_HOMES = {
    "MemtraceError": "memtrace.errors",
    "TraceError": "memtrace.errors",
    "Trace": "memtrace.trace",
    "load": "memtrace.trace",
    "record": "memtrace.recording.session",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memtrace' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
