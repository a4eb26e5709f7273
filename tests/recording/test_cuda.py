"""CUDA memory in recordings, with recorded histories in place of a GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.analysis.blocks import blocks
from memtrace.analysis.peak import find_peak, reserved_bytes
from memtrace.format.schema import EVENT_KINDS
from memtrace.readers.cuda_snapshot.entries import read_entries
from memtrace.readers.unpickle import load_plain
from memtrace.recording.cuda_driver import DeviceTotals, TorchDriver
from memtrace.recording.observers import COLUMN_DTYPES
from memtrace.recording.observers.dispatch_cuda import CudaBlocks, CudaBlockSizes, CudaEvent
from memtrace.recording.observers.native_observer import NativeObserver
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
    ("options", "sizes"),
    [
        ({}, [2 * MIB, 19 * MIB]),
        ({"max_split_size": 19 * MIB}, [2 * MIB, 20 * MIB + MIB // 2]),
        ({"roundup_power2_divisions": {"1": 4}}, [2 * MIB, 20 * MIB + MIB // 2]),
        ({"roundup_power2_divisions": {"1": 0, "2": 2, "4": 1}}, [2 * MIB, 19 * MIB]),
        ({"roundup_power2_divisions": {"1": 3}}, [-1, -1]),
    ],
)
def test_allocator_settings_determine_block_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sizes: list[int]
) -> None:
    use_driver(monkeypatch, FakeDriver(snapshot(**options)), tracks_allocator=True)
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
        assert driver.is_history_on
        wait_until(lambda: len(driver.snapshots) == 1)
    assert not driver.is_history_on
    trace, imported = memtrace.load(tmp_path / "run.memtrace"), memtrace.load(path)
    assert any("come from torch's allocator history" in note for note in compute_coverage(trace).notes)
    recorded_peak = find_peak(trace, "cuda:0")
    assert recorded_peak.requested.bytes == find_peak(imported, "cuda:0").requested.bytes == 682_735_240
    assert recorded_peak.end_bytes == 420_190_612
    assert (blocks(trace).device == trace.devices.index("cuda:0")).sum() == len(blocks(imported).size)


def entry(number: int, time_us: int, action: str = "alloc") -> dict[str, Any]:
    """An entry of torch's history."""
    return {"action": action, "addr": 512 * number, "size": 8, "stream": 0, "time_us": time_us, "device_free": 0}


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_only_new_entries_of_the_history_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observer: Any
) -> None:
    """The program's own history has older entries, and every snapshot converts times with its own calibration."""
    now = time.time_ns() // 1000 + 1_000_000
    older = [entry(number, now - 10_000_000 + number) for number in range(20)]
    own = entry(0, now - 1_000_000, "snapshot")
    new = [
        entry(100 + number % 3, now + number, "free_completed" if number % 6 > 2 else "alloc") for number in range(30)
    ]
    reads = [[*older, own], [*older, own, *new[:12], own], [*older, own, *new[:12], own, *new[12:]]]
    for shift, read in enumerate(reads):
        read[:] = [raw | {"time_us": raw["time_us"] + shift} for raw in read]
    live = segment(0, 2 * MIB, (512, 512, 8, "active_allocated"))
    driver = FakeDriver(*(snapshot(live) | {"device_traces": [read]} for read in reads))
    driver.is_history_on = True
    use_driver(monkeypatch, driver, tracks_allocator=False)
    with memtrace.record(tmp_path / "run.memtrace", observer=observer, flush_seconds=0.05):
        wait_until(lambda: len(driver.snapshots) == 1)
    assert driver.is_history_on
    trace = memtrace.load(tmp_path / "run.memtrace")
    events = trace.events[trace.events.device == "cuda:0"]
    expected = ["free" if raw["action"] == "free_completed" else "alloc" for raw in new]
    assert events.kind[events.kind.isin(["alloc", "free"])].tolist() == expected
    assert events.allocated_size[events.kind == "baseline"].tolist() == [512]
    assert not any("missing" in note for note in trace.manifest.coverage.notes)


