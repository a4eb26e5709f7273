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
    from memtrace.analysis.aligned_curves import aligned_curve, aligned_step_peaks
    from memtrace.analysis.bandwidth import CopyBandwidths, CopyCost
    from memtrace.analysis.block_groups import (
        BlockGroup,
        ModuleCategoryGroup,
        find_owning_modules,
        group_by_category,
        group_by_module_and_category,
        group_by_module_pattern,
        group_by_site,
    )
    from memtrace.analysis.block_lifetimes import BlockLifetimes, compute_block_lifetimes
    from memtrace.analysis.block_signatures import BlockSignatures, assign_signatures, signatures_table
    from memtrace.analysis.blocks import Blocks, blocks_table
    from memtrace.analysis.cache_share import CachedStep, CacheWhatIf, DataSource, predict_cache_shares
    from memtrace.analysis.check import LimitCheck, LimitReport, MemoryLimits, check_limits, read_limits
    from memtrace.analysis.compare import (
        GroupComparison,
        Run,
        RunComparison,
        RunSummary,
        compare_runs,
        interval_quantiles,
        match_runs,
    )
    from memtrace.analysis.coverage import Coverage, compute_coverage
    from memtrace.analysis.detection import DetectedSteps, detect_steps
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
    from memtrace.analysis.fragmentation import Fragmentation, compute_fragmentation, pinned_segments_table
    from memtrace.analysis.growth import MemoryGrowth, measure_growth
    from memtrace.analysis.intervals import AccessIntervals, access_intervals, access_intervals_table
    from memtrace.analysis.leaks import LeakAnalysis, find_leaks
    from memtrace.analysis.oom import MemoryHolder, OutOfMemory, RequestRoom, explain_out_of_memory
    from memtrace.analysis.outside_memory import OutsideMemory
    from memtrace.analysis.peak import Peak, find_peak, live_blocks_at, peak_by_category, peak_by_module, peak_by_site
    from memtrace.analysis.rank_groups import MeshLayout, RankGroup, RankOutlier, parse_mesh
    from memtrace.analysis.rank_overview import RankOverview, survey_ranks
    from memtrace.analysis.rank_summary import DeviceLoad, RankSummary
    from memtrace.analysis.ranks import RankComparison, compare_ranks, ranks_table
    from memtrace.analysis.stability import AllocationFit, Stability, fit_allocations, measure_stability
    from memtrace.analysis.stalls import DataStalls, StallBreakdown, StepWait, measure_stalls
    from memtrace.analysis.step_analysis import StepAnalysis, analyze_steps
    from memtrace.analysis.step_memory import DeviceStepMemory, StepMemory, measure_step_memory
    from memtrace.analysis.steps import StepColumns, step_columns, steps_table
    from memtrace.analysis.summary import JobSummary, Summary, describe_peak, summarize, summarize_job
    from memtrace.analysis.swap import SwapCandidate, find_swap_candidates
    from memtrace.analysis.timeline import compute_timeline
    from memtrace.analysis.windows import step_window

