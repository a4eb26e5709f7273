"""Recordings leave the program alone: exceptions, variables, threads, forks, other profilers, kills and full disks."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the first optimizer would import it, and a cycle of the import keeps that optimizer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.format.part_writer import PartWriter
from memtrace.recording.options import ObserverKind
from memtrace.recording.session import Recording
from tests.programs.tasks import make_step, mlp
from tests.recording.helpers import endless_recording, part_written, record_steps, wait_until


def test_an_exception_leaves_the_block_and_the_trace_is_complete(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), memtrace.record(tmp_path / "run.memtrace"):
        make_step(mlp())()
        raise ZeroDivisionError
    trace = memtrace.load(tmp_path / "run.memtrace")
    assert trace.manifest.finished
    assert trace.manifest.stop_reason == "ZeroDivisionError left the recorded block"


def test_an_exception_ends_the_module_calls_it_leaves(tmp_path: Path) -> None:
    class Broken(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("broken on purpose")

    with memtrace.record(tmp_path / "run.memtrace"):
        with pytest.raises(ValueError, match="broken on purpose"):
            nn.Sequential(nn.Linear(4, 4), Broken())(torch.zeros(1, 4))
        torch.ones(1000)
    ops = memtrace.load(tmp_path / "run.memtrace").ops
    assert ops.iloc[-1].phase == "other"


def test_variables_of_the_program_live_no_longer_than_without_a_recording(tmp_path: Path) -> None:
    def loop() -> list[bool]:
        model, references = nn.Linear(8, 8), []
        for _ in range(3):
            tensor = torch.ones(64)
            references.append(weakref.ref(tensor))
            model(torch.randn(4, 8)).sum().backward()
            del tensor
        return [reference() is None for reference in references]

    with memtrace.record(tmp_path / "run.memtrace"):
        assert loop() == [True] * 3


def test_a_recording_keeps_no_model_alive_after_its_end(tmp_path: Path) -> None:
    def train() -> tuple[Recording, list[weakref.ref[Any]]]:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.AdamW(model.parameters())
        with memtrace.record(tmp_path / "run.memtrace", model=model, optimizer=optimizer) as recording:
            for _ in range(2):
                model(torch.randn(4, 8)).sum().backward()
                optimizer.step()
        return recording, [weakref.ref(model), weakref.ref(model.weight), weakref.ref(optimizer)]

    gc.collect()
    gc.disable()  # a cycle would keep them as well
    try:
        recording, references = train()
        assert [reference() for reference in references] == [None] * 3
        assert recording.has_ended
    finally:
        gc.enable()


def test_torch_profiler_can_run_at_the_same_time(tmp_path: Path) -> None:
    with torch.profiler.profile(profile_memory=True, with_stack=True) as profile:
        trace = record_steps(make_step(mlp()), tmp_path / "run.memtrace", num_steps=1)
    assert len(profile.events()) > 0
    assert compute_coverage(trace).num_steps == 1


def test_forked_workers_and_threads_of_the_program(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.randn(32, 8)), batch_size=8, num_workers=1)
    model = nn.Linear(8, 8)

    def work() -> None:
        for _ in range(20):
            torch.randn(333).mul(2)

    with memtrace.record(tmp_path / "run.memtrace"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        for (batch,) in loader:
            model(batch).sum().backward()
    trace = memtrace.load(tmp_path / "run.memtrace")
    events, ops = trace.events, trace.ops
    assert (events[events["size"] == 333 * 4].kind == "alloc").sum() == 40
    names = ops[ops.thread == 1].name.dropna().map(lambda name: trace.name(int(name)))
    # The first operator of a thread is not recorded, but its memory is.
    assert (names == "aten::mul.Tensor").sum() >= 19


def test_a_killed_process_leaves_a_trace_that_opens(tmp_path: Path) -> None:
    with endless_recording(tmp_path / "run.memtrace") as process:
        os.kill(process.pid, signal.SIGKILL)
    coverage = compute_coverage(memtrace.load(tmp_path / "run.memtrace"))
    assert not coverage.finished
    assert coverage.num_events > 0


@pytest.mark.parametrize("observer", ["native", "dispatch"])
@pytest.mark.parametrize("num_later_steps", [0, 1])
def test_a_full_disk_ends_the_recording_but_not_the_training(
    observer: ObserverKind,
    num_later_steps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = make_step(mlp())
    append = PartWriter.append

    def append_to_full_disk(self: PartWriter, *args: Any) -> None:
        append(self, *args)
        raise OSError(28, "No space left on device")

    with memtrace.record(tmp_path / "run.memtrace", flush_seconds=0.02, observer=observer) as recording:
        with part_written(recording):
            step()
        monkeypatch.setattr(PartWriter, "append", append_to_full_disk)
        step()
        wait_until(lambda: not recording.is_recording)
        for _ in range(num_later_steps):
            step()
    assert caplog.text.count("No space left on device") == 1
    assert "recording stopped, training continues" in caplog.text
    coverage = compute_coverage(memtrace.load(tmp_path / "run.memtrace"))
    assert not coverage.finished
    assert coverage.num_events > 0


def test_parameters_of_a_distributed_data_parallel_model_keep_their_names(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(16, 16))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step() -> None:
            model(torch.randn(4, 16)).sum().backward()
            optimizer.step()

        trace = record_steps(step, tmp_path / "run.memtrace", num_steps=2)
    finally:
        torch.distributed.destroy_process_group()
    assert "Linear.weight" in {trace.name(int(name)) for name in trace.labels.name.dropna()}
