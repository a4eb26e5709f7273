"""Predicted and real effects of allocator settings on a training that runs out of memory, on the null device.

    python -m tests.allocator.what_if_truth [SETTING ...]

records a training whose batch doubles until a request fails, predicts what every setting of the sweep would do, and then
runs the training under each of them: on the same device, and on one with more memory than any setting needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

VARIABLE: Final = "PYTORCH_CUDA_ALLOC_CONF"
MEMORY: Final = "8GiB"
_LARGE_MEMORY: Final = "400GiB"


@dataclass(frozen=True)
class RealRun:
    """What the training really did under a setting, until the request that failed in the recording."""

    peak_reserved: int
    """Bytes."""
    has_failed: bool
    """A request failed."""


@dataclass(frozen=True)
class Comparison:
    """The prediction for a setting, and what really happened. Sizes in bytes."""

    setting: str
    predicted_peak: int
    predicted_fits: bool | None
    real_peak: int
    """Within the memory of the device where the training fits, otherwise on a larger device."""
    really_fits: bool

    @property
    def is_exact(self) -> bool:
        """Whether the prediction is what happened."""
        return (self.predicted_peak, self.predicted_fits) == (self.real_peak, self.really_fits)


def train_until_a_request_fails() -> None:
    """Train with twice the batch in every step."""
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(2048, 2048) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = 256
    try:
        while batch < 1 << 18:
            model(torch.randn(batch, 2048, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            batch *= 2
    except torch.OutOfMemoryError:
        pass


def run_training(num_requests: int) -> RealRun:
    """Train, and return what happened until the n-th request, by torch's own history of the allocator."""
    import torch

    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context=None, max_entries=1_000_000)
    train_until_a_request_fails()
    entries: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    reserved = peak = num_served = 0
    for entry in entries:
        if entry["action"] in ("segment_alloc", "segment_map"):
            reserved += entry["size"]
        elif entry["action"] in ("segment_free", "segment_unmap"):
            reserved -= entry["size"]
        peak = max(peak, reserved)
        num_served += entry["action"] == "alloc"
        if entry["action"] == "oom" or num_served == num_requests:
            return RealRun(peak, entry["action"] == "oom")
    raise AssertionError(f"the training made {num_served} requests, fewer than {num_requests}")


def compare_settings(settings: Sequence[str] | None = None) -> Iterator[Comparison]:
    """Record the training, and compare the predictions for settings (None: a sweep) with real runs."""
    from memtrace.allocator.history import ALLOC, OOM, AllocatorHistory
    from memtrace.allocator.plan import plan_device
    from memtrace.allocator.requests import read_device_history
    from memtrace.allocator.settings import AllocatorSettings
    from memtrace.trace import load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.memtrace"
        _run_process("", MEMORY, "record", str(path))
        history = read_device_history(load(path), "cuda:0")
    assert isinstance(history, AllocatorHistory)
    assert (history.kind == OOM).sum() == 1
    plan = plan_device(history, None if settings is None else [AllocatorSettings.parse(text) for text in settings])
    assert plan.replay is not None and plan.replay.is_exact, plan.replay
    num_requests = int(((history.kind == ALLOC) | (history.kind == OOM)).sum())
    for prediction in plan.predictions:
        asked = AllocatorSettings.parse(prediction.setting)
        real = _measure(asked, MEMORY, num_requests)
        fits = not real.has_failed
        if not fits:
            real = _measure(replace(asked, memory_fraction=None), _LARGE_MEMORY, num_requests)
        yield Comparison(prediction.setting, prediction.peak_reserved_bytes, prediction.fits, real.peak_reserved, fits)


def _measure(settings: Any, memory: str, num_requests: int) -> RealRun:
    return RealRun(**json.loads(_run_process(str(settings), memory, "run", str(num_requests)).splitlines()[-1]))


def _run_process(setting: str, memory: str, *arguments: str) -> str:
    environment = {**os.environ, VARIABLE: setting, "NULLCUDA_MEMORY": memory}
    command = [sys.executable, "-m", "tests.allocator.what_if_truth", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def main() -> int:
    """Run a worker, or print the table; the exit code is 1 where a prediction is wrong."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["record"]:
        import memtrace

        with memtrace.record(arguments[1]):
            train_until_a_request_fails()
        return 0
    if arguments[:1] == ["run"]:
        print(json.dumps(asdict(run_training(int(arguments[1])))))
        return 0
    num_wrong = 0
    print(f"{'setting':68s} {'predicted':>9s} {'real':>9s} {'fits':>5s} {'really':>6s}")
    for row in compare_settings(arguments or None):
        num_wrong += not row.is_exact
        fits = {True: "yes", False: "no", None: "?"}
        peaks = f"{row.predicted_peak >> 20:>9,} {row.real_peak >> 20:>9,}"
        print(
            f"{row.setting:68s} {peaks} {fits[row.predicted_fits]:>5s} {fits[row.really_fits]:>6s}"
            + "   DIFFERENT" * (not row.is_exact),
            flush=True,
        )
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
