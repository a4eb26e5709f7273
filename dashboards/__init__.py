"""The HTML page of a trace."""

from __future__ import annotations

from memtrace.dashboards.page import report

__all__ = ["report"]
