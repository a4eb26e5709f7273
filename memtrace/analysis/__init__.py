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
    from memtrace.analysis.check import LimitCheck, LimitReport, MemoryLimits, check_limits, read_limits
    from memtrace.analysis.coverage import compute_coverage
    from memtrace.analysis.diff import (
        MemoryChange,
        StepPeaks,
        TraceComparison,
        TraceTotals,
        changes_table,
        compare_traces,
    )
    from memtrace.analysis.findings import (
        DeviceWaste,
        Finding,
        SkippedPatterns,
        WastedMemory,
        find_device_waste,
        find_wasted_memory,
        findings_table,
        predict_peak_with_fixes,
    )
    from memtrace.analysis.hints import Hint, find_hints
    from memtrace.analysis.stalls import DataStalls, StallBreakdown, StepWait, measure_stalls
    from memtrace.analysis.steps import steps_table

__all__ = [
    "DataStalls",
    "DeviceWaste",
    "Finding",
    "Hint",
    "LimitCheck",
    "LimitReport",
    "MemoryChange",
    "MemoryLimits",
    "SkippedPatterns",
    "StallBreakdown",
    "StepPeaks",
    "StepWait",
    "TraceComparison",
    "TraceTotals",
    "WastedMemory",
    "blocks_table",
    "changes_table",
    "check_limits",
    "compare_traces",
    "compute_coverage",
    "find_device_waste",
    "find_hints",
    "find_wasted_memory",
    "findings_table",
    "measure_stalls",
    "predict_peak_with_fixes",
    "read_limits",
    "steps_table",
]

_HOMES = {
    "DataStalls": "memtrace.analysis.stalls",
    "DeviceWaste": "memtrace.analysis.findings",
    "Finding": "memtrace.analysis.findings",
    "Hint": "memtrace.analysis.hints",
    "LimitCheck": "memtrace.analysis.check",
    "LimitReport": "memtrace.analysis.check",
    "MemoryChange": "memtrace.analysis.diff",
    "MemoryLimits": "memtrace.analysis.check",
    "SkippedPatterns": "memtrace.analysis.findings",
    "StallBreakdown": "memtrace.analysis.stalls",
    "StepPeaks": "memtrace.analysis.diff",
    "StepWait": "memtrace.analysis.stalls",
    "TraceComparison": "memtrace.analysis.diff",
    "TraceTotals": "memtrace.analysis.diff",
    "WastedMemory": "memtrace.analysis.findings",
    "blocks_table": "memtrace.analysis.blocks",
    "changes_table": "memtrace.analysis.diff",
    "check_limits": "memtrace.analysis.check",
    "compare_traces": "memtrace.analysis.diff",
    "compute_coverage": "memtrace.analysis.coverage",
    "find_device_waste": "memtrace.analysis.findings",
    "find_hints": "memtrace.analysis.hints",
    "find_wasted_memory": "memtrace.analysis.findings",
    "findings_table": "memtrace.analysis.findings",
    "measure_stalls": "memtrace.analysis.stalls",
    "predict_peak_with_fixes": "memtrace.analysis.findings",
    "read_limits": "memtrace.analysis.check",
    "steps_table": "memtrace.analysis.steps",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memtrace.analysis' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
