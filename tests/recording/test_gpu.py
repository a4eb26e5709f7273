"""Recordings on a GPU, compared with the counters of the CUDA allocator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.analysis.oom import explain_out_of_memory
from memtrace.analysis.peak import find_peak
from tests.recording.helpers import MIB

pytestmark = pytest.mark.cuda


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