__all__ = [
    "AccessAnalysis",
    "AccessIntervals",
    "AllocationFit",
    "BlockGroup",
    "BlockLifetimes",
    "BlockSignatures",
    "Blocks",
    "CacheWhatIf",
    "CachedStep",
    "CopyBandwidths",
    "CopyCost",
    "Coverage",
    "DataSource",
    "DataStalls",
    "DetectedSteps",
    "DeviceLoad",
    "DeviceStepMemory",
    "DeviceWaste",
    "Finding",
    "Fragmentation",
    "GroupComparison",
    "JobSummary",
    "LeakAnalysis",
    "LimitCheck",
    "LimitReport",
    "MemoryChange",
    "MemoryGrowth",
    "MemoryHolder",
    "MemoryLimits",
    "MeshLayout",
    "ModuleCategoryGroup",
    "OutOfMemory",
    "OutsideMemory",
    "Peak",
    "RankComparison",
    "RankGroup",
    "RankOutlier",
    "RankOverview",
    "RankSummary",
    "RequestRoom",
    "Run",
    "RunComparison",
    "RunSummary",
    "SkippedPatterns",
    "Stability",
    "StallBreakdown",
    "StepAnalysis",
    "StepColumns",
    "StepMemory",
    "StepPeaks",
    "StepWait",
    "Summary",
    "SwapCandidate",
    "TraceComparison",
    "TraceTotals",
    "WastedMemory",
    "access_intervals",
    "access_intervals_table",
    "aligned_curve",
    "aligned_step_peaks",
    "analyze_access",
    "analyze_steps",
    "assign_signatures",
    "blocks_table",
    "changes_table",
    "check_limits",
    "compare_ranks",
    "compare_runs",
    "compare_traces",
    "compute_block_lifetimes",
    "compute_coverage",
    "compute_fragmentation",
    "compute_timeline",
    "describe_peak",
    "detect_steps",
    "explain_out_of_memory",
    "find_device_waste",
    "find_leaks",
    "find_owning_modules",
    "find_peak",
    "find_swap_candidates",
    "find_wasted_memory",
    "findings_table",
    "fit_allocations",
    "group_by_category",
    "group_by_module_and_category",
    "group_by_module_pattern",
    "group_by_site",
    "interval_quantiles",
    "live_blocks_at",
    "match_runs",
    "measure_growth",
    "measure_stability",
    "measure_stalls",
    "measure_step_memory",
    "parse_mesh",
    "peak_by_category",
    "peak_by_module",
    "peak_by_site",
    "pinned_segments_table",
    "predict_cache_shares",
    "predict_peak_with_fixes",
    "ranks_table",
    "read_limits",
    "signatures_table",
    "step_columns",
    "step_window",
    "steps_table",
    "summarize",
    "summarize_job",
    "survey_ranks",
]

