"""What follows from a trace: each module answers one question, each function takes a ``Trace``.

    trace = memtrace.load("run.memtrace")
    memtrace.analysis.compute_coverage(trace)
    memtrace.analysis.blocks_table(trace).nlargest(10, "size")

Functions are imported on first use, so that ``import memtrace.analysis`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrace.analysis.blocks import Blocks, blocks_table
    from memtrace.analysis.coverage import Coverage, compute_coverage
    from memtrace.analysis.steps import steps_table
    from memtrace.analysis.windows import step_window

__all__ = ["Blocks", "Coverage", "blocks_table", "compute_coverage", "step_window", "steps_table"]

_HOMES = {
    "Blocks": "memtrace.analysis.blocks",
    "Coverage": "memtrace.analysis.coverage",
    "blocks_table": "memtrace.analysis.blocks",
    "compute_coverage": "memtrace.analysis.coverage",
    "step_window": "memtrace.analysis.windows",
    "steps_table": "memtrace.analysis.steps",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memtrace.analysis' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
