"""CUDA programs that tests run in processes of their own: ``python cuda.py NAME TRACE``, or without TRACE unrecorded."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import memtrace

ALLOCATOR = """
#include <stddef.h>
#include <sys/types.h>
int cudaMalloc(void**, size_t);
int cudaFree(void*);
void* allocate(ssize_t size, int device, void* stream) {
  void* pointer = 0;
  return cudaMalloc(&pointer, (size_t)size) == 0 ? pointer : 0;
}
void release(void* pointer, size_t size, int device, void* stream) { cudaFree(pointer); }
"""


def own_allocator() -> Any:
    """A pluggable allocator that calls cudaMalloc and cudaFree."""
    folder = Path(tempfile.mkdtemp())
    (folder / "allocator.c").write_text(ALLOCATOR)
    library = folder / "allocator.so"
    runtime = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudart" in line)
    subprocess.run(["cc", "-shared", "-fPIC", folder / "allocator.c", runtime, "-o", library], check=True)
    return torch.cuda.memory.CUDAPluggableAllocator(str(library), "allocate", "release")


def train(recording: Any, steps: int = 4) -> list[float]:
    """Train a small model; losses."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(512, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if recording is not None:
            recording.step()
    return losses


def change_allocator(recording: Any) -> object:
    """Choose an allocator inside the recorded block, then train."""
    torch.cuda.memory.change_current_allocator(own_allocator())
    return train(recording)


def own_pool(recording: Any) -> object:
    """Allocate some tensors from a pool with its own allocator."""
    pool = torch.cuda.MemPool(own_allocator().allocator())
    with torch.cuda.use_mem_pool(pool):
        private = torch.ones(5 << 20, device="cuda")
    return [*train(recording), private.numel()]


def disable_caching(recording: Any) -> object:
    """Disable caching in the middle of the program, and enable it again."""
    kept = [torch.ones(1 << 20, device="cuda")]
    torch.cuda.caching_allocator_enable(False)
    kept.append(torch.ones(2 << 20, device="cuda"))
    torch.ones(3 << 20, device="cuda")
    torch.cuda.caching_allocator_enable(True)
    kept.append(torch.ones(4 << 20, device="cuda"))
    return sum(tensor.numel() for tensor in kept)


def fork_before_cuda(recording: Any) -> object:
    """Use CUDA in forked children only."""
    initialised = torch.cuda.is_initialized()
    statuses = []
    for _ in range(2):
        if (child := os.fork()) == 0:
            try:
                torch.ones(3, device="cuda").sum().item()
            except BaseException:
                os._exit(1)
            os._exit(0)
        statuses.append(os.waitpid(child, 0)[1])
    return [initialised, statuses]


def capture(recording: Any) -> object:
    """Train by a CUDA graph of the whole step, whose capture contains a marked step and an optimizer step."""
    model = torch.nn.Linear(512, 512).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.ones(8192, 512, device="cuda")

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        if recording is not None:
            recording.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
            torch.cuda._sleep(2_000_000)
            optimizer.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        # The writer takes the GPU times of earlier operators while the graph is captured.
        num_parts = num_event_parts(recording)
        while recording is not None and num_event_parts(recording) < num_parts + 3:
            step()
    graph.replay()
    torch.cuda.synchronize()
    return "captured"


def num_event_parts(recording: Any) -> int:
    """Number of event parts that a recording has written."""
    return len(list(recording.path.glob("rank=0/events-*.parquet"))) if recording is not None else 0


PROGRAMS: dict[str, Callable[[Any], object]] = {
    function.__name__: function
    for function in (train, change_allocator, own_pool, disable_caching, fork_before_cuda, capture)
}


def main() -> None:
    name, *rest = sys.argv[1:]
    options = {"device_time": True, "flush_seconds": 0.01} if name == "capture" else {}
    with memtrace.record(rest[0], observer=rest[1], **options) if rest else nullcontext() as recording:
        print(PROGRAMS[name](recording))


if __name__ == "__main__":
    main()
