"""Training steps: from optimizer steps, from marks, with limits, and with only the last ones kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import memtrace
from memtrace.analysis import compute_coverage
from memtrace.analysis.coverage import NO_TRAINING_NOTE
from memtrace.analysis.steps import step_columns
from tests.programs.tasks import gpt, make_step, mlp
from tests.recording.helpers import live_bytes, part_written, record_steps

WIDTH = 8


def test_steps_are_rounds_of_optimizer_steps(tmp_path: Path) -> None:
    """With gradient accumulation and two optimizers."""
    model = nn.Linear(8, 8)
    first, second = torch.optim.SGD(model.parameters(), 0.1), torch.optim.Adam(model.parameters())
    with memtrace.record(tmp_path / "run.memtrace"):
        for _ in range(4):
            for _ in range(3):
                model(torch.randn(2, 8)).sum().backward()
            first.step()
            second.step()
    assert step_columns(memtrace.load(tmp_path / "run.memtrace")).step.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("observer", ["native", "dispatch"])
@pytest.mark.parametrize("num_parts", [1, 4])
def test_a_mark_after_several_optimizer_steps_ends_one_step(observer: str, num_parts: int, tmp_path: Path) -> None:
    """Also when optimizer steps are on disk as training steps before the first mark."""
    critic, generator = (torch.optim.SGD(nn.Linear(8, 8).parameters()) for _ in range(2))
    flush_seconds = 60 if num_parts == 1 else 0.02
    with memtrace.record(tmp_path / "run.memtrace", observer=observer, flush_seconds=flush_seconds) as recording:
        for _ in range(3):
            with part_written(recording) if num_parts > 1 else nullcontext():
                for _ in range(5):
                    torch.randn(8)
                    critic.step()
            generator.step()
            recording.step()
    trace = memtrace.load(tmp_path / "run.memtrace")
    columns = step_columns(trace)
    assert columns.step.tolist() == [0, 1, 2]
    assert columns.num_allocs.tolist() == [5, 5, 5]
    assert columns.start_ns[0] <= trace.columns("events", "time_ns")["time_ns"][0]
    spans = trace.spans
    assert (spans["kind"] == "step").sum() == 3
    assert (spans["kind"] != "step").sum() >= 18  # the ranges of the optimizers are kept


def busy_wait() -> int:
    """Work for a while, and return for how many nanoseconds."""
    started_ns = time.perf_counter_ns()
    torch.randn(1 << 19).sort()
    return time.perf_counter_ns() - started_ns


def test_the_wait_for_each_batch_is_recorded(tmp_path: Path) -> None:
    waits_ns = []

    class SlowDataset(IterableDataset[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for _ in range(3):
                waits_ns.append(busy_wait())
                yield torch.randn(8)

    step = make_step(mlp())
    with memtrace.record(tmp_path / "run.memtrace") as recording:
        for _ in recording.steps(DataLoader(SlowDataset(), batch_size=None)):
            step()
    columns = step_columns(memtrace.load(tmp_path / "run.memtrace"))
    assert columns.step.tolist() == [0, 1, 2]
    assert (columns.data_wait_ns >= waits_ns).all()


def test_starting_the_loader_counts_as_waiting_in_the_first_step(tmp_path: Path) -> None:
    start_ns = []

    class SlowLoader:
        def __iter__(self) -> Iterator[torch.Tensor]:
            start_ns.append(busy_wait())
            return iter([torch.randn(8)] * 3)

    step = make_step(mlp())
    with memtrace.record(tmp_path / "run.memtrace") as recording:
        for _ in recording.steps(SlowLoader()):
            step()
    waits_ns = step_columns(memtrace.load(tmp_path / "run.memtrace")).data_wait_ns
    assert waits_ns[0] >= start_ns[0] > waits_ns[1:].max()


def test_an_exception_of_the_loader_reaches_the_program(tmp_path: Path) -> None:
    def broken_loader() -> Iterator[torch.Tensor]:
        yield torch.randn(8)
        raise ValueError("broken on purpose")

    with memtrace.record(tmp_path / "run.memtrace") as recording, pytest.raises(ValueError, match="broken on purpose"):
        for _ in recording.steps(broken_loader()):
            torch.ones(1000)
    assert len(step_columns(memtrace.load(tmp_path / "run.memtrace")).step) == 1


def test_max_steps_ends_the_recording_but_not_the_program(tmp_path: Path) -> None:
    trace = record_steps(make_step(mlp()), tmp_path / "run.memtrace", num_steps=6, max_steps=2)
    assert len(step_columns(trace).step) == 2
    assert trace.manifest.stop_reason == "max_steps reached"


@pytest.mark.parametrize("option", ["max_steps", "last_steps"])
def test_a_number_of_steps_below_one_is_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(memtrace.MemtraceError, match=f"{option}=0"):
        memtrace.record(tmp_path / "run.memtrace", **{option: 0})


def test_an_unknown_observer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(memtrace.MemtraceError, match='observer=\'c\' is unknown; pass one of "auto", "native"'):
        memtrace.record(tmp_path / "run.memtrace", observer="c")  # type: ignore[arg-type]


def test_last_steps_keeps_recent_steps_and_live_blocks(tmp_path: Path) -> None:
    step = make_step(gpt())
    all_steps = record_steps(step, tmp_path / "all.memtrace")
    with memtrace.record(tmp_path / "run.memtrace", last_steps=3, flush_seconds=0.01) as recording:
        for _ in range(15):
            with part_written(recording):
                step()
    trace = memtrace.load(recording.path)
    numbers = step_columns(trace).step
    assert numbers[-1] == 14
    assert 3 <= len(numbers) < 15
    assert compute_coverage(trace).dropped_events > 0
    assert live_bytes(trace, "parameter") == live_bytes(all_steps, "parameter")
    assert live_bytes(trace, "optimizer_state") == live_bytes(all_steps, "optimizer_state")


def test_threads_that_train_have_steps_of_their_own(tmp_path: Path) -> None:
    """Two threads of ten steps, which take turns in an irregular order."""
    turns = [threading.Semaphore(0) for _ in range(2)]
    done = threading.Semaphore(0)

    def train(number: int) -> None:
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(10):
            turns[number].acquire()
            model(torch.randn(2, 8)).sum().backward()
            optimizer.step()
            done.release()

    threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
    with memtrace.record(tmp_path / "run.memtrace"):
        for thread in threads:
            thread.start()
        for number in (0, 1, 0, 0, 0, 1, 1, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0, 1):
            turns[number].release()
            done.acquire()
        for thread in threads:
            thread.join()
    columns = step_columns(memtrace.load(tmp_path / "run.memtrace"))
    assert columns.step.tolist() == list(range(20))
    assert (columns.duration_ns > 0).all()
    assert (columns.start_ns[1:] == (columns.start_ns + columns.duration_ns)[:-1]).all()


def shares_storage(model: nn.Module) -> nn.Module:
    """Return a module with the memory of another: hogwild trains so, each thread with gradients of its own."""
    copy = nn.Linear(WIDTH, WIDTH)
    for parameter, shared in zip(copy.parameters(), model.parameters(), strict=True):
        parameter.data = shared.data
    return copy


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_hogwild_has_the_steps_of_its_threads_and_none_of_its_test(
    observer: Literal["native", "dispatch"], tmp_path: Path
) -> None:
    """Two threads of ten steps each, then 200 samples without an optimizer."""
    shared = nn.Linear(WIDTH, WIDTH)

    def train() -> None:
        model = shares_storage(shared)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()

    threads = [threading.Thread(target=train) for _ in range(2)]
    with memtrace.record(tmp_path / "run.memtrace", observer=observer):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with torch.no_grad():
            for _ in range(200):
                shared(torch.randn(1, WIDTH))
    trace = memtrace.load(tmp_path / "run.memtrace")
    columns = step_columns(trace)
    assert columns.step.tolist() == list(range(20))
    last_end_ns = int(columns.start_ns[-1] + columns.duration_ns[-1])
    assert (trace.columns("events", "time_ns")["time_ns"] > last_end_ns).sum() >= 200


@pytest.mark.parametrize("observer", ["native", "dispatch"])
@pytest.mark.parametrize("trains", [True, False])
def test_iterations_of_a_test_loop_are_not_taken_for_training(
    observer: Literal["native", "dispatch"], trains: bool, tmp_path: Path
) -> None:
    """As in the parent process of hogwild, whose training runs in child processes."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with memtrace.record(tmp_path / "run.memtrace", observer=observer):
        if trains:
            model(torch.randn(4, WIDTH)).sum().backward()
            optimizer.step()
        with torch.no_grad():
            for _ in range(200):
                model(torch.randn(1, WIDTH)).square().mean().item()
    coverage = compute_coverage(memtrace.load(tmp_path / "run.memtrace"))
    assert coverage.num_steps == (1 if trains else 200)
    assert (NO_TRAINING_NOTE in coverage.notes) == (not trains)


