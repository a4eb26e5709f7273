"""Measures the copies that an offload makes on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from memtrace.analysis.bandwidth import COPY_SIZES, CopyBandwidths, fit_copy_cost
from memtrace.errors import MemtraceError
from memtrace.execution.offload_copies import Copy, host_copies
from memtrace.format.arrays import Array

_COPIES_PER_SIZE = 7


def measure_bandwidths(device: str | None = None) -> CopyBandwidths:
    """Measure the copies that ``memtrace.apply`` makes between a device and host memory.

    Args:
        device: ``cpu`` (copies to memory-mapped files) or a GPU (copies to pinned memory); None: the first GPU, or
            ``cpu`` without one.

    Raises:
        MemtraceError: There is no room for the largest copy.
    """
    place = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    copies = host_copies(place)
    times_ns: list[tuple[int, int]] = []
    try:
        for num_bytes in COPY_SIZES:
            content = torch.empty(num_bytes, dtype=torch.uint8, device=place).fill_(1).untyped_storage()
            buffer = copies.allocate(num_bytes)
            copy_out = partial(copies.copy_out, content, buffer, _do_nothing)
            # Like an offload, the copy back goes to new memory.
            copy_in = partial(copies.copy_in, buffer, num_bytes)
            rounds = [
                (_time_ns(place, copy_out), _time_ns(place, partial(_second, copy_in))) for _ in range(_COPIES_PER_SIZE)
            ]
            times_ns.append((min(out_ns for out_ns, _ in rounds), min(in_ns for _, in_ns in rounds)))
            copies.give_back(buffer)
    except (OSError, RuntimeError) as error:
        raise MemtraceError(f"copies of {place} cannot be measured: {error}") from error
    finally:
        copies.close()
    measured: Array = np.array(times_ns, np.float64)
    name = torch.cuda.get_device_name(place) if place.type == "cuda" else "memory-mapped files of this machine"
    return CopyBandwidths(fit_copy_cost(measured[:, 0]), fit_copy_cost(measured[:, 1]), f"measured, {name}")


def _time_ns(device: torch.device, start: Callable[[], Copy]) -> int:
    start_ns = time.perf_counter_ns()
    start().wait()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter_ns() - start_ns


def _second(start: Callable[[], tuple[torch.UntypedStorage, Copy]]) -> Copy:
    return start()[1]


def _do_nothing() -> None:
    """Nothing depends on the end of a measured copy."""
