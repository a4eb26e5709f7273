"""Fixtures of the reader tests. Each real file is read once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from memtrace.cli.output import json_value

import memtrace
from memtrace.analysis.summary import summarize as summarize_trace


@pytest.fixture(scope="session")
def load_real_file(data: Path) -> Callable[[str], memtrace.Trace]:
    """Return the trace of a file of ``shared/data``, by its path there."""

    @cache
    def load(name: str) -> memtrace.Trace:
        return memtrace.load(data / name)

    return load


@pytest.fixture(scope="session")
def summarize_real_file(load_real_file: Callable[[str], memtrace.Trace]) -> Callable[[str], dict[str, Any]]:
    """Return the summary of a file of ``shared/data`` as ``memtrace summary --json`` prints it."""

    @cache
    def summarize(name: str) -> dict[str, Any]:
        summary_json: dict[str, Any] = json_value(summarize_trace(load_real_file(name)))
        return summary_json

    return summarize
