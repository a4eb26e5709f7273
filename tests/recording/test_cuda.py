"""CUDA memory in recordings, with recorded histories in place of a GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak, reserved_bytes
from memtrace.format.schema import EVENT_KINDS
from memtrace.readers.cuda_snapshot.entries import read_entries
from memtrace.readers.unpickle import load_plain
from memtrace.recording.cuda_driver import DeviceTotals
from memtrace.trace import Trace
from tests.recording.cuda_fakes import FakeDriver, segment, snapshot, use_driver
from tests.recording.helpers import MIB, wait_until

CODE = {kind: code for code, kind in enumerate(EVENT_KINDS)}


def history_rows(file: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The history of a snapshot as rows for ``Observer.cuda_events``, as if it happened now."""
    entries = read_entries(file["device_traces"])
    address = np.where(entries.kind == CODE["oom"], entries.device_free, entries.address)
    columns = (entries.kind, entries.device, address, entries.size, entries.stream, np.maximum(entries.pool, 0))
    return [(*row, -1, -1) for row in zip(*(column.tolist() for column in columns), strict=True)]


def record_rows(path: Path, rows: list[tuple[int, ...]]) -> Trace:
    from memtrace.recording.observers.build import native_module

    with memtrace.record(path, observer="native"):
        native_module().cuda_events(rows)
    return memtrace.load(path)


