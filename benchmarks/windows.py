"""Windows of a large trace: what opening them costs against opening the whole, and that both agree at every step."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from random import Random

import numpy as np

import memtrace
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import live_after
from memtrace.analysis.steps import step_columns
from memtrace.trace import Trace

NUM_WINDOWS = 20
SHARE = 0.01


def open_trace(path: str, first: int | None, last: int | None) -> Trace:
    """Open a trace or a window of it up to the live bytes and categories of every step."""
    trace = memtrace.load(path)
    trace = trace if first is None else trace.window(first, last)
    step_columns(trace)
    return trace


def memory_mib(field: str) -> float:
    """VmRSS (now) or VmHWM (the most so far) of this process; ru_maxrss would include that of the parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure_opening(small: str, path: str, first: str, last: str) -> None:
    """The measured process: prints seconds, CPU seconds and the additional MiB of opening ``path``.

    Imports and thread pools are not counted: a small trace and a window of it are opened before.
    """
    open_trace(small, None, None)
    open_trace(small, 5, 6)
    before = memory_mib("VmRSS")
    began, cpu_began = time.perf_counter(), time.process_time()
    open_trace(path, *(None if step == "-" else int(step) for step in (first, last)))
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    print(json.dumps([seconds, cpu_seconds, memory_mib("VmHWM") - before]))


def opened(small: Path, trace: Path, first: object = "-", last: object = "-") -> list[float]:
    command = [sys.executable, __file__, str(small), str(trace), str(first), str(last)]
    measured: list[float] = json.loads(subprocess.check_output(command, text=True))
    return measured


def live_blocks(trace: Trace, row: int) -> dict[str, list[int]]:
    """Ids, sizes and categories of the blocks that are live after a row of events."""
    columns = blocks(trace)
    live = live_after(columns, 0, row)
    ids = live if trace.block_ids is None else trace.block_ids[live]
    return {"id": ids.tolist(), "size": columns.size[live].tolist(), "category": columns.category[live].tolist()}


def step_rows_of(trace: Trace) -> tuple[np.ndarray, np.ndarray]:
    from memtrace.analysis.attribution import step_rows

    steps = step_rows(trace)
    return steps.first_row, steps.end_row


def assert_agrees(window: Trace, whole: Trace, first: int, last: int) -> None:
    """Assert that the live set, the peak and the categories of every step are those of the whole trace."""
    whole_steps, steps = step_columns(whole), step_columns(window)
    offset = int(np.searchsorted(whole_steps.step, first))
    assert steps.step.tolist() == list(range(first, last + 1))
    for field in fields(steps):
        values, whole_values = getattr(steps, field.name), getattr(whole_steps, field.name)
        assert np.array_equal(values, whole_values[offset : offset + len(values)]), (field.name, first, last)
    rows = zip(*step_rows_of(window), strict=True)
    whole_rows = list(zip(*step_rows_of(whole), strict=True))[offset : offset + len(steps)]
    for step, edges, whole_edges in zip(steps.step, rows, whole_rows, strict=True):
        for row, whole_row in zip(edges, whole_edges, strict=True):
            assert live_blocks(window, row - 1) == live_blocks(whole, whole_row - 1), (first, last, step)


def measure_windows(trace: Path, small: Path) -> dict[str, float]:
    """Open random windows of 1 % of the steps; compare each with the whole trace, and their cost with its.

    Args:
        trace: the large trace.
        small: a small trace, which each measured process opens first.
    """
    whole = open_trace(str(trace), None, None)
    steps = step_columns(whole).step
    length = max(1, round(len(steps) * SHARE))
    random = Random(0)
    windows = [(first, first + length - 1) for first in random.choices(range(len(steps) - length), k=NUM_WINDOWS)]
    for first, last in windows:
        assert_agrees(memtrace.load(trace).window(first, last), whole, first, last)
    del whole
    # The whole and windows alternate: the machine may be busy at times.
    whole_runs, runs = [], []
    for place, window in enumerate(windows):
        if place % 5 == 0:
            whole_runs.append(opened(small, trace))
        runs.append(opened(small, trace, *window))
    seconds, cpu_seconds, mib = (statistics.median(run[place] for run in runs) for place in range(3))
    whole_seconds, whole_cpu, whole_mib = (statistics.median(run[place] for run in whole_runs) for place in range(3))
    return {
        "windows that agree with the whole": float(len(windows)),
        "steps": float(len(steps)),
        "steps of a window": float(length),
        "whole, seconds": whole_seconds,
        "whole, CPU seconds": whole_cpu,
        "whole, MiB": whole_mib,
        "window, seconds": seconds,
        "window, CPU seconds": cpu_seconds,
        "window, MiB": mib,
        "share of time": seconds / whole_seconds,
        "share of CPU time": cpu_seconds / whole_cpu,
        "share of memory": mib / whole_mib,
    }


if __name__ == "__main__":
    measure_opening(*sys.argv[1:])
