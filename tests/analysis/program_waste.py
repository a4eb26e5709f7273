"""Wasted memory of programs that run in the test's process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

import memtrace
from memtrace.analysis.findings import DeviceWaste, Finding, find_device_waste


def waste_of(program: Callable[[], None], folder: Path) -> DeviceWaste:
    """Return the wasted memory of a program."""
    torch.manual_seed(0)
    gc.collect()
    with memtrace.record(folder / "run.memtrace"):
        program()
    return find_device_waste(memtrace.load(folder / "run.memtrace"), "cpu", min_bytes=1)


def is_saved(finding: Finding, waste: DeviceWaste, fixed: DeviceWaste) -> bool:
    """Return whether the fixed program saves what is predicted; both hold the same memory of other tests."""
    measured = waste.peak_bytes - fixed.peak_bytes
    return finding.saved_bytes > 0 and abs(finding.saved_bytes - measured) <= 0.01 * measured