@pytest.mark.parametrize("name", ["complete_small", "complete_windows", "complete_forward_backward"])
def test_block_sizes_are_those_of_the_allocator(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Ground truth: the sizes of the blocks in the file's ``segments``, and the trace imported from the file."""
    path = data / "snapshots" / f"{name}.pickle"
    with path.open("rb") as opened:
        file = load_plain(opened, path)
    use_driver(monkeypatch, FakeDriver(snapshot(), file), tracks_allocator=True)
    trace = record_rows(tmp_path / "run.memtrace", history_rows(file))
    table, device = blocks(trace), next(name for name in trace.devices if name != "cpu")
    on_device = table.device == trace.devices.index(device)
    is_live = on_device & (table.free_event < 0)
    recorded = dict(zip(table.address[is_live].tolist(), table.allocated_size[is_live].tolist(), strict=True))
    expected = {
        block["address"]: block["size"]
        for part in file["segments"]
        for block in part["blocks"]
        if block["state"] == "active_allocated"
    }
    assert recorded == expected
    assert (table.allocated_size[on_device] > 0).all()
    recorded_peak, imported_peak = find_peak(trace, device), find_peak(memtrace.load(path), device)
    assert recorded_peak.requested.bytes == imported_peak.requested.bytes
    assert recorded_peak.end_bytes == imported_peak.end_bytes
    assert recorded_peak.reserved is not None and imported_peak.reserved is not None
    assert recorded_peak.reserved.bytes == imported_peak.reserved.bytes
    assert recorded_peak.reserved_end_bytes == imported_peak.reserved_end_bytes
    assert recorded_peak.allocated is not None
    assert recorded_peak.allocated.bytes >= recorded_peak.requested.bytes


def test_blocks_and_segments_older_than_the_recording_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, other = 0x7000_0000, 0x9000_0000
    before = snapshot(
        segment(base, 20 * MIB, (0, 3 * MIB, 3 * MIB - 7, "active_allocated"), (3 * MIB, 17 * MIB, 0, "inactive")),
        segment(other, 2 * MIB, (0, 512, 5, "active_allocated"), (512, 2 * MIB - 512, 0, "inactive")),
    )
    after = snapshot(
        segment(
            base, 20 * MIB, (0, 18 * MIB, 0, "inactive"), (18 * MIB, 2 * MIB, 2 * MIB - 900_000, "active_allocated")
        ),
        segment(other, 2 * MIB, (0, 512, 5, "active_allocated"), (512, 2 * MIB - 512, 0, "inactive")),
    )
    use_driver(monkeypatch, FakeDriver(before, after), tracks_allocator=True)
    # The first request takes all but the last 2 MiB. The second, 900 kB smaller than the rest, gets all of the rest.
    trace = record_rows(
        tmp_path / "run.memtrace",
        [
            (CODE["alloc"], 0, base + 3 * MIB, 15 * MIB, 0, 0, -1, -1),
            (CODE["alloc"], 0, base + 18 * MIB, 2 * MIB - 900_000, 0, 0, -1, -1),
            (CODE["free"], 0, base, 3 * MIB - 7, 0, 0, -1, -1),
            (CODE["free"], 0, base + 3 * MIB, 15 * MIB, 0, 0, -1, -1),
        ],
    )
    table = blocks(trace)
    on_device = table.device == trace.devices.index("cuda:0")
    assert table.allocated_size[on_device].tolist() == [3 * MIB, 512, 15 * MIB, 2 * MIB]
    assert table.alloc_event[on_device].tolist()[:2] == [-1, -1]
    highest = find_peak(trace, "cuda:0")
    assert highest.baseline_bytes == 3 * MIB - 7 + 5
    assert highest.allocated is not None and highest.allocated.bytes == 20 * MIB + 512
    assert highest.reserved is not None and (highest.reserved.bytes, highest.reserved_end_bytes) == (22 * MIB, 22 * MIB)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [2 * MIB, 19 * MIB]),
        ({"max_split_size": 19 * MIB}, [2 * MIB, 20 * MIB + MIB // 2]),
        ({"roundup_power2_divisions": {"1": 4}}, [-1, -1]),
    ],
)
def test_allocator_settings_determine_block_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], sizes: list[int]
) -> None:
    use_driver(monkeypatch, FakeDriver(snapshot(**settings)), tracks_allocator=True)
    trace = record_rows(
        tmp_path / "run.memtrace",
        [
            (CODE["segment_alloc"], 0, 0x7000_0000, 22 * MIB + MIB // 2, 0, 0, -1, -1),
            (CODE["alloc"], 0, 0x7000_0000, 2 * MIB, 0, 0, -1, -1),
            (CODE["alloc"], 0, 0x7000_0000 + 2 * MIB, 19 * MIB, 0, 0, -1, -1),
        ],
    )
    table = blocks(trace)
    assert table.allocated_size[table.device == trace.devices.index("cuda:0")].tolist() == sizes


def test_without_cuda_headers_events_come_from_torchs_history(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = data / "snapshots" / "complete_forward_backward.pickle"
    with path.open("rb") as opened:
        file = load_plain(opened, path)
    entries = file["device_traces"][0]
    later_us = time.time_ns() // 1000 - entries[0]["time_us"] + 1_000_000
    for entry in entries:
        entry["time_us"] += later_us
    first_half = file | {"device_traces": [entries[: len(entries) // 2]]}
    driver = FakeDriver(snapshot(), first_half, file)
    use_driver(monkeypatch, driver, tracks_allocator=False)
    with memtrace.record(tmp_path / "run.memtrace", observer="native", flush_seconds=0.05):
        assert driver.has_history
        wait_until(lambda: len(driver.snapshots) == 1)
    assert not driver.has_history
    trace, imported = memtrace.load(tmp_path / "run.memtrace"), memtrace.load(path)
    assert any("CUDA headers not found" in note for note in compute_coverage(trace).notes)
    recorded_peak = find_peak(trace, "cuda:0")
    assert recorded_peak.requested.bytes == find_peak(imported, "cuda:0").requested.bytes == 682_735_240
    assert recorded_peak.end_bytes == 420_190_612
    assert (blocks(trace).device == trace.devices.index("cuda:0")).sum() == len(blocks(imported).size)


def test_an_overwritten_history_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(first: int) -> list[dict[str, Any]]:
        now = time.time_ns() // 1000
        return [
            {"action": "alloc", "addr": 512 * n, "size": 8, "stream": 0, "time_us": now + n, "device_free": 0}
            for n in range(first, first + 5)
        ]

    driver = FakeDriver(snapshot(), *(snapshot() | {"device_traces": [entries(first)]} for first in (100, 200)))
    use_driver(monkeypatch, driver, tracks_allocator=False)
    with memtrace.record(tmp_path / "run.memtrace", observer="native", flush_seconds=0.05):
        wait_until(lambda: len(driver.snapshots) == 1)
    notes = compute_coverage(memtrace.load(tmp_path / "run.memtrace")).notes
    assert any("CUDA allocator events are missing" in note for note in notes)


def test_totals_at_every_step_show_memory_outside_the_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver(
        snapshot(segment(0x7000_0000, 2 * MIB, (0, 2 * MIB, 0, "inactive"))),
        totals=[DeviceTotals(0, 0, 2 * MIB, 9 * MIB)],
    )
    use_driver(monkeypatch, driver, tracks_allocator=True)
    with memtrace.record(tmp_path / "run.memtrace") as rec:
        for step in range(3):
            driver.device_totals = [DeviceTotals(0, 0, 2 * MIB, (10 + step) * MIB)]
            rec.step()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert compute_coverage(trace).outside_allocator_bytes == 10 * MIB
    counters = trace.counters
    assert counters[counters.name == "device_used"].value.tolist() == [size * MIB for size in (9, 10, 11, 12, 12)]
    assert reserved_bytes(trace, "cuda:0").start == 2 * MIB  # type: ignore[union-attr]


def test_a_driver_that_fails_does_not_fail_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver(snapshot())
    use_driver(monkeypatch, driver, tracks_allocator=True)
    with memtrace.record(tmp_path / "run.memtrace") as rec:
        monkeypatch.setattr(driver, "totals", lambda: 1 / 0)
        rec.step()
        torch.ones(1000)
    assert "CUDA memory is no longer recorded, training continues" in caplog.text
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert compute_coverage(trace).finished
    assert compute_coverage(trace).outside_allocator_bytes is None


def test_replays_of_cuda_graphs_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        replays = 0

        def replay(self) -> None:
            Graph.replays += 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    original = Graph.replay
    use_driver(monkeypatch, FakeDriver(snapshot()), tracks_allocator=True)
    with memtrace.record(tmp_path / "run.memtrace"):
        Graph().replay()
        Graph().replay()
    assert Graph.replays == 2
    assert Graph.replay is original
    assert any(
        "2 replays of CUDA graphs" in note for note in compute_coverage(memtrace.load(tmp_path / "run.memtrace")).notes
    )


def test_missing_device_times_are_noted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is a CUDA build: see test_device_times_lie_within_the_run")
    with memtrace.record(tmp_path / "run.memtrace", device_time=True):
        torch.ones(1 << 20)
    assert "no device times" in caplog.text
    assert any("no device times" in note for note in compute_coverage(memtrace.load(tmp_path / "run.memtrace")).notes)
