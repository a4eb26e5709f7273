"""The CUDA side of a recording: on any machine with other people's histories in place of a GPU, and on one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.analysis.blocks import blocks
from memtrace.analysis.oom import explain_out_of_memory
from memtrace.analysis.peak import find_peak, reserved_bytes
from memtrace.format.schema import EVENT_KINDS
from memtrace.readers.cuda_snapshot.entries import read_entries
from memtrace.readers.unpickle import load_plain
from memtrace.recording import session
from memtrace.recording.cuda import CudaSide
from memtrace.recording.manifest import ManifestFile
from memtrace.recording.observers import Observer
from memtrace.trace import Trace

MIB = 1 << 20
CODE = {kind: code for code, kind in enumerate(EVENT_KINDS)}


class FakeDriver:
    """In place of torch.cuda: one snapshot after the other, and totals that are given."""

    def __init__(self, *snapshots: Mapping[str, Any], totals: list[tuple[int, int, int, int]] | None = None) -> None:
        self.snapshots = list(snapshots)
        self.rows = totals or []
        self.keeps_history = False

    def when_ready(self, call: Callable[[], None]) -> None:
        call()

    def snapshot(self) -> Mapping[str, Any]:
        return self.snapshots.pop(0) if len(self.snapshots) > 1 else self.snapshots[0]

    def totals(self) -> list[tuple[int, int, int, int]]:
        return self.rows

    def keep_history(self, max_entries: int) -> bool:
        self.keeps_history = True
        return True

    def drop_history(self) -> None:
        self.keeps_history = False


def use(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, *, tracked: bool) -> None:
    """Have recordings ask ``driver``; ``tracked``: as if the observer heard of every event itself."""

    def make(observer: Observer, manifest: ManifestFile) -> CudaSide:
        if tracked:
            observer.attach_cuda = lambda: True  # type: ignore[method-assign]
        return CudaSide(observer, driver, manifest)

    monkeypatch.setattr(session, "make_cuda_side", make)


def state(*segments: dict[str, Any], **settings: Any) -> dict[str, Any]:
    off = {"roundup_power2_divisions": {"1": 0}, "max_split_size": -1}
    return {"segments": list(segments), "device_traces": [[]], "allocator_settings": off | settings}


def segment(address: int, size: int, *blocks: tuple[int, int, int, str], expandable: bool = False) -> dict[str, Any]:
    """Blocks as (offset, size, requested, state)."""
    live = [block for block in blocks if block[3] == "active_allocated"]
    return {
        "device": 0, "address": address, "total_size": size, "stream": 0, "segment_pool_id": (0, 0),
        "segment_type": "small" if size == 2 * MIB else "large", "is_expandable": expandable, "frames": [],
        "allocated_size": sum(block[1] for block in live), "active_size": sum(block[1] for block in live),
        "requested_size": sum(block[2] for block in live),
        "blocks": [
            {"address": address + offset, "size": length, "requested_size": requested, "state": condition, "frames": []}
            for offset, length, requested, condition in blocks
        ],
    }  # fmt: skip


def rows_of(snapshot: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """The history of a snapshot as an observer is told of it, as if it happened now."""
    entries = read_entries(snapshot["device_traces"])
    place = np.where(entries.kind == CODE["oom"], entries.device_free, entries.address)
    columns = (entries.kind, entries.device, place, entries.size, entries.stream, np.maximum(entries.pool, 0))
    return [(*row, -1, -1) for row in zip(*(column.tolist() for column in columns), strict=True)]


def recorded(path: Path, rows: list[tuple[int, ...]]) -> Trace:
    from memtrace.recording.observers.build import native_module

    with memtrace.record(path, observer="native"):
        native_module().cuda_events(rows)
    return memtrace.load(path)


@pytest.mark.parametrize("name", ["complete_small", "complete_windows", "complete_forward_backward"])
def test_a_whole_history_told_live_gives_the_allocators_own_sizes(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Ground truth: the sizes of the blocks in the file's ``segments``, and the file read as a file."""
    path = data / "snapshots" / f"{name}.pickle"
    with path.open("rb") as file:
        snapshot = load_plain(file, path)
    use(monkeypatch, FakeDriver(state(), snapshot), tracked=True)
    trace = recorded(tmp_path / "run.memtrace", rows_of(snapshot))
    found, device = blocks(trace), next(name for name in trace.devices if name != "cpu")
    here = found.device == trace.devices.index(device)
    live = {
        int(address): int(size)
        for address, size in zip(
            found.address[here & (found.free_event < 0)],
            found.allocated_size[here & (found.free_event < 0)],
            strict=True,
        )
    }
    told = {
        block["address"]: block["size"]
        for part in snapshot["segments"]
        for block in part["blocks"]
        if block["state"] == "active_allocated"
    }
    assert live == told
    assert (found.allocated_size[here] > 0).all()
    mine, theirs = find_peak(trace, device), find_peak(memtrace.load(path), device)
    assert (mine.requested.bytes, mine.end_bytes) == (theirs.requested.bytes, theirs.end_bytes)
    assert mine.reserved is not None and theirs.reserved is not None
    assert (mine.reserved.bytes, mine.reserved_end_bytes) == (theirs.reserved.bytes, theirs.reserved_end_bytes)
    assert mine.allocated is not None and mine.allocated.bytes >= mine.requested.bytes