def test_the_programs_own_history_settings_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(snapshot())
    use_driver(monkeypatch, driver, tracks_allocator=False)

    def change(is_on: bool) -> None:
        assert driver.changes is not None
        before, after = driver.changes
        before()
        driver.is_history_on = is_on
        after()

    with memtrace.record(tmp_path / "enabled.memtrace", observer="native"):
        change(True)
    assert driver.is_history_on
    with memtrace.record(tmp_path / "disabled.memtrace", observer="native"):
        change(False)
        assert driver.is_history_on  # the recording needs it
    assert not driver.is_history_on


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_other_allocators_are_noted_once_and_leave_totals_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, observer: Any
) -> None:
    driver = FakeDriver(totals=[DeviceTotals(0, None, None, 9 * MIB)], allocator="pluggable")
    use_driver(monkeypatch, driver, tracks_allocator=False)
    with memtrace.record(tmp_path / "run.memtrace", observer=observer) as rec:
        torch.ones(1000)
        rec.step()
    assert [record.message.count("own CUDA allocator") for record in caplog.records] == [1]
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert trace.counters.name.unique().tolist() == ["device_used"]
    coverage = compute_coverage(trace)
    assert coverage.outside_allocator_bytes is None and coverage.num_steps == 1
    assert any("segments and out-of-memory errors are missing" in note for note in coverage.notes)
    assert trace.manifest.cuda_allocator == "pluggable"


def test_the_manifest_describes_devices_and_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1f2e")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "50")
    use_driver(monkeypatch, FakeDriver(snapshot()), tracks_allocator=True)
    with memtrace.record(tmp_path / "run.memtrace"):
        pass
    manifest = memtrace.load(tmp_path / "run.memtrace").manifest
    assert manifest.environment["CUDA_VISIBLE_DEVICES"] == "MIG-1f2e"
    assert manifest.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
    info = manifest.devices["cuda:0"]
    assert (info.total_bytes, info.uuid, info.pci_address) == (80 << 30, "GPU-0", "00000000:01:00.0")


def test_the_driver_waits_for_the_program_to_initialise_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_initialized", False)
    queue, calls = list(torch.cuda._queued_calls), []
    cancel = TorchDriver().when_ready(lambda: calls.append(1))
    assert len(torch.cuda._queued_calls) == len(queue) + 1
    cancel()
    assert torch.cuda._queued_calls == queue and not calls


PAGES = 24
MappedEvents = st.lists(
    st.tuples(st.booleans(), st.integers(0, PAGES - 1), st.integers(1, 8)).map(
        lambda item: (item[0], item[1], min(item[1] + item[2], PAGES))
    ),
    max_size=20,
)


def mapped_pages(events: list[tuple[bool, int, int]]) -> list[bool]:
    """Brute force: which pages are mapped after some events (is a map or an unmap, first page, end)."""
    pages = [False] * PAGES
    for is_map, begin, end in events:
        pages[begin:end] = [is_map] * (end - begin)
    return pages


def page_rows(events: list[tuple[bool, int, int]], device: int, base: int) -> list[tuple[int, ...]]:
    page = 2 * MIB
    kinds = (CODE["segment_unmap"], CODE["segment_map"])
    return [
        (kinds[is_map], device, base + page * begin, page * (end - begin), 0, 0, -1, -1)
        for is_map, begin, end in events
    ]


def native_sizes(rows: list[Any]) -> list[int]:
    """The allocated sizes that the native observer finds for the allocations among ``rows``, -1 where unknown."""
    observer = NativeObserver()
    observer.start(accesses=False, stacks=False, stack_min_bytes=0, device_time_min_bytes=-1)
    observer.cuda_events(rows)
    observer.stop()
    batch = observer.drain(-1)
    column = {
        name: np.frombuffer(batch[f"events.{name}"], COLUMN_DTYPES["events"][name])
        for name in ("kind", "device", "allocated_size")
    }
    is_allocation = (column["kind"] == CODE["alloc"]) & (column["device"] > 0)
    return column["allocated_size"][is_allocation].tolist()  # type: ignore[no-any-return]


