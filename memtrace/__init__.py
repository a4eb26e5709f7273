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
    from memtrace.execution.application import apply
    from memtrace.integrations.ipython import load_ipython_extension
    from memtrace.planning.plan import Plan, read_plan, write_plan
    from memtrace.recording.session import record
    from memtrace.trace import Trace, load

__version__ = "0.1.0"
__all__ = [
    "MemtraceError",
    "Plan",
    "Trace",
    "TraceError",
    "apply",
    "load",
    "load_ipython_extension",
    "read_plan",
    "record",
    "write_plan",
]

_HOMES = {
    "MemtraceError": "memtrace.errors",
    "TraceError": "memtrace.errors",
    "Plan": "memtrace.planning.plan",
    "Trace": "memtrace.trace",
    "apply": "memtrace.execution.application",
    "load": "memtrace.trace",
    "load_ipython_extension": "memtrace.integrations.ipython",
    "read_plan": "memtrace.planning.plan",
    "record": "memtrace.recording.session",
    "write_plan": "memtrace.planning.plan",
}

_MODULES = ("analysis", "planning", "plots")
"""Modules that are attributes without being imported."""


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"memtrace.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'memtrace' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
