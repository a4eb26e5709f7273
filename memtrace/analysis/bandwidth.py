"""The cost of copies out of a device and back, measured on this machine: t = a + b*S for each direction."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from memtrace.analysis.access import Bandwidths, CopyCost
from memtrace.format.arrays import Array

SIZES = tuple(1 << power for power in range(12, 27, 2))
ROUNDS = 7


def measure() -> Bandwidths:
    """Copies between the first GPU and pinned host memory; without a GPU between two buffers of the host."""
    import torch

    cuda = torch.cuda.is_available()
    device = torch.device("cuda:0" if cuda else "cpu")
    inside = torch.empty(SIZES[-1], dtype=torch.uint8, device=device).fill_(1)
    outside = torch.empty(SIZES[-1], dtype=torch.uint8, pin_memory=cuda).fill_(1)

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    def out(size: int) -> None:
        outside[:size].copy_(inside[:size], non_blocking=True)
        wait()

    def back(size: int) -> None:
        inside[:size].copy_(outside[:size], non_blocking=True)
        wait()

    source = torch.cuda.get_device_name(0) if cuda else "this machine without a GPU: host to host"
    return Bandwidths(fitted(_times(out)), fitted(_times(back)), f"measured, {source}")


def _times(copy: Callable[[int], None]) -> Array:
    """The best of ROUNDS for each of SIZES, ns."""
    best = []
    for size in SIZES:
        taken = []
        for _ in range(ROUNDS):
            began = time.perf_counter_ns()
            copy(size)
            taken.append(time.perf_counter_ns() - began)
        best.append(min(taken))
    return np.array(best, np.float64)


def fitted(times_ns: Array) -> CopyCost:
    """The line through the times of SIZES that has the least relative error; it starts at 0 or above."""
    sizes = np.array(SIZES, np.float64)
    slope, start = np.polyfit(sizes, times_ns, 1, w=1 / times_ns)
    if start < 0:
        start, slope = 0.0, float((times_ns / sizes).mean())
    return CopyCost(float(start), float(slope))
