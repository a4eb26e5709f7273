"""What the tests of recordings share."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import memtrace
from memtrace.analysis.blocks import blocks
from memtrace.format.arrays import Array
from memtrace.format.schema import CATEGORIES
from memtrace.recording.session import Recording
from memtrace.trace import Trace

PROGRAMS = Path(__file__).parents[1] / "programs"
MIB = 1 << 20
NUM_FAULT_POINTS = int(os.environ.get("MEMTRACE_FAULT_POINTS", "12"))
"""Points at which a campaign of faults or interrupts tries one."""
DATA_PARALLEL_PARAMETER_BYTES = 4 * (64 * 256 + 256 + 256 * 64 + 64)
"""Bytes of the parameters of the model in tests/programs/ranks.py."""


def record_steps(
    step: Callable[[], object], path: Path, *, num_steps: int = 3, observer: str = "native", **options: Any
) -> Trace:
    """The trace of a few calls of ``step``."""
    with memtrace.record(path, observer=observer, **options):
        for _ in range(num_steps):
            step()
    return memtrace.load(path)


def live_bytes(trace: Trace, category: str, owner: str = "") -> int:
    """Bytes of a category that are live at the end of a trace.

    Args:
        trace: the trace.
        category: one of CATEGORIES.
        owner: the class of the model whose blocks count; other tests of the process can have left models behind.
    """
    table = blocks(trace)
    is_live = (table.category == CATEGORIES.index(category)) & (table.free_event < 0)
    return int(table.size[is_live & is_named(trace, table.name, owner)].sum())


def is_named(trace: Trace, names: Array, owner: str) -> Array:
    """Whether names of blocks begin with the class of a model; everything without one does."""
    return np.array([not owner or (name >= 0 and trace.name(name).startswith(f"{owner}.")) for name in names.tolist()])


def free_port() -> int:
    """A TCP port that is not in use."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 60) -> None:
    """Return as soon as ``condition`` holds."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_seconds} seconds for {condition}"
        time.sleep(0.002)


@contextmanager
def part_written(recording: Recording) -> Iterator[None]:
    """Leave the ``with`` block, in which something must be recorded, when another part of events is on disk."""
    last = _newest_part(recording.path)
    yield
    wait_until(lambda: _newest_part(recording.path) > last)


def _newest_part(trace: Path) -> str:
    return max((path.name for path in trace.glob("rank=0/events-*.parquet")), default="")


@contextmanager
def endless_recording(trace: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that records into ``trace`` until it is killed, and has written at least one part."""
    command = [sys.executable, PROGRAMS / "record_until_killed.py", trace]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        output = process.stdout
        try:
            wait_until(lambda: bool(output.read(100)) and bool(_newest_part(trace)))
            yield process
        finally:
            process.kill()
