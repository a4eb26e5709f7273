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
PEAK: Final = "memtrace_peak_bytes"
"""Property of a test: its peak above what was live when it began, on the device where that is highest."""
DEVICE: Final = "memtrace_peak_device"
HOLDER: Final = "memtrace_peak_held_by"
DEFAULT_TOP: Final = 10
_USAGE: Final = (
    '(peak, *, max_growth=None): fail the test if its peak memory rises by more than peak, such as "100 MiB", above what '
    "is live when it begins, or if it grows by more than max_growth per training step. Checked with --memtrace."
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
    config.addinivalue_line("markers", f"{OWN_MARKER}{_USAGE}")
    if not _memray_is_active(config):
        config.addinivalue_line("markers", f"{MARKER}{_USAGE}")
    if config.getoption("memtrace") or config.getini("memtrace"):
        from memtrace.integrations.pytest_recorder import ItemRecorder

        names = (OWN_MARKER,) if _memray_is_active(config) else (OWN_MARKER, MARKER)
        config.pluginmanager.register(ItemRecorder(names, config.getoption("memtrace_dir")), "memtrace-recorder")


def _memray_is_active(config: pytest.Config) -> bool:
    return config.pluginmanager.hasplugin(MEMRAY_PLUGIN)


def pytest_terminal_summary(terminalreporter: TerminalReporter, config: pytest.Config) -> None:
    """Report the tests with the highest peaks, those of all workers of pytest-xdist together."""
    rows = sorted(_measured_tests(terminalreporter), key=lambda row: (-row[0], row[3]))[: config.getoption("memtrace_top")]
    if not rows:
        return
    terminalreporter.section("memtrace: tests with the highest peak memory")
    for peak_bytes, device, held_by, test in rows:
        terminalreporter.write_line(f"{format_bytes(peak_bytes):>10}  {device:7} {test}  ({held_by})")


def _measured_tests(reporter: TerminalReporter) -> list[tuple[int, str, str, str]]:
    tests = []
    for reports in reporter.stats.values():
        for report in reports:
            properties = dict(getattr(report, "user_properties", ()))
            if getattr(report, "when", None) == "call" and PEAK in properties:
                tests.append((properties[PEAK], properties[DEVICE], properties[HOLDER], report.nodeid))
    return tests
