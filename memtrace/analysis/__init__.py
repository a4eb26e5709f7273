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
    from memtrace.analysis.blocks import blocks_table
    from memtrace.analysis.coverage import compute_coverage
    from memtrace.analysis.ranks import RankComparison, RankSummary, compare_ranks, ranks_table
    from memtrace.analysis.steps import steps_table

__all__ = [
    "RankComparison",
    "RankSummary",
    "blocks_table",
    "compare_ranks",
    "compute_coverage",
    "ranks_table",
    "steps_table",
]

_HOMES = {
    "RankComparison": "memtrace.analysis.ranks",
    "RankSummary": "memtrace.analysis.ranks",
    "blocks_table": "memtrace.analysis.blocks",
    "compare_ranks": "memtrace.analysis.ranks",
    "compute_coverage": "memtrace.analysis.coverage",
    "ranks_table": "memtrace.analysis.ranks",
    "steps_table": "memtrace.analysis.steps",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memtrace.analysis' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
