"""The HTML page of a trace: ``report`` writes it."""

from __future__ import annotations

from memtrace.dashboards.page import report
from memtrace.dashboards.source_lines import SourceOptions

__all__ = ["SourceOptions", "report"]