def test_threads_one_after_the_other_do_not_share_a_step(tmp_path: Path) -> None:
    """A new thread usually gets the identifier of the thread that just ended."""
    optimizers = [torch.optim.SGD(nn.Linear(WIDTH, WIDTH).parameters(), 0.1) for _ in range(3)]

    def train(optimizer: torch.optim.Optimizer) -> None:
        for _ in range(10):
            optimizer.step()

    with memtrace.record(tmp_path / "run.memtrace"):
        for optimizer in optimizers:
            thread = threading.Thread(target=train, args=(optimizer,))
            thread.start()
            thread.join()
    assert (memtrace.load(tmp_path / "run.memtrace").spans["kind"] == "step").sum() == 30


def test_a_thread_that_stops_training_does_not_hold_back_steps(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(2)]
    may_end = threading.Event()

    def train_once() -> None:
        optimizers[0].step()
        trained.set()
        may_end.wait()

    trained = threading.Event()
    thread = threading.Thread(target=train_once)
    with memtrace.record(tmp_path / "run.memtrace", max_steps=5) as recording:
        thread.start()
        trained.wait()
        num_steps = 0
        while recording.is_recording and num_steps < 50:
            model(torch.randn(2, 8)).sum().backward()
            optimizers[1].step()
            num_steps += 1
        may_end.set()
        thread.join()
    assert num_steps < 20
    assert memtrace.load(tmp_path / "run.memtrace").manifest.stop_reason == "max_steps reached"
