"""The index of a trace against the analysis of the whole trace."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from memtrace.analysis.attribution import step_rows
from memtrace.analysis.blocks import blocks
from memtrace.analysis.indexed_trace import IndexedTrace
from memtrace.analysis.part_summary import BLOCK_COLUMNS, LEVELS, summarize_part
from memtrace.analysis.peak import find_peak, level_at, live_bytes, requested_bytes
from memtrace.analysis.trace_index import TraceIndex
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace
from tests.format.agreement import random_starts
from tests.format.random_traces import RandomTrace, on_disk


def index_of(trace: Trace) -> TraceIndex:
    index = TraceIndex()
    for number in trace.part_numbers:
        index.add(summarize_part(trace, number))
    index.spans.extend(trace)
    return index


def levels_of(trace: Trace, device: str, rows: np.ndarray) -> dict[str, list[int]]:
    """The exact levels of a device after rows of the whole trace."""
    table = blocks(trace)
    by_category = {
        name: level_at(live_bytes(trace, device, np.where(table.category == code, table.size, 0)), rows).tolist()
        for code, name in enumerate(CATEGORIES)
    }
    return {"requested": level_at(requested_bytes(trace, device), rows).tolist(), **by_category}


def assert_exact(trace: Trace, device: str, points, *, categories: bool = True) -> None:
    expected = levels_of(trace, device, points.row)
    names = expected if categories else ["requested"]
    assert {name: points.levels[LEVELS.index(name)].tolist() for name in names} == {
        name: expected[name] for name in names
    }


@settings(max_examples=int(os.environ.get("INDEX_EXAMPLES", "5")), deadline=None)
@given(st.integers(0, 10**6), st.data())
def test_points_and_extremes_of_windows_are_those_of_the_whole_trace(seed: int, data: st.DataObject) -> None:
    random = Random(seed)
    rows = RandomTrace(seed, num_steps=6).rows
    with tempfile.TemporaryDirectory() as folder:
        trace = on_disk(rows, Path(folder), random_starts(random, len(rows["events"])))
        index, time = index_of(trace), trace.columns("events", "time_ns")["time_ns"]
        assert index.num_events == len(time)
        for device in trace.devices:
            live = requested_bytes(trace, device)
            assert_exact(trace, device, index.curve(trace, device, max_points=10_000))
            for _ in range(4):
                bounds = sorted(data.draw(st.integers(-2, int(time.max()) + 3)) for _ in range(2))
                first, end = (int(np.flatnonzero(np.append(time, 2**60) >= at)[0]) for at in bounds)
                points = index.curve(trace, device, *bounds, max_points=data.draw(st.integers(4, 50)))
                assert_exact(trace, device, points)
                assert points.row[0] == first - 1
                inside = live.bytes[(live.rows >= first) & (live.rows < end)]
                start = level_at(live, np.array([first - 1]))[0]
                assert points.levels[0].max() == max([start, *inside])
            top = find_peak(trace, device).requested
            assert index.peak(device).levels[0].tolist() == [top.bytes]
            assert_same_blocks(IndexedTrace(trace, index), device)
        again = TraceIndex.from_arrays(*_through_json(*index.to_arrays()))
        for device in trace.devices:
            ours, theirs = (vars(each.curve(trace, device, max_points=9)) for each in (index, again))
            assert all(np.array_equal(values, theirs[name]) for name, values in ours.items())


def _through_json(arrays: dict[str, np.ndarray], plain: dict[str, object]) -> tuple[dict[str, np.ndarray], dict]:
    return arrays, json.loads(json.dumps(plain))


def assert_same_blocks(indexed: IndexedTrace, device: str) -> None:
    """The traces are so small that the index keeps every block."""
    trace, index = indexed.trace, indexed.index
    ours, num_blocks = index.blocks(device, 0, index.end_row, 10_000)
    table, ids = blocks(trace), trace.block_ids
    on_device = np.flatnonzero((table.device == trace.devices.index(device)) & (table.size > 0))
    names = {
        **{"begin_row": "alloc_event", "end_row": "free_event", "begin_ns": "alloc_ns", "end_ns": "free_ns"},
        **{name: name for name in BLOCK_COLUMNS if hasattr(table, name) and name != "device"},
    }
    expected = {
        int(block if ids is None else ids[block]): {name: int(getattr(table, names[name])[block]) for name in names}
        for block in on_device
    }
    assert {int(block): {name: int(ours[name][i]) for name in names} for i, block in enumerate(ours["id"])} == expected
    assert num_blocks == len(on_device)


@settings(max_examples=int(os.environ.get("INDEX_EXAMPLES", "5")), deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(4, 60))
def test_an_overview_has_the_levels_and_the_largest_blocks_of_the_trace(
    seed: int, num_blocks: int, num_points: int
) -> None:
    rows = RandomTrace(seed, num_steps=5).rows
    with tempfile.TemporaryDirectory() as folder:
        trace = on_disk(rows, Path(folder), random_starts(Random(seed), len(rows["events"])))
        indexed = IndexedTrace(trace, index_of(trace))
        for device in trace.devices:
            overview = indexed.overview(device, max_points=num_points, max_blocks=num_blocks)
            small, points = overview.trace, overview.points
            ours, expected = levels_of(small, device, overview.row), levels_of(trace, device, points.row)
            assert ours == expected
            assert find_peak(small, device).requested.bytes == find_peak(trace, device).requested.bytes
            assert (np.diff(overview.whole_row) >= 0).all()
            assert [int(step) for step in step_rows(small).number] == [int(step) for step in step_rows(trace).number]
