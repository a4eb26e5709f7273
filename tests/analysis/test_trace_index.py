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

from memtrace.analysis.block_catalog import BlockCatalog, catalog_blocks
from memtrace.analysis.blocks import blocks
from memtrace.analysis.indexed_trace import IndexedTrace
from memtrace.analysis.part_summary import LEVELS, summarize_part
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


@settings(max_examples=int(os.environ.get("INDEX_EXAMPLES", "12")), deadline=None)
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
    ours = indexed.catalog(device, max_blocks=10_000)
    expected = catalog_blocks(indexed.trace, device, 10_000)
    ids = indexed.trace.block_ids

    def described(catalog: BlockCatalog, block: np.ndarray) -> dict[int, tuple[object, ...]]:
        texts = {name: getattr(catalog, f"{name}s") for name in ("name", "operator", "module", "site", "stack")}
        plain = ("begin_row", "end_row", "begin_ns", "end_ns", "size", "category", "phase", "num_reads", "num_writes")
        return {
            int(block[i]): tuple(int(getattr(catalog, name)[i]) for name in plain)
            + tuple(texts[name][getattr(catalog, name)[i]] for name in texts)
            for i in range(len(block))
        }

    known = described(expected, expected.block if ids is None else ids[expected.block])
    assert described(ours, ours.block) == known
    assert ours.num_blocks == expected.num_blocks
