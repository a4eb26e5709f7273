"""pytest plugin: the peak memory of each test, limits for it, and a report of the tests with the highest peaks.

Installed with memtrace. It does nothing without ``--memtrace`` (or ``memtrace = true`` in the configuration of pytest).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from memtrace.units import format_bytes

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

MARKER: Final = "limit_memory"
OWN_MARKER: Final = "memtrace_limit"
MEMRAY_PLUGIN: Final = "memray"
"""Name of pytest-memray, whose marker ``limit_memory`` it acts on with or without ``--memray``."""
DEFAULT_TOP: Final = 10
_USAGE: Final = (
    "(peak, *, max_growth=None): with --memtrace, fail the test if its memory rises by more than peak, such as "
    '"100 MiB", above what is live when it begins, or if it grows by more than max_growth per training step.'
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of memtrace."""
    group = parser.getgroup("memtrace", "memory of PyTorch tests")
    group.addoption("--memtrace", action="store_true", help="record the memory of each test and check its limits")
    group.addoption("--memtrace-top", type=int, default=DEFAULT_TOP, metavar="N",
                    help="report the N tests with the highest peaks (default: %(default)s)")  # fmt: skip
    group.addoption("--memtrace-dir", metavar="DIR",
                    help="keep the trace of each test in DIR; by default traces are deleted")  # fmt: skip
    parser.addini("memtrace", "record the memory of each test and check its limits", type="bool", default=False)


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers, and what records where that is enabled."""
    names = (OWN_MARKER,) if config.pluginmanager.hasplugin(MEMRAY_PLUGIN) else (OWN_MARKER, MARKER)
    for name in names:
        config.addinivalue_line("markers", f"{name}{_USAGE}")
    if _is_enabled(config):
        from memtrace.integrations.pytest_recorder import ItemRecorder

        config.pluginmanager.register(ItemRecorder(names, config.getoption("memtrace_dir")), "memtrace-recorder")


def _is_enabled(config: pytest.Config) -> bool:
    return bool(config.getoption("memtrace") or config.getini("memtrace"))


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Report the tests with the highest peaks, those of all workers of pytest-xdist together."""
    if not _is_enabled(config):
        return
    from memtrace.integrations.pytest_recorder import MeasuredTest

    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    measured = [test for report in reports if (test := MeasuredTest.of_report(report)) is not None]
    highest = sorted(measured, key=lambda test: (-test.peak_bytes, test.name))[: config.getoption("memtrace_top")]
    if highest:
        terminalreporter.section("memtrace: tests with the highest peak memory")
    for test in highest:
        peak = format_bytes(test.peak_bytes)
        terminalreporter.write_line(f"{peak:>10}  {test.device:7} {test.name}  ({test.held_by})")
