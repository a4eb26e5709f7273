"""Recordings on a GPU, compared with the counters and the history of the CUDA allocator."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.analysis.blocks import blocks
from memtrace.analysis.oom import explain_out_of_memory
from memtrace.analysis.peak import find_peak
from memtrace.recording.options import ObserverKind
from memtrace.trace import Trace
from tests.recording.helpers import MIB, PROGRAMS

pytestmark = pytest.mark.cuda
ACTIONS = {"free_completed": "free"} | {
    name: name for name in ("alloc", "free_requested", "segment_alloc", "segment_free", "segment_map", "segment_unmap")
}


@pytest.fixture
def gpu() -> Iterator[torch.device]:
    # cuBLAS keeps a workspace for every stream, which an earlier test may have created.
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    yield torch.device("cuda:0")
    torch.cuda.empty_cache()


def run_program(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program of tests/programs/cuda.py: NAME TRACE OBSERVER, or NAME alone to run it unrecorded."""
    command = [sys.executable, str(PROGRAMS / "cuda.py"), name, *arguments]
    root = str(PROGRAMS.parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr[-3000:]
    return result


def allocator_history(entries: list[dict[str, Any]]) -> list[tuple[str, int, int, int]]:
    """The entries of torch's history as kind, address, size and stream."""
    return [
        (ACTIONS[entry["action"]], entry["addr"], entry["size"], entry["stream"])
        for entry in entries
        if entry["action"] in ACTIONS
    ]


def recorded_history(trace: Trace) -> list[tuple[str, int, int, int]]:
    """The same of a trace."""
    events = trace.events
    events = events[(events.device == "cuda:0") & events.kind.isin(list(ACTIONS.values()))]
    columns = (events.kind, *(events[name].astype("int64") for name in ("address", "size", "stream")))
    return list(zip(*(column.tolist() for column in columns), strict=True))


def train(device: torch.device, steps: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(6))).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        model(torch.randn(1000 + 37 * step, 1024, device=device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("has_older_blocks", [False, True])
def test_peaks_are_those_of_the_allocators_counters(tmp_path: Path, gpu: torch.device, has_older_blocks: bool) -> None:
    older = [torch.ones(size, device=gpu) for size in (100, 700_000, 5_000_000)] if has_older_blocks else []
    torch.cuda.reset_peak_memory_stats()
    with memtrace.record(tmp_path / "run.memtrace", observer="native"):
        train(gpu, 5)
        stats = torch.cuda.memory_stats()
    trace = memtrace.load(tmp_path / "run.memtrace")
    highest = find_peak(trace, "cuda:0")
    assert highest.requested.bytes == stats["requested_bytes.all.peak"]
    assert highest.end_bytes == stats["requested_bytes.all.current"]
    assert highest.allocated is not None and highest.allocated.bytes == stats["allocated_bytes.all.peak"]
    assert highest.reserved is not None and highest.reserved.bytes == stats["reserved_bytes.all.peak"]
    assert highest.reserved_end_bytes == stats["reserved_bytes.all.current"]
    assert (compute_coverage(trace).outside_allocator_bytes or 0) > 0
    del older


def test_an_out_of_memory_error_of_the_gpu_is_explained(
    tmp_path: Path, gpu: torch.device, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(torch.OutOfMemoryError), memtrace.record(tmp_path / "run.memtrace", observer="native"):
        tensor = torch.ones(64 * MIB, device=gpu)
        torch.empty(1 << 50, device=gpu)
    del tensor
    printed = capfd.readouterr().err
    assert "out of memory on cuda:0" in printed.lower() and "test_gpu.py" in printed
    (failure,) = explain_out_of_memory(memtrace.load(tmp_path / "run.memtrace"))
    assert failure.live_bytes == 256 * MIB and failure.room is not None
    assert failure.device_free_bytes is not None and failure.device_free_bytes > 0


def test_device_times_lie_within_the_run(tmp_path: Path, gpu: torch.device) -> None:
    with memtrace.record(tmp_path / "run.memtrace", observer="native", device_time=True):
        product = torch.randn(4096, 4096, device=gpu)
        for _ in range(20):
            product = product @ product / 64
        torch.cuda.synchronize()
    trace = memtrace.load(tmp_path / "run.memtrace")
    times, ops = trace.device_times, trace.ops
    timed_ops = times.merge(ops, on="op_id", suffixes=("", "_host"))
    assert len(timed_ops) >= 20
    assert (timed_ops.duration_ns > 0).all()
    # The device starts an operator after the host has launched it, except for the error of the clock alignment.
    assert (timed_ops.start_ns - timed_ops.start_ns_host).min() > -1_000_000


def test_streams_and_deferred_frees_are_recorded(tmp_path: Path, gpu: torch.device) -> None:
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
    events = events[events.device == "cuda:0"]
    assert events.stream.dropna().nunique() == 2
    requested, completed = (events[events.kind == kind] for kind in ("free_requested", "free"))
    first = requested.iloc[0]
    completed_ns = int(completed[completed.block_id == first.block_id].time_ns.iloc[0])
    assert completed_ns > int(first.time_ns) + 1_000_000


def test_the_replay_of_a_cuda_graph_is_noted(tmp_path: Path, gpu: torch.device) -> None:
    tensor = torch.ones(1000, device=gpu)
    graph = torch.cuda.CUDAGraph()
    with memtrace.record(tmp_path / "run.memtrace", observer="native"):
        with torch.cuda.graph(graph):
            tensor * 2
        graph.replay()
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert any("1 replays of CUDA graphs" in note for note in compute_coverage(trace).notes)
    events = trace.events
    assert (events[events.device == "cuda:0"].pool.dropna() % 2 == 1).any()


def use_streams_and_threads(device: torch.device) -> None:
    """Train on the main thread, allocate on another, and free blocks that another stream uses."""
    side = torch.cuda.Stream()

    def allocate_elsewhere() -> None:
        for size in (700_000, 3_000_000):
            torch.empty(size, device=device)

    for _ in range(3):
        with torch.cuda.stream(side):
            block = torch.ones(3 * MIB, device=device)
            torch.cuda._sleep(1_000_000)
        block.record_stream(torch.cuda.current_stream())
        del block
        train(device, 1)
        thread = threading.Thread(target=allocate_elsewhere)
        thread.start()
        thread.join()
    torch.cuda.synchronize()


@pytest.mark.parametrize("starts_in_mid_run", [False, True])
@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_events_are_those_of_torchs_history(
    tmp_path: Path, gpu: torch.device, observer: Any, starts_in_mid_run: bool
) -> None:
    older = [torch.ones(size, device=gpu) for size in (100, 700_000, 5_000_000)] if starts_in_mid_run else []
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    try:
        use_streams_and_threads(gpu)
        num_before = len(torch.cuda.memory._snapshot()["device_traces"][0])
        with memtrace.record(tmp_path / "run.memtrace", observer=observer, flush_seconds=0.02):
            use_streams_and_threads(gpu)
            entries = torch.cuda.memory._snapshot()["device_traces"][0][num_before:]
        assert torch._C._cuda_isHistoryEnabled()
        assert len(torch.cuda.memory._snapshot()["device_traces"][0]) >= num_before + len(entries)
    finally:
        torch.cuda.memory._record_memory_history(None)
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert recorded_history(trace) == allocator_history(entries)
    table = blocks(trace)
    on_device = table.device == trace.devices.index("cuda:0")
    assert (table.allocated_size[on_device] > 0).all()
    events = trace.events
    events = events[events.device == "cuda:0"]
    assert events.op_id[events.kind == "alloc"].notna().mean() > 0.9
    assert set(trace.counters.name) == {"allocated", "reserved", "device_used"}
    del older


@pytest.mark.parametrize("observer", ["native", "dispatch"])
@pytest.mark.parametrize(
    ("program", "environment", "reason"),
    [
        ("train", {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "the allocator cudaMallocAsync"),
        ("train", {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "while caching is disabled"),
        ("change_allocator", {}, "the program's own CUDA allocator"),
    ],
)
def test_an_allocator_without_events_is_recorded_by_its_tensors(
    tmp_path: Path, program: str, environment: dict[str, str], reason: str, observer: str
) -> None:
    """Ground truth: the losses without a recording, and the sizes of the model's tensors."""
    recorded = run_program(program, str(tmp_path / "run.memtrace"), observer, **environment)
    assert recorded.stdout == run_program(program, **environment).stdout
    assert recorded.stderr.count(reason) == 1
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert any(reason in note for note in trace.manifest.coverage.notes)
    table = blocks(trace)
    on_device = table.device == trace.devices.index("cuda:0")
    parameters = {4 * number for number in (256 * 1024, 1024, 256)}
    assert parameters <= set(table.size[on_device].tolist())
    # The inputs, activations and gradients of every step were freed before its end.
    assert ((table.free_event >= 0) & on_device & (table.size == 4 * 512 * 1024)).sum() >= 4
    assert (table.allocated_size[on_device] < 0).all()
    assert "device_used" in set(trace.counters.name)
    assert compute_coverage(trace).num_steps == 4


def test_a_memory_pool_with_its_own_allocator_is_recorded(tmp_path: Path) -> None:
    recorded = run_program("own_pool", str(tmp_path / "run.memtrace"), "native")
    assert recorded.stdout == run_program("own_pool").stdout
    events = memtrace.load(tmp_path / "run.memtrace").events
    private = events[(events.kind == "alloc") & (events["size"] == 4 * (5 << 20))]
    assert len(private) == 1 and int(private.pool.iloc[0]) > 0


def test_blocks_allocated_while_caching_is_disabled_are_recorded(tmp_path: Path) -> None:
    recorded = run_program("disable_caching", str(tmp_path / "run.memtrace"), "native")
    assert recorded.stdout == run_program("disable_caching").stdout
    trace = memtrace.load(tmp_path / "run.memtrace")
    table = blocks(trace)
    on_device = table.device == trace.devices.index("cuda:0")
    assert sorted((table.size[on_device] >> 22).tolist()) == [1, 2, 3, 4]
    assert (table.free_event[on_device & (table.size == 3 << 22)] >= 0).all()


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_a_recording_does_not_initialise_cuda(tmp_path: Path, observer: str) -> None:
    recorded = run_program("fork_before_cuda", str(tmp_path / "run.memtrace"), observer)
    assert recorded.stdout == run_program("fork_before_cuda").stdout == "[False, [0, 0]]\n"
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert set(trace.manifest.devices) == {"cpu"}
    assert trace.manifest.cuda_allocator is None


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_a_graph_can_be_captured_while_recording(tmp_path: Path, observer: str) -> None:
    recorded = run_program("capture", str(tmp_path / "run.memtrace"), observer)
    assert recorded.stdout == "captured\n"
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert len(trace.device_times) > 0 or observer == "dispatch"
    assert compute_coverage(trace).num_steps >= 4 and len(trace.counters) > 0


def test_the_manifest_describes_the_gpu(tmp_path: Path, gpu: torch.device) -> None:
    with memtrace.record(tmp_path / "run.memtrace"):
        torch.ones(1, device=gpu)
    manifest = memtrace.load(tmp_path / "run.memtrace").manifest
    info, properties = manifest.devices["cuda:0"], torch.cuda.get_device_properties(0)
    assert (info.name, info.total_bytes) == (properties.name, properties.total_memory)
    assert manifest.cuda_allocator == "native"


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_an_inner_recording_is_a_window_of_the_outer_one(
    observer: ObserverKind, gpu: torch.device, tmp_path: Path
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 8)).to(gpu)

    def step() -> None:
        model(torch.randn(64, 512, device=gpu)).sum().backward()

    with memtrace.record(tmp_path / "outer.memtrace", observer=observer):
        step()
        with memtrace.record(tmp_path / "inner.memtrace", observer=observer):
            step()
            kept = torch.empty(32 * MIB, device=gpu, dtype=torch.uint8)  # reserves another segment
        del kept
    outer, inner = (memtrace.load(tmp_path / f"{name}.memtrace") for name in ("outer", "inner"))
    num_live = inner.num_rows("live")
    body, whole = inner.events.iloc[num_live:].astype(str), outer.events.astype(str)
    first = int((whole[["time_ns", "kind"]] == body.iloc[0][["time_ns", "kind"]]).all(axis=1).to_numpy().argmax())
    window = whole.iloc[first : first + len(body)]
    assert body.to_numpy().tolist() == window.to_numpy().tolist()
    live = outer.window_of_rows(first, first + len(body)).events.iloc[:num_live]
    columns = ["device", "block_id", "size", "allocated_size", "address"]
    assert inner.events.iloc[:num_live][columns].astype(str).to_numpy().tolist() == (
        live[columns].astype(str).to_numpy().tolist()
    )
    assert len(inner.segments) > 0
    assert inner.manifest.devices.keys() == outer.manifest.devices.keys()
