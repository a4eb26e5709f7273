"""Traces in the formats of other tools: Perfetto, pprof, speedscope, PyTorch's memory_viz, Chrome traces and CSV.

    from memtrace.exporters import export_trace

    export_trace(memtrace.load("run.memtrace"), "run.pftrace", format="perfetto")

The function is imported on first use, so that ``import memtrace.exporters`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memtrace.exporters.options import FORMATS, MEASURES

if TYPE_CHECKING:
    from memtrace.exporters.formats import export_trace

__all__ = ["FORMATS", "MEASURES", "export_trace"]


def __getattr__(name: str) -> Any:
    if name == "export_trace":
        return import_module("memtrace.exporters.formats").export_trace
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
