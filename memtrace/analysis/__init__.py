"""Analyses of a trace: each module answers one question, and its functions take a ``Trace``.

    trace = memtrace.load("run.memtrace")
    memtrace.analysis.compute_coverage(trace)
    memtrace.analysis.blocks_table(trace).nlargest(10, "size")

Names are imported on first use, so that ``import memtrace.analysis`` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from memtrace.analysis.blocks import blocks_table
    from memtrace.analysis.coverage import compute_coverage
    from memtrace.analysis.peak import Peak, find_peak, live_blocks_at, peak_by_category, peak_by_module, peak_by_site
    from memtrace.analysis.steps import steps_table
    from memtrace.analysis.summary import JobSummary, Summary, describe_peak, summarize, summarize_job
    from memtrace.analysis.timeline import compute_timeline

__all__ = [
    "BlockGroup",
    "BlockLifetimes",
    "JobSummary",
    "ModuleCategoryGroup",
    "Peak",
    "Summary",
    "blocks_table",
    "compute_block_lifetimes",
    "compute_coverage",
    "compute_timeline",
    "describe_peak",
    "find_owning_modules",
    "find_peak",
    "group_by_category",
    "group_by_module_and_category",
    "group_by_module_pattern",
    "group_by_site",
    "live_blocks_at",
    "peak_by_category",
    "peak_by_module",
    "peak_by_site",
    "steps_table",
    "summarize",
    "summarize_job",
]

_HOMES = {
    "BlockGroup": "memtrace.analysis.block_groups",
    "BlockLifetimes": "memtrace.analysis.block_lifetimes",
    "JobSummary": "memtrace.analysis.summary",
    "ModuleCategoryGroup": "memtrace.analysis.block_groups",
    "Peak": "memtrace.analysis.peak",
    "Summary": "memtrace.analysis.summary",
    "blocks_table": "memtrace.analysis.blocks",
    "compute_block_lifetimes": "memtrace.analysis.block_lifetimes",
    "compute_coverage": "memtrace.analysis.coverage",
    "compute_timeline": "memtrace.analysis.timeline",
    "describe_peak": "memtrace.analysis.summary",
    "find_owning_modules": "memtrace.analysis.block_groups",
    "find_peak": "memtrace.analysis.peak",
    "group_by_category": "memtrace.analysis.block_groups",
    "group_by_module_and_category": "memtrace.analysis.block_groups",
    "group_by_module_pattern": "memtrace.analysis.block_groups",
    "group_by_site": "memtrace.analysis.block_groups",
    "live_blocks_at": "memtrace.analysis.peak",
    "peak_by_category": "memtrace.analysis.peak",
    "peak_by_module": "memtrace.analysis.peak",
    "peak_by_site": "memtrace.analysis.peak",
    "steps_table": "memtrace.analysis.steps",
    "summarize": "memtrace.analysis.summary",
    "summarize_job": "memtrace.analysis.summary",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'memtrace.analysis' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
