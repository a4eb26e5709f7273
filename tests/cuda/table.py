"""Pytest plugin (``-p tests.cuda.table``) that prints the table of programs and settings at the end."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from tests.cuda.programs import PROGRAMS
from tests.cuda.settings import SETTINGS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table of programs and settings."""
    outcomes: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "cuda_case" and report.when == "call":
                    program, setting, outcome = value
                    outcomes[program, setting][outcome] += 1
    if not outcomes:
        return
    width = max(map(len, PROGRAMS))
    columns = [(setting, max(len(setting), 9)) for setting in SETTINGS]
    terminalreporter.section("CUDA recordings compared with torch's own history")
    terminalreporter.line(
        "equal: recording and torch's history are equal, and the allocator's model replays it; recording, plan: what differs"
    )
    terminalreporter.line("  ".join([" " * width, *(setting.ljust(size) for setting, size in columns)]).rstrip())
    for program in PROGRAMS:
        cells = [format_cell(outcomes[program, setting]).ljust(size) for setting, size in columns]
        terminalreporter.line("  ".join([program.ljust(width), *cells]).rstrip())


def format_cell(outcomes: Counter[str]) -> str:
    """Return the cell of a program under a setting: its outcome, and of several runs how many had it."""
    if not outcomes:
        return "-"
    parts = sorted(outcomes.items(), key=lambda item: item[0] == "equal")
    return ", ".join(outcome if outcomes.total() == 1 else f"{outcome} {number}" for outcome, number in parts)
