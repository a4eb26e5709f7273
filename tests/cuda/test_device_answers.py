"""Answers that rest on the clock of the GPU and on the driver's count of its memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import memtrace
from memtrace.analysis import access_intervals, blocks_table, measure_stalls
from memtrace.analysis.device_clock import DEVICE, LAUNCH
from memtrace.analysis.oom import explain_out_of_memory
from tests.cuda.settings import on_null_device

pytestmark = pytest.mark.cuda
MIB = 1 << 20
BUSY_CYCLES = 200_000_000
"""0.2 s on the null device, at least 0.08 s on a GPU of 2.5 GHz."""
BUSY_NS = 80_000_000


def intervals_of_busy_stream(path: Path, *, device_time: bool) -> tuple[int, int]:
    """Return length and clock of the interval between two accesses, between which the GPU is busy for BUSY_NS."""
    with memtrace.record(path, observer="native", device_time=device_time):
        block = torch.ones(4 * MIB, device="cuda")
        block.mul_(2)
        torch.cuda._sleep(BUSY_CYCLES)
        block.mul_(2)
        torch.cuda.synchronize()
    trace = memtrace.load(path)
    table = blocks_table(trace)
    number = table.index[table["size"] == 16 * MIB][0]
    intervals = access_intervals(trace)
    last = [row for row, block_id in enumerate(intervals.block.tolist()) if block_id == number][-1]
    return int(intervals.duration_ns[last]), int(intervals.clock[last])


def test_an_interval_in_which_the_gpu_is_busy_is_as_long_as_on_the_gpu(tmp_path: Path) -> None:
    length_ns, clock = intervals_of_busy_stream(tmp_path / "run.memtrace", device_time=True)
    assert clock == DEVICE and length_ns >= BUSY_NS


def test_without_device_times_the_interval_is_that_of_the_launches(tmp_path: Path) -> None:
    _, clock = intervals_of_busy_stream(tmp_path / "run.memtrace", device_time=False)
    assert clock == LAUNCH


def test_a_wait_during_which_the_gpu_works_is_no_stall(tmp_path: Path) -> None:
    """The loader returns its second batch when the GPU has finished the first step, and the GPU lost no time."""
    block = torch.ones(4 * MIB, device="cuda")

    def loader() -> Iterator[int]:
        for number in range(3):
            torch.cuda.synchronize()
            yield number

    with memtrace.record(tmp_path / "run.memtrace", observer="native", device_time=True) as recording:
        block.mul_(2)  # the first operator that is timed waits for the GPU, to compare its clock with that of the host
        for _ in recording.steps(loader()):
            torch.cuda._sleep(BUSY_CYCLES)
            block.mul_(2)
    stalls = measure_stalls(memtrace.load(tmp_path / "run.memtrace"))
    assert stalls.clock == "device"
    for row in stalls.steps[1:]:
        assert row.host_wait_ns is not None and row.data_wait_ns is not None
        assert row.host_wait_ns - row.data_wait_ns >= 0.9 * BUSY_NS


@pytest.fixture
def take() -> Iterator[Callable[[int], None]]:
    """Takes bytes of the null device as another process would, and gives them back after the test."""
    if not on_null_device():
        pytest.skip("only on the null device can a test take memory as another process")
    library = ctypes.CDLL("libcuda.so.1")
    library.nullcuda_take.argtypes = [ctypes.c_int, ctypes.c_int64]
    taken = []

    def take_bytes(num_bytes: int) -> None:
        library.nullcuda_take(0, num_bytes)
        taken.append(num_bytes)

    yield take_bytes
    library.nullcuda_take(0, -sum(taken))


def test_memory_of_another_process_explains_an_out_of_memory_error(
    tmp_path: Path, take: Callable[[int], None], capfd: pytest.CaptureFixture[str]
) -> None:
    torch.cuda.empty_cache()
    block = torch.ones(MIB, device="cuda")
    with pytest.raises(torch.OutOfMemoryError), memtrace.record(tmp_path / "run.memtrace", observer="native"):
        free_bytes, _ = torch.cuda.mem_get_info()
        take(free_bytes - 300 * MIB)
        torch.empty(400 * MIB, dtype=torch.uint8, device="cuda")
    (failure,) = explain_out_of_memory(memtrace.load(tmp_path / "run.memtrace"))
    assert failure.outside is not None and failure.outside.is_exact
    assert failure.outside.growth_bytes == free_bytes - 300 * MIB
    assert failure.advice[0].startswith("Check for other processes on the device")
    assert "with 100 MiB of them" in failure.advice[0]
    assert "Memory in use outside torch's allocator" in capfd.readouterr().err
    del block
