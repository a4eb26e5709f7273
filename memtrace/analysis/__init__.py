"""Analysis of traces: each module answers one question, each function takes a ``Trace`` of one rank.

    trace = memtrace.load("run.memtrace")
    memtrace.analysis.find_leaks(trace).bytes_per_step
    memtrace.analysis.blocks_table(trace).nlargest(10, "size")

Functions are imported on first use, so that ``import memtrace.analysis`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from memtrace.analysis.access import AccessAnalysis, analyze_access
    from memtrace.analysis.bandwidth import CopyBandwidths, CopyCost, measure_bandwidths
    from memtrace.analysis.block_signatures import BlockSignatures, assign_signatures, signatures_table
    from memtrace.analysis.blocks import blocks_table
    from memtrace.analysis.coverage import compute_coverage
    from memtrace.analysis.detection import DetectedSteps, detect_steps
    from memtrace.analysis.growth import MemoryGrowth, measure_growth
    from memtrace.analysis.intervals import AccessIntervals, access_intervals, access_intervals_table
    from memtrace.analysis.leaks import LeakAnalysis, find_leaks
    from memtrace.analysis.stability import AllocationFit, Stability, fit_allocations, measure_stability
    from memtrace.analysis.step_analysis import StepAnalysis, analyze_steps
    from memtrace.analysis.steps import StepColumns, step_columns, steps_table
    from memtrace.analysis.swap import SwapCandidate, find_swap_candidates

__all__ = [
    "AccessAnalysis",
    "AccessIntervals",
    "AllocationFit",
    "BlockSignatures",
    "CopyBandwidths",
    "CopyCost",
    "DetectedSteps",
    "LeakAnalysis",
    "MemoryGrowth",
    "Stability",
    "StepAnalysis",
    "StepColumns",
    "SwapCandidate",
    "access_intervals",
    "access_intervals_table",
    "analyze_access",
    "analyze_steps",
    "assign_signatures",
    "blocks_table",
    "compute_coverage",
    "detect_steps",
    "find_leaks",
    "find_swap_candidates",
    "fit_allocations",
    "measure_bandwidths",
    "measure_growth",
    "measure_stability",
    "signatures_table",
    "step_columns",
    "steps_table",
]

_HOMES = {
    "AccessAnalysis": "memtrace.analysis.access",
    "AccessIntervals": "memtrace.analysis.intervals",
    "AllocationFit": "memtrace.analysis.stability",
    "BlockSignatures": "memtrace.analysis.block_signatures",
    "CopyBandwidths": "memtrace.analysis.bandwidth",
    "CopyCost": "memtrace.analysis.bandwidth",
    "DetectedSteps": "memtrace.analysis.detection",
    "LeakAnalysis": "memtrace.analysis.leaks",
    "MemoryGrowth": "memtrace.analysis.growth",
    "Stability": "memtrace.analysis.stability",
    "StepAnalysis": "memtrace.analysis.step_analysis",
    "StepColumns": "memtrace.analysis.steps",
    "SwapCandidate": "memtrace.analysis.swap",
    "access_intervals": "memtrace.analysis.intervals",
    "access_intervals_table": "memtrace.analysis.intervals",
    "analyze_access": "memtrace.analysis.access",
    "analyze_steps": "memtrace.analysis.step_analysis",
    "assign_signatures": "memtrace.analysis.block_signatures",
    "blocks_table": "memtrace.analysis.blocks",
    "compute_coverage": "memtrace.analysis.coverage",
    "detect_steps": "memtrace.analysis.detection",
    "find_leaks": "memtrace.analysis.leaks",
    "find_swap_candidates": "memtrace.analysis.swap",
    "fit_allocations": "memtrace.analysis.stability",
    "measure_bandwidths": "memtrace.analysis.bandwidth",
    "measure_growth": "memtrace.analysis.growth",
    "measure_stability": "memtrace.analysis.stability",
    "signatures_table": "memtrace.analysis.block_signatures",
    "step_columns": "memtrace.analysis.steps",
    "steps_table": "memtrace.analysis.steps",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memtrace.analysis' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
