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
    from memtrace.analysis.fragmentation import Fragmentation, compute_fragmentation, pinned_segments_table
    from memtrace.analysis.oom import MemoryHolder, OutOfMemory, RequestRoom, explain_out_of_memory
    from memtrace.analysis.steps import steps_table

__all__ = [
    "Fragmentation",
    "MemoryHolder",
    "OutOfMemory",
    "RequestRoom",
    "blocks_table",
    "compute_coverage",
    "compute_fragmentation",
    "explain_out_of_memory",
    "pinned_segments_table",
    "steps_table",
]

_HOMES = {
    "Fragmentation": "memtrace.analysis.fragmentation",
    "MemoryHolder": "memtrace.analysis.oom",
    "OutOfMemory": "memtrace.analysis.oom",
    "RequestRoom": "memtrace.analysis.oom",
    "blocks_table": "memtrace.analysis.blocks",
    "compute_coverage": "memtrace.analysis.coverage",
    "compute_fragmentation": "memtrace.analysis.fragmentation",
    "explain_out_of_memory": "memtrace.analysis.oom",
    "pinned_segments_table": "memtrace.analysis.fragmentation",
    "steps_table": "memtrace.analysis.steps",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memtrace.analysis' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
