"""The writer's thread: what it collects without the interpreter lock, and its priority."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import memtrace
from memtrace.format.encode import encode_codes
from memtrace.format.keyframes import LiveSet, PartColumns
from memtrace.format.live_status import read_live_status
from memtrace.format.schema import EVENT_KINDS, OBSERVED_TABLES, SPAN_KINDS
from memtrace.format.stored import shorten
from memtrace.recording.arrow import DEVICES, batch_columns, encode_batch, part_columns
from memtrace.recording.background import NICENESS
from memtrace.recording.live_status import LiveStatusFile
from memtrace.recording.observers import Batch, native_observer
from memtrace.recording.observers.native_observer import NativeObserver
from tests.format.test_stored import BLOCKS, EVENT, table_of
from tests.programs.tasks import TASKS, Task, make_step, mlp
from tests.recording.helpers import wait_until


def test_the_bitmaps_of_the_native_observer_are_those_of_its_columns() -> None:
    step = make_step(mlp())
    observer = NativeObserver()
    observer.start(accesses=True, stacks=True, stack_min_bytes=0, device_time_min_bytes=-1)
    step()
    observer.span(0, -1, 0, observer.now(), 0)
    observer.stop()
    batch = observer.drain(-1)
    columns = batch_columns(batch)
    tables = encode_batch(columns, batch)
    assert {"events", "ops", "spans", "names"} <= set(tables)
    assert any(name.endswith(".valid") for name in batch)
    assert "ops.recompute.bits" in batch
    for name in set(OBSERVED_TABLES) & set(tables):
        expected = encode_codes(name, columns[name], DEVICES)
        for field in expected.schema:
            if field.name in tables[name].column_names:
                assert tables[name].column(field.name).to_pylist() == expected.column(field.name).to_pylist()
            else:
                assert expected.column(field.name).null_count == expected.num_rows


def drained_batches(step: Callable[[], object], num_steps: int) -> list[Batch]:
    """The batches of some steps, drained on another thread while operators run."""
    observer, batches, is_over = NativeObserver(), [], threading.Event()

    def drain() -> None:
        while not is_over.is_set():
            observer.wait(0.002, 1)
            batches.append(observer.drain(-1))

    observer.start(accesses=True, stacks=False, stack_min_bytes=0, device_time_min_bytes=-1)
    thread = threading.Thread(target=drain)
    thread.start()
    for number in range(num_steps):
        started_ns = observer.now()
        step()
        observer.span(SPAN_KINDS.index("step"), -1, started_ns, observer.now(), number)
    is_over.set()
    observer.stop()
    thread.join()
    return [*batches, observer.drain(-1)]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_the_rows_that_matter_after_a_batch_give_the_live_set_of_all_rows(
    task: Callable[[], Task], tmp_path: Path
) -> None:
    batches = drained_batches(make_step(task()), num_steps=3)
    (whole_folder := tmp_path / "whole").mkdir()
    (reduced_folder := tmp_path / "reduced").mkdir()
    whole, reduced = LiveSet(), LiveSet()
    whole_status, reduced_status = LiveStatusFile(whole_folder), LiveStatusFile(reduced_folder)
    num_rows = num_kept = 0
    for batch in batches:
        columns = batch_columns(batch)
        tables = encode_batch(columns, batch)
        all_rows = PartColumns(*(columns[name] for name in ("events", "ops", "labels", "spans")))
        kept_rows = part_columns(columns, batch, {})
        num_rows += len(all_rows.events["kind"])
        num_kept += len(kept_rows.events["kind"])
        for live, status, rows in ((whole, whole_status, all_rows), (reduced, reduced_status, kept_rows)):
            live.advance(rows)
            status.advance(rows)
        for name, values in whole.keyframe().items():
            np.testing.assert_array_equal(reduced.keyframe()[name], values, err_msg=name)
        assert reduced.order_ns == whole.order_ns
        assert "events" not in tables or tables["events"].num_rows == len(all_rows.events["kind"])
    assert num_rows > num_kept > 0
    statuses = []
    for live, status, folder in ((whole, whole_status, whole_folder), (reduced, reduced_status, reduced_folder)):
        status.write_if_due(live, num_rows, num_rows)
        written = read_live_status(folder)
        assert written is not None
        # The levels of steps within a long batch are not exact.
        statuses.append(replace(written, written_epoch_ns=0, steps=(), open_step=None))
        assert len(written.steps) == 3
    assert statuses[0] == statuses[1]


def test_a_long_batch_gives_the_peak_and_the_level_after_it() -> None:
    def step() -> None:
        for size in range(1, 5000):
            torch.empty(size, dtype=torch.uint8)
        kept.append(torch.empty(10_000, dtype=torch.uint8))

    kept: list[torch.Tensor] = []
    observer = NativeObserver()
    observer.start(accesses=False, stacks=False, stack_min_bytes=0, device_time_min_bytes=-1)
    step()
    observer.stop()
    batch = observer.drain(-1)
    columns = batch_columns(batch)
    rows = part_columns(columns, batch, {})
    assert rows.levels is not None
    level, events = rows.levels[0], columns["events"]
    kind, size = (events[name] for name in ("kind", "size"))
    exact = np.cumsum(np.where(kind == EVENT_KINDS.index("free"), -size, size))
    assert level.size[-1] == exact[-1]
    assert level.size.max() == exact.max()
    assert len(exact) > 9000 > 4096 > len(level.size)
    for time_ns, highest, end_ns in zip(level.time_ns, level.size, [*level.time_ns[1:], 1 << 62], strict=True):
        inside = (events["time_ns"] >= time_ns) & (events["time_ns"] < end_ns)
        assert highest == exact[inside].max()


@settings(deadline=None)
@example(
    [
        {"time_ns": 0, "kind": kind, "device": "cpu", "block_id": 0, "size": 1, "allocated_size": 1, "address": -1}
        for kind in ("alloc", "free")
    ],
    -1,
    {},
)
@given(
    st.lists(EVENT, max_size=12),
    st.integers(-1, 6),
    st.dictionaries(BLOCKS.filter(lambda block: block is not None), st.integers(-1, 2), max_size=4),
)
def test_the_native_forms_of_events_are_those_of_numpy(
    rows: list[dict[str, Any]], newest_block: int, keyframe: dict[int, int]
) -> None:
    events = table_of("events", rows)
    columns = {"block_id": np.array(list(keyframe), np.int64), "address": np.array(list(keyframe.values()), np.int64)}
    expected, expected_metadata = shorten("events", events, newest_block, columns)
    found, metadata = shorten("events", events, newest_block, columns, NativeObserver().find_event_forms)
    assert found.to_pylist() == expected.to_pylist()
    assert found.schema == expected.schema
    assert metadata == expected_metadata


@pytest.mark.parametrize("num_records", [1, 100])
def test_the_size_of_the_portions_in_which_records_are_collected_changes_nothing(
    num_records: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded(name: str) -> dict[str, list[int]]:
        step = make_step(mlp())
        step()
        with memtrace.record(tmp_path / name, observer="native"):
            for _ in range(5):
                step()
        trace = memtrace.load(tmp_path / name)
        assert trace.manifest.finished
        assert int((trace.columns("spans", "kind")["kind"] == SPAN_KINDS.index("step")).sum()) == 5
        events = trace.columns("events", "kind", "size", "op_id")
        is_new = events["kind"] != EVENT_KINDS.index("baseline")  # other tests have left blocks behind
        return {name: values[is_new].tolist() for name, values in events.items()}

    whole = recorded("whole.memtrace")
    monkeypatch.setattr(native_observer, "COLLECT_RECORDS", num_records)
    monkeypatch.setattr(native_observer, "WAKE_RECORDS", num_records)
    assert recorded("portions.memtrace") == whole


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere priorities belong to processes")
def test_only_the_writer_has_a_lower_priority(tmp_path: Path) -> None:
    def niceness() -> dict[int, int]:
        values = {}
        for folder in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # a thread that has ended since
                values[int(folder.name)] = os.getpriority(os.PRIO_PROCESS, int(folder.name))
        return values

    before, own = niceness(), os.getpriority(os.PRIO_PROCESS, 0)
    expected = min(own + NICENESS, 19)
    with memtrace.record(tmp_path / "run.memtrace", observer="native"):
        wait_until(lambda: expected in [value for thread, value in niceness().items() if thread not in before])
        assert os.getpriority(os.PRIO_PROCESS, 0) == own


_COUNT_PAGE_FAULTS = """
import resource, sys, torch, memtrace

def page_faults(num_calls):
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(num_calls):
        x.add_(1)
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before

x = torch.zeros(4)
page_faults(100)
with memtrace.record(sys.argv[1], stacks=False):
    page_faults(100)
    print(page_faults(3000))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts the page faults of a thread")
def test_the_first_records_find_their_memory_ready(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _COUNT_PAGE_FAULTS, str(tmp_path / "t.memtrace")]
    num_faults = int(subprocess.check_output(command, text=True))
    assert num_faults < 50, "9,000 records take some 100 pages, and twice as many where buffers grow"
