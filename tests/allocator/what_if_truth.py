"""Predicted and real effects of allocator settings on a training that runs out of memory, on the null device.

    python -m tests.allocator.what_if_truth

records a training whose batch doubles until a request fails, predicts what every setting of the sweep would do, and then
runs the training under each of them: on the same device, and on one with more memory than any setting needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from memtrace.allocator.settings import AllocatorSettings
from memtrace.allocator.what_if import AllocatorPrediction

VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
_LARGE_DEVICE: Final = "400GiB"
_MAX_PROCESSES: Final = 2


@dataclass(frozen=True)
class RealRun:
    """What the training really did under a setting, until the request that failed in the recording. Sizes in bytes."""

    peak_reserved: int
    peak_allocated: int
    num_retries: int
    has_failed: bool


@dataclass(frozen=True)
class Comparison:
    """The prediction for a setting and the real runs."""

    prediction: AllocatorPrediction
    limited: RealRun
    """On the device of the recording."""
    unlimited: RealRun
    """On a device with more memory than the setting needs, without a memory fraction."""

    @property
    def real_peak_reserved(self) -> int:
        """The peak to compare the prediction with: within the capacity where the training fits."""
        return (self.unlimited if self.limited.has_failed else self.limited).peak_reserved

    @property
    def is_exact(self) -> bool:
        """Whether the setting fits as predicted and its peaks are those predicted."""
        expected = self.unlimited if self.limited.has_failed else self.limited
        prediction = self.prediction
        return (
            prediction.fits is not self.limited.has_failed
            and prediction.fits is not None
            and prediction.peak_reserved_bytes == expected.peak_reserved
            and prediction.peak_allocated_bytes == expected.peak_allocated
        )


def train_until_it_fails() -> None:
    """Train with twice the batch in every step."""
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = 256
    while True:
        model(torch.randn(batch, 2048, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        batch *= 2


def record_training(path: Path) -> None:
    """Record the training until a request fails."""
    import torch

    import memtrace

    try:
        with memtrace.record(path):
            train_until_it_fails()
    except torch.OutOfMemoryError:
        pass


def run_training(num_requests: int) -> RealRun:
    """Train, and return what happened until the n-th request, by torch's own history of the allocator."""
    import torch

    class Done(Exception):
        pass

    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    try:
        train_until_it_fails()
    except torch.OutOfMemoryError:
        pass
    entries = torch.cuda.memory._snapshot()["device_traces"][0]
    return _measure(entries, num_requests)


def _measure(entries: list[dict[str, Any]], num_requests: int) -> RealRun:
    reserved = peak_reserved = num_served = num_retries = 0
    was_released = False
    for entry in entries:
        action = entry["action"]
        if action in ("segment_alloc", "segment_map"):
            reserved += entry["size"]
        elif action in ("segment_free", "segment_unmap"):
            reserved -= entry["size"]
        peak_reserved = max(peak_reserved, reserved)
        num_served += action == "alloc"
        if action == "oom":
            return RealRun(peak_reserved, 0, num_retries, True)
        if num_served == num_requests:
            break
    return RealRun(peak_reserved, 0, num_retries, False)