def test_what_is_older_than_the_recording_is_known_and_sized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, other = 0x7000_0000, 0x9000_0000
    before = state(
        segment(base, 20 * MIB, (0, 3 * MIB, 3 * MIB - 7, "active_allocated"), (3 * MIB, 17 * MIB, 0, "inactive")),
        segment(other, 2 * MIB, (0, 512, 5, "active_allocated"), (512, 2 * MIB - 512, 0, "inactive")),
    )
    after = state(
        segment(
            base, 20 * MIB, (0, 18 * MIB, 0, "inactive"), (18 * MIB, 2 * MIB, 2 * MIB - 900_000, "active_allocated")
        ),
        segment(other, 2 * MIB, (0, 512, 5, "active_allocated"), (512, 2 * MIB - 512, 0, "inactive")),
    )
    use(monkeypatch, FakeDriver(before, after), tracked=True)
    # The first takes all but the last 2 MiB; the second, 900 kB less than what is left, gets all of it.
    trace = recorded(
        tmp_path / "run.memtrace",
        [
            (CODE["alloc"], 0, base + 3 * MIB, 15 * MIB, 0, 0, -1, -1),
            (CODE["alloc"], 0, base + 18 * MIB, 2 * MIB - 900_000, 0, 0, -1, -1),
            (CODE["free"], 0, base, 3 * MIB - 7, 0, 0, -1, -1),
            (CODE["free"], 0, base + 3 * MIB, 15 * MIB, 0, 0, -1, -1),
        ],
    )
    found = blocks(trace)
    here = found.device == trace.devices.index("cuda:0")
    assert found.allocated_size[here].tolist() == [3 * MIB, 512, 15 * MIB, 2 * MIB]
    assert found.alloc_event[here].tolist()[:2] == [-1, -1]
    top = find_peak(trace, "cuda:0")
    assert top.baseline_bytes == 3 * MIB - 7 + 5
    assert top.allocated is not None and top.allocated.bytes == 20 * MIB + 512
    assert top.reserved is not None and (top.reserved.bytes, top.reserved_end_bytes) == (22 * MIB, 22 * MIB)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [2 * MIB, 19 * MIB]),
        ({"max_split_size": 19 * MIB}, [2 * MIB, 20 * MIB + MIB // 2]),
        ({"roundup_power2_divisions": {"1": 4}}, [-1, -1]),
    ],
)
def test_settings_decide_what_is_known_of_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], sizes: list[int]
) -> None:
    use(monkeypatch, FakeDriver(state(**settings)), tracked=True)
    trace = recorded(
        tmp_path / "run.memtrace",
        [
            (CODE["segment_alloc"], 0, 0x7000_0000, 22 * MIB + MIB // 2, 0, 0, -1, -1),
            (CODE["alloc"], 0, 0x7000_0000, 2 * MIB, 0, 0, -1, -1),
            (CODE["alloc"], 0, 0x7000_0000 + 2 * MIB, 19 * MIB, 0, 0, -1, -1),
        ],
    )
    found = blocks(trace)
    assert found.allocated_size[found.device == trace.devices.index("cuda:0")].tolist() == sizes


def test_torchs_own_history_serves_where_headers_are_missing(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = data / "snapshots" / "complete_forward_backward.pickle"
    with path.open("rb") as file:
        snapshot = load_plain(file, path)
    entries = snapshot["device_traces"][0]
    later_us = time.time_ns() // 1000 - entries[0]["time_us"] + 1_000_000
    for entry in entries:
        entry["time_us"] += later_us
    half = snapshot | {"device_traces": [entries[: len(entries) // 2]]}
    driver = FakeDriver(state(), half, snapshot)
    use(monkeypatch, driver, tracked=False)
    with memtrace.record(tmp_path / "run.memtrace", observer="native", flush_seconds=0.05):
        assert driver.keeps_history
        time.sleep(0.3)
    assert not driver.keeps_history
    trace, theirs = memtrace.load(tmp_path / "run.memtrace"), memtrace.load(path)
    assert any("CUDA's headers are missing" in note for note in compute_coverage(trace).notes)
    mine = find_peak(trace, "cuda:0")
    assert mine.requested.bytes == find_peak(theirs, "cuda:0").requested.bytes == 682_735_240
    assert mine.end_bytes == 420_190_612
    assert (blocks(trace).device == trace.devices.index("cuda:0")).sum() == len(blocks(theirs).size)


def test_a_history_that_was_overwritten_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def entries(first: int) -> list[dict[str, Any]]:
        now = time.time_ns() // 1000
        return [
            {"action": "alloc", "addr": 512 * n, "size": 8, "stream": 0, "time_us": now + n, "device_free": 0}
            for n in range(first, first + 5)
        ]

    use(
        monkeypatch,
        FakeDriver(state(), *(state() | {"device_traces": [entries(n)]} for n in (100, 200))),
        tracked=False,
    )
    with memtrace.record(tmp_path / "run.memtrace", observer="native", flush_seconds=0.05):
        time.sleep(0.3)
    assert any(
        "events of CUDA's allocator are lost" in note
        for note in compute_coverage(memtrace.load(tmp_path / "run.memtrace")).notes
    )


def test_totals_at_every_step_tell_of_memory_outside_the_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver(
        state(segment(0x7000_0000, 2 * MIB, (0, 2 * MIB, 0, "inactive"))), totals=[(0, 0, 2 * MIB, 9 * MIB)]
    )
    use(monkeypatch, driver, tracked=True)
    with memtrace.record(tmp_path / "run.memtrace") as rec:
        for step in range(3):
            driver.rows = [(0, 0, 2 * MIB, (10 + step) * MIB)]
            rec.step()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert compute_coverage(trace).outside_allocator_bytes == 10 * MIB
    frame = trace.counters
    assert frame[frame.name == "device_used"].value.tolist() == [size * MIB for size in (9, 10, 11, 12, 12)]
    assert reserved_bytes(trace, "cuda:0").start == 2 * MIB  # type: ignore[union-attr]


def test_a_driver_that_fails_does_not_fail_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = FakeDriver(state())
    use(monkeypatch, driver, tracked=True)
    with memtrace.record(tmp_path / "run.memtrace") as rec:
        monkeypatch.setattr(driver, "totals", lambda: 1 / 0)
        rec.step()
        torch.ones(1000)
    assert "not followed from here on" in caplog.text
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert compute_coverage(trace).finished
    assert compute_coverage(trace).outside_allocator_bytes is None


def test_replays_of_graphs_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        replays = 0

        def replay(self) -> None:
            Graph.replays += 1

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    original = Graph.replay
    use(monkeypatch, FakeDriver(state()), tracked=True)
    with memtrace.record(tmp_path / "run.memtrace"):
        Graph().replay()
        Graph().replay()
    assert Graph.replays == 2
    assert Graph.replay is original
    assert any(
        "2 replays of CUDA graphs" in note for note in compute_coverage(memtrace.load(tmp_path / "run.memtrace")).notes
    )


def test_device_times_that_cannot_be_had_are_said_to_be_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if torch.cuda.is_available():
        pytest.skip("here they can be had: see test_device_times_lie_within_the_run")
    with memtrace.record(tmp_path / "run.memtrace", device_time=True):
        torch.ones(1 << 20)
    assert "no device times" in caplog.text
    assert any("no device times" in note for note in compute_coverage(memtrace.load(tmp_path / "run.memtrace")).notes)


# Out of memory.

HUGE = 10**15


def test_running_out_of_memory_is_explained_and_the_exception_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        pytest.raises(RuntimeError, match="can't allocate memory") as caught,
        memtrace.record(tmp_path / "run.memtrace"),
    ):
        held = torch.ones(3 * MIB // 4)
        torch.empty(HUGE)
    assert caught.value.__cause__ is None and caught.value.__context__ is None
    del held
    said = capfd.readouterr().err
    assert "Out of memory on cpu" in said and "request for" in said and "test_cuda.py" in said
    assert "3.00 MiB" in said
    trace = memtrace.load(tmp_path / "run.memtrace")
    (failure,) = explain_out_of_memory(trace)
    older = compute_coverage(trace).baseline_bytes  # of whatever other tests imported
    assert (failure.asked_bytes, failure.live_bytes, failure.room) == (4 * HUGE, 3 * MIB + older, None)
    assert failure.device_free_bytes is None
    assert failure.site is not None and "test_running_out_of_memory" in failure.site
    assert compute_coverage(trace).stop_reason == "RuntimeError left the recorded block"


EXHAUSTED = """
import resource, sys
import memtrace, torch
with memtrace.record(sys.argv[1]):
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (400 << 20),) * 2)
    held = []
    while True:
        held.append(torch.empty(16 << 20, dtype=torch.uint8))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="by Linux's limit on address space")
def test_the_explanation_needs_nothing_of_a_process_without_memory(tmp_path: Path) -> None:
    """The exception's frames hold everything until the program ends: nothing is free for the analysis."""
    command = [sys.executable, "-c", EXHAUSTED, str(tmp_path / "run.memtrace")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "can't allocate memory" in done.stderr.splitlines()[-1]
    assert "Out of memory on cpu" in done.stderr and "Live memory: " in done.stderr, done.stderr


def test_an_explanation_that_fails_does_not_hide_the_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("memtrace.cli.failure.explain_failure", lambda folder: 1 / 0)
    with pytest.raises(RuntimeError, match="can't allocate memory"), memtrace.record(tmp_path / "run.memtrace"):
        torch.empty(HUGE)
    assert "cannot be told: division by zero" in caplog.text


def test_a_program_that_survives_running_out_of_memory_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with memtrace.record(tmp_path / "run.memtrace"):
        with pytest.raises(RuntimeError):
            torch.empty(HUGE)
        torch.ones(1000)
    assert "out of memory" not in capfd.readouterr().err.lower()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert compute_coverage(trace).finished
    assert len(explain_out_of_memory(trace)) == 1
    assert find_peak(trace, "cpu").requested.bytes == 4000 + compute_coverage(trace).baseline_bytes


def test_another_exception_is_not_explained(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="mine"), memtrace.record(tmp_path / "run.memtrace"):
        raise ValueError("mine")
    assert "out of memory" not in capfd.readouterr().err.lower()


# On a GPU.


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield torch.device("cuda:0")
    torch.cuda.empty_cache()


def train(device: torch.device, steps: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        model(torch.randn(1000 + 37 * step, 1024, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.cuda
@pytest.mark.parametrize("older", [False, True])
def test_a_recording_agrees_with_the_allocators_counters(tmp_path: Path, gpu: torch.device, older: bool) -> None:
    kept = [torch.ones(size, device=gpu) for size in (100, 700_000, 5_000_000)] if older else []
    torch.cuda.reset_peak_memory_stats()
    with memtrace.record(tmp_path / "run.memtrace", observer="native"):
        train(gpu, 5)
        stats = torch.cuda.memory_stats()
    trace = memtrace.load(tmp_path / "run.memtrace")
    found = find_peak(trace, "cuda:0")
    assert found.requested.bytes == stats["requested_bytes.all.peak"]
    assert found.end_bytes == stats["requested_bytes.all.current"]
    assert found.allocated is not None and found.allocated.bytes == stats["allocated_bytes.all.peak"]
    assert found.reserved is not None and found.reserved.bytes == stats["reserved_bytes.all.peak"]
    assert found.reserved_end_bytes == stats["reserved_bytes.all.current"]
    assert (compute_coverage(trace).outside_allocator_bytes or 0) > 0
    del kept


@pytest.mark.cuda
def test_a_step_survives_running_out_of_a_gpus_memory(
    tmp_path: Path, gpu: torch.device, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(torch.OutOfMemoryError), memtrace.record(tmp_path / "run.memtrace", observer="native"):
        held = torch.ones(64 * MIB, device=gpu)
        torch.empty(1 << 50, device=gpu)
    del held
    said = capfd.readouterr().err
    assert "Out of memory on cuda:0" in said and "test_cuda.py" in said
    (failure,) = explain_out_of_memory(memtrace.load(tmp_path / "run.memtrace"))
    assert failure.live_bytes == 256 * MIB and failure.room is not None
    assert failure.device_free_bytes is not None and failure.device_free_bytes > 0


@pytest.mark.cuda
def test_device_times_lie_within_the_run(tmp_path: Path, gpu: torch.device) -> None:
    with memtrace.record(tmp_path / "run.memtrace", observer="native", device_time=True):
        first = torch.randn(4096, 4096, device=gpu)
        for _ in range(20):
            first = first @ first / 64
        torch.cuda.synchronize()
    trace = memtrace.load(tmp_path / "run.memtrace")
    times, ops = trace.device_times, trace.ops
    joined = times.merge(ops, on="op_id", suffixes=("", "_host"))
    assert len(joined) >= 20
    assert (joined.duration_ns > 0).all()
    # The device begins after the host has asked it to, but for what the two clocks differ by.
    assert (joined.start_ns - joined.start_ns_host).min() > -1_000_000


@pytest.mark.cuda
def test_streams_and_waiting_frees_are_told(tmp_path: Path, gpu: torch.device) -> None:
    side = torch.cuda.Stream()
    with memtrace.record(tmp_path / "run.memtrace", observer="native"):
        block = torch.ones(4 * MIB, device=gpu)
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            block.record_stream(side)
            other = torch.ones(1000, device=gpu)
        del block
        torch.cuda.synchronize()
        torch.ones(1000, device=gpu)
        del other
    events = memtrace.load(tmp_path / "run.memtrace").events
    mine = events[events.device == "cuda:0"]
    assert mine.stream.dropna().nunique() == 2
    asked, done = (mine[mine.kind == kind] for kind in ("free_requested", "free"))
    first = asked.iloc[0]
    assert int(done[done.block_id == first.block_id].time_ns.iloc[0]) > int(first.time_ns) + 1_000_000


@pytest.mark.cuda
def test_a_replayed_graph_is_told(tmp_path: Path, gpu: torch.device) -> None:
    given = torch.ones(1000, device=gpu)
    graph = torch.cuda.CUDAGraph()
    with memtrace.record(tmp_path / "run.memtrace", observer="native"):
        with torch.cuda.graph(graph):
            given * 2
        graph.replay()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert any("1 replays of CUDA graphs" in note for note in compute_coverage(trace).notes)
    events = trace.events
    assert (events[events.device == "cuda:0"].pool.dropna() % 2 == 1).any()