@settings(deadline=None)
@given(MappedEvents, MappedEvents)
def test_blocks_in_any_mapped_part_of_an_expandable_segment_have_known_sizes(
    first: list[tuple[bool, int, int]], second: list[tuple[bool, int, int]]
) -> None:
    base = 0x7000_0000
    rows = page_rows(first, 0, base) + page_rows(second, 1, base + PAGES * 2 * MIB)
    addresses = [base + 2 * MIB * page for page in range(2 * PAGES)]
    allocations = [(CODE["alloc"], number // PAGES, address, 2 * MIB - 5, 0, 0, -1, -1)
                   for number, address in enumerate(addresses)]  # fmt: skip
    recorded = native_sizes(rows + allocations)
    expected = [2 * MIB if is_mapped else -1 for is_mapped in mapped_pages(first) + mapped_pages(second)]
    assert recorded == expected
    sizes = CudaBlockSizes()
    for kind, device, address, size, *_ in rows:
        sizes.segment_event(CudaEvent(0, kind, 1 + device, address, size))
    in_python = [
        sizes.allocated_size(1 + number // PAGES, address, 2 * MIB - 5) for number, address in enumerate(addresses)
    ]
    assert in_python == expected


@given(st.lists(st.tuples(st.sampled_from(["alloc", "free", "read"]), st.integers(0, 3)), max_size=40), st.data())
def test_accesses_get_the_block_that_is_live_at_their_time(steps: list[tuple[str, int]], data: st.DataObject) -> None:
    """Brute force: blocks are numbered as they are allocated; events arrive in any order and in several portions."""
    live: dict[int, int] = {}
    events, expected, num_blocks = [], [], 0
    for when, (kind, address) in enumerate(steps):
        if (kind == "alloc") == (address in live):
            continue
        if kind == "alloc":
            live[address], num_blocks = num_blocks, num_blocks + 1
        expected.append((when, CODE[kind], live[address]))
        events.append(CudaEvent(when, CODE[kind], 1, 512 * (1 + address), 8))
        if kind == "free":
            del live[address]
    taken: list[tuple[int, ...]] = []
    cuda, number = CudaBlocks(), 0
    cuts = sorted(data.draw(st.lists(st.integers(0, len(steps)), max_size=3)))
    for low, high in pairwise([0, *cuts, len(steps) + 1]):
        for event in data.draw(st.permutations([event for event in events if low <= event.time_ns < high])):
            cuda.add(event)
        rows, _, number = cuda.take(high - 1, number)
        taken += rows
    assert [row[:2] + row[3:4] for row in taken] == expected


def test_late_allocations_get_the_operator_that_ran_at_their_time() -> None:
    cuda = CudaBlocks()
    for thread, op, start_ns, end_ns in [(0, 7, 10_000, 20_000), (0, 8, 21_000, 30_000), (1, 9, 25_000, 40_000)]:
        cuda.add_call(thread, op, start_ns, end_ns)
    for number, time_ns in enumerate((5_000, 9_500, 15_000, 22_000, 26_000, 35_000)):
        cuda.add(CudaEvent(time_ns, CODE["alloc"], 1, 512 * (1 + number), 8))
    rows, _, _ = cuda.take(None, 0)
    assert [(row[7], row[9]) for row in rows] == [(-1, -1), (7, 0), (7, 0), (8, 0), (-1, -1), (9, 1)]


def test_an_overwritten_history_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time_ns() // 1000
    histories = [[entry(number, now + number) for number in range(first, first + 5)] for first in (100, 200)]
    driver = FakeDriver(snapshot(), *(snapshot() | {"device_traces": [history]} for history in histories))
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
    with memtrace.record(tmp_path / "run.memtrace", observer="dispatch", device_time=True):
        torch.ones(1 << 20)
    assert "no device times" in caplog.text
    assert any("no device times" in note for note in compute_coverage(memtrace.load(tmp_path / "run.memtrace")).notes)