_HOMES = {
    "AccessAnalysis": "memtrace.analysis.access",
    "AccessIntervals": "memtrace.analysis.intervals",
    "AllocationFit": "memtrace.analysis.stability",
    "BlockGroup": "memtrace.analysis.block_groups",
    "BlockLifetimes": "memtrace.analysis.block_lifetimes",
    "BlockSignatures": "memtrace.analysis.block_signatures",
    "Blocks": "memtrace.analysis.blocks",
    "CacheWhatIf": "memtrace.analysis.cache_share",
    "CachedStep": "memtrace.analysis.cache_share",
    "CopyBandwidths": "memtrace.analysis.bandwidth",
    "CopyCost": "memtrace.analysis.bandwidth",
    "Coverage": "memtrace.analysis.coverage",
    "DataSource": "memtrace.analysis.cache_share",
    "DataStalls": "memtrace.analysis.stalls",
    "DetectedSteps": "memtrace.analysis.detection",
    "DeviceLoad": "memtrace.analysis.rank_summary",
    "DeviceStepMemory": "memtrace.analysis.step_memory",
    "DeviceWaste": "memtrace.analysis.findings",
    "Finding": "memtrace.analysis.findings",
    "Fragmentation": "memtrace.analysis.fragmentation",
    "GroupComparison": "memtrace.analysis.compare",
    "JobSummary": "memtrace.analysis.summary",
    "LeakAnalysis": "memtrace.analysis.leaks",
    "LimitCheck": "memtrace.analysis.check",
    "LimitReport": "memtrace.analysis.check",
    "MemoryChange": "memtrace.analysis.diff",
    "MemoryGrowth": "memtrace.analysis.growth",
    "MemoryHolder": "memtrace.analysis.oom",
    "MemoryLimits": "memtrace.analysis.check",
    "MeshLayout": "memtrace.analysis.rank_groups",
    "ModuleCategoryGroup": "memtrace.analysis.block_groups",
    "OutOfMemory": "memtrace.analysis.oom",
    "OutsideMemory": "memtrace.analysis.outside_memory",
    "Peak": "memtrace.analysis.peak",
    "RankComparison": "memtrace.analysis.ranks",
    "RankGroup": "memtrace.analysis.rank_groups",
    "RankOutlier": "memtrace.analysis.rank_groups",
    "RankOverview": "memtrace.analysis.rank_overview",
    "RankSummary": "memtrace.analysis.rank_summary",
    "RequestRoom": "memtrace.analysis.oom",
    "Run": "memtrace.analysis.compare",
    "RunComparison": "memtrace.analysis.compare",
    "RunSummary": "memtrace.analysis.compare",
    "SkippedPatterns": "memtrace.analysis.findings",
    "Stability": "memtrace.analysis.stability",
    "StallBreakdown": "memtrace.analysis.stalls",
    "StepAnalysis": "memtrace.analysis.step_analysis",
    "StepColumns": "memtrace.analysis.steps",
    "StepMemory": "memtrace.analysis.step_memory",
    "StepPeaks": "memtrace.analysis.diff",
    "StepWait": "memtrace.analysis.stalls",
    "Summary": "memtrace.analysis.summary",
    "SwapCandidate": "memtrace.analysis.swap",
    "TraceComparison": "memtrace.analysis.diff",
    "TraceTotals": "memtrace.analysis.diff",
    "WastedMemory": "memtrace.analysis.findings",
    "access_intervals": "memtrace.analysis.intervals",
    "access_intervals_table": "memtrace.analysis.intervals",
    "aligned_curve": "memtrace.analysis.aligned_curves",
    "aligned_step_peaks": "memtrace.analysis.aligned_curves",
    "analyze_access": "memtrace.analysis.access",
    "analyze_steps": "memtrace.analysis.step_analysis",
    "assign_signatures": "memtrace.analysis.block_signatures",
    "blocks_table": "memtrace.analysis.blocks",
    "changes_table": "memtrace.analysis.diff",
    "check_limits": "memtrace.analysis.check",
    "compare_ranks": "memtrace.analysis.ranks",
    "compare_runs": "memtrace.analysis.compare",
    "compare_traces": "memtrace.analysis.diff",
    "compute_block_lifetimes": "memtrace.analysis.block_lifetimes",
    "compute_coverage": "memtrace.analysis.coverage",
    "compute_fragmentation": "memtrace.analysis.fragmentation",
    "compute_timeline": "memtrace.analysis.timeline",
    "describe_peak": "memtrace.analysis.summary",
    "detect_steps": "memtrace.analysis.detection",
    "explain_out_of_memory": "memtrace.analysis.oom",
    "find_device_waste": "memtrace.analysis.findings",
    "find_leaks": "memtrace.analysis.leaks",
    "find_owning_modules": "memtrace.analysis.block_groups",
    "find_peak": "memtrace.analysis.peak",
    "find_swap_candidates": "memtrace.analysis.swap",
    "find_wasted_memory": "memtrace.analysis.findings",
    "findings_table": "memtrace.analysis.findings",
    "fit_allocations": "memtrace.analysis.stability",
    "group_by_category": "memtrace.analysis.block_groups",
    "group_by_module_and_category": "memtrace.analysis.block_groups",
    "group_by_module_pattern": "memtrace.analysis.block_groups",
    "group_by_site": "memtrace.analysis.block_groups",
    "interval_quantiles": "memtrace.analysis.compare",
    "live_blocks_at": "memtrace.analysis.peak",
    "match_runs": "memtrace.analysis.compare",
    "measure_growth": "memtrace.analysis.growth",
    "measure_stability": "memtrace.analysis.stability",
    "measure_stalls": "memtrace.analysis.stalls",
    "measure_step_memory": "memtrace.analysis.step_memory",
    "parse_mesh": "memtrace.analysis.rank_groups",
    "peak_by_category": "memtrace.analysis.peak",
    "peak_by_module": "memtrace.analysis.peak",
    "peak_by_site": "memtrace.analysis.peak",
    "pinned_segments_table": "memtrace.analysis.fragmentation",
    "predict_cache_shares": "memtrace.analysis.cache_share",
    "predict_peak_with_fixes": "memtrace.analysis.findings",
    "ranks_table": "memtrace.analysis.ranks",
    "read_limits": "memtrace.analysis.check",
    "signatures_table": "memtrace.analysis.block_signatures",
    "step_columns": "memtrace.analysis.steps",
    "step_window": "memtrace.analysis.windows",
    "steps_table": "memtrace.analysis.steps",
    "summarize": "memtrace.analysis.summary",
    "summarize_job": "memtrace.analysis.summary",
    "survey_ranks": "memtrace.analysis.rank_overview",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memtrace.analysis' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
