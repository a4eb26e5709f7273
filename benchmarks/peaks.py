"""Peaks and live bytes of memtrace compared with three independent counts.

    python benchmarks/peaks.py [PROGRAM ...]

For every program of ``tests/programs/edited``, without memtrace in the second run:

* the peak, with the one that torch.profiler counts;
* the bytes that are live at the line of the program where most are live, with the distinct storages of all tensors
  that Python's garbage collector and the autograd graph reach at this line;
* for programs that import NumPy, the bytes of NumPy's memory at the line where most of it is live, with tracemalloc.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import memtrace
from memtrace.analysis import find_peak
from memtrace.analysis.attribution import SPAN, rows_at
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import live_bytes
from memtrace.units import format_bytes

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.programs.edits import read_programs
from tests.programs.ground_truth import (
    RANGE_PREFIX,
    count_at_line,
    mark_line,
    numpy_bytes_at_line,
    profile_peak,
    run_in_child,
    run_program,
    run_with_line_events,
)


@dataclass(frozen=True)
class BusiestLine:
    """The line event of a program at which most bytes are live."""

    number: int
    live_bytes: int


def recorded_peak(source: str, path: Path) -> int:
    """Return the peak that memtrace records."""
    with tempfile.TemporaryDirectory() as folder:
        with memtrace.record(Path(folder) / "run.memtrace"):
            namespace = run_program(source, path)
        peak = find_peak(memtrace.load(Path(folder) / "run.memtrace"), "cpu").requested.bytes
        namespace.clear()
    return peak


def busiest_line(source: str, path: Path, foreign_only: bool) -> BusiestLine:
    """Return the line event at which memtrace has most live bytes, of NumPy's and other foreign memory or of all."""
    with tempfile.TemporaryDirectory() as folder:
        with memtrace.record(Path(folder) / "run.memtrace"):
            run_with_line_events(source, path, mark_line)
        trace = memtrace.load(Path(folder) / "run.memtrace")
        # No operator allocated it: NumPy did, or another library.
        is_foreign = blocks(trace).op_name < 0
        live = live_bytes(trace, "cpu", np.where(is_foreign | (not foreign_only), blocks(trace).size, 0))
        spans = trace.columns("spans", "kind", "name", "start_ns")
        marks = np.flatnonzero(spans["kind"] == SPAN["range"])
        names = [trace.name(int(name)) or "" for name in spans["name"][marks]]
        marks = marks[[name.startswith(RANGE_PREFIX) for name in names]]
        numbers = [int(name.removeprefix(RANGE_PREFIX)) for name in names if name.startswith(RANGE_PREFIX)]
        change = np.searchsorted(live.rows, rows_at(trace, spans["start_ns"][marks]), side="left")
        at_mark = np.concatenate([[live.start], live.bytes])[change]
    best = int(at_mark.argmax())
    return BusiestLine(numbers[best], int(at_mark[best]))


def compare(name: str, source: str, path: Path) -> tuple[str, list[float]]:
    """Return the row of one program, and the relative differences in it."""
    peak, profiled = run_in_child(recorded_peak, source, path), run_in_child(profile_peak, source, path)
    pairs: list[tuple[Any, int | None]] = [(peak, profiled)]
    # Reading what a checkpoint saves would recompute it.
    line: BusiestLine = run_in_child(busiest_line, source, path, False)
    is_countable = "torch.utils.checkpoint" not in source
    pairs.append((line.live_bytes, run_in_child(count_at_line, source, path, line.number) if is_countable else None))
    if "import numpy" in source:
        line = run_in_child(busiest_line, source, path, True)
        pairs.append((line.live_bytes, run_in_child(numpy_bytes_at_line, source, path, line.number)))
    cells, differences = [], []
    for ours, theirs in pairs:
        if theirs is None:
            cells.append(f"{format_bytes(ours):>9}  not counted")
            continue
        differences.append((ours - theirs) / max(theirs, 1))
        cells.append(f"{format_bytes(ours):>9}  {ours - theirs:+9,} B")
    return f"{name:32} " + "   ".join(cells), differences


def main() -> None:
    """Print one row per program, then how many counts agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", help="names of programs; default: all")
    names = set(parser.parse_args().programs)
    columns = ("torch.profiler", "live tensors", "tracemalloc (NumPy)")
    by_column: list[list[float]] = [[] for _ in columns]
    print(
        "Peak and difference from torch.profiler; bytes at the busiest line and difference from live tensors; NumPy's"
    )
    for program in read_programs():
        if names and program.name not in names:
            continue
        row, differences = compare(program.name, program.source, program.path)
        print(row, flush=True)
        if len(differences) == 2 and "torch.utils.checkpoint" in program.source:
            differences.insert(1, float("nan"))
        for column, difference in zip(by_column, differences, strict=False):
            column.append(difference)
    for title, values in zip(columns, by_column, strict=True):
        counted = np.array([value for value in values if value == value])
        if len(counted):
            num_equal, largest = int((counted == 0).sum()), float(np.abs(counted).max())
            print(f"{title}: {num_equal} of {len(counted)} equal, largest difference {largest:.2%}")


if __name__ == "__main__":
    main()
