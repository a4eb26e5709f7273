"""The HTML page of a trace: ``report`` writes it."""

from __future__ import annotations

from memtrace.dashboards.page import report

__all__ = ["report"]
