"""Analyses of long traces a part at a time: they equal those of the whole trace in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memtrace.analysis import summary
from memtrace.analysis.by_part.summary import summarize_parts
from memtrace.analysis.summary import summarize
from memtrace.format import schema
from memtrace.format.manifest import write_manifest
from memtrace.format.split import write_parts
from memtrace.trace import Trace, load
from tests.format.agreement import random_starts
from tests.format.random_traces import RandomTrace, Rows, on_disk


def run_here(trace: Trace, analysis: Any, _: str) -> Any:
    return analysis.finish(reduce(analysis.merge, [analysis.partial(trace, task) for task in analysis.tasks(trace)]))


def rows_with_segments(seed: int, num_steps: int) -> Rows:
    """Rows of a random trace that lists the segments at its end, as recordings do."""
    made = RandomTrace(seed, num_steps)
    made.rows["segments"] = [
        {"device": "cuda:0", "address": start, "size": size, "expandable": True} for start, size in made._ranges
    ]
    made.rows["names"] += [
        {"id": 7, "kind": "module", "text": "net.a"},
        {"id": 8, "kind": "module", "text": "net.b"},
        {"id": 9, "kind": "operator", "text": "aten::add"},
        {"id": 10, "kind": "frame", "text": "train.py\t3\tstep"},
        {"id": 11, "kind": "stack", "frames": [10]},
        *({"id": 50 + number, "kind": "tensor", "text": f"a.{number}"} for number in range(200)),
    ]
    return made.rows


@pytest.fixture
def without_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns are not searched for in long traces."""
    monkeypatch.setattr(summary, "MAX_PATTERN_EVENTS", 0)


@pytest.mark.usefixtures("without_patterns")
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), num_steps=st.integers(1, 9))
def test_a_summary_by_parts_is_that_of_the_whole(seed: int, num_steps: int) -> None:
    rows = rows_with_segments(seed, num_steps)
    assume(len(rows["events"]) > 1)
    with TemporaryDirectory() as folder:
        trace = on_disk(rows, Path(folder) / "x.memtrace", random_starts(Random(seed), len(rows["events"])))
        result = summarize_parts(trace, run_here)
        assume(result is not None)
        assert result is not None
        assert result.summary == summarize(trace)


@pytest.mark.slow
@pytest.mark.usefixtures("without_patterns")
def test_a_recording_in_other_parts_has_the_same_summary(
    gpt_trace: Path, defect_traces: tuple[Path, Path], tmp_path: Path
) -> None:
    for number, path in enumerate((gpt_trace, *defect_traces)):
        recorded = load(path).rank(0)
        tables = {name: recorded.arrow_table(name) for name in schema.TABLES if name != "live"}
        folder = tmp_path / f"{number}.memtrace" / "rank=0"
        folder.mkdir(parents=True)
        parts = write_parts(tables, folder, random_starts(Random(number), recorded.num_rows("events")))
        write_manifest(folder, replace(recorded.manifest, parts=parts))
        result = summarize_parts(load(folder), run_here)
        assert result is not None
        assert result.summary == summarize(load(folder))
