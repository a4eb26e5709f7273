"""Plans carried out on a CUDA device: peaks, results, and what is left afterwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import memtrace
from memtrace import MemtraceError, Plan, Trace
from memtrace.analysis.bandwidth import TITAN_XP
from memtrace.analysis.peak import requested_bytes
from memtrace.execution.host_memory import PinnedMemory
from memtrace.planning import plan_offload, plan_recompute, plan_spill
from memtrace.planning.actions import Offload, OffloadedTensor
from memtrace.planning.plan import StepCost
from memtrace.planning.recorded_step import choose_step
from tests.cuda.settings import on_null_device
from tests.programs.planned import PROGRAMS, PlannedProgram, Training, on_device, train

pytestmark = pytest.mark.cuda
DEVICE = "cuda:0"
STEPS = 4
WORKSPACE_BYTES = 9 << 20
"""More than what cuBLAS keeps for itself; it is never moved."""
BUDGET_SHARES = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Without cuDNN where there is no GPU, and the same results in every run."""
    enabled, deterministic = torch.backends.cudnn.enabled, torch.are_deterministic_algorithms_enabled()
    torch.backends.cudnn.enabled = enabled and not on_null_device()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.backends.cudnn.enabled = enabled
    torch.use_deterministic_algorithms(deterministic)


def build(program: PlannedProgram) -> Training:
    training = on_device(program.small(STEPS), DEVICE)
    torch.manual_seed(1)
    return training


def record(training: Training, path: Path) -> tuple[Trace, list[torch.Tensor]]:
    with memtrace.record(path, model=training.model, optimizer=training.optimizer, observer="native"):
        losses = train(training)
    return memtrace.load(path), losses


def spill(trace: Trace, share: float) -> Plan:
    """Spill to the smallest budget of a few, with a share of what can be moved as buffer."""
    peak_bytes = choose_step(trace, DEVICE).cost.peak_bytes
    for part in BUDGET_SHARES:
        movable = int(part * max(peak_bytes - WORKSPACE_BYTES, peak_bytes // 4))
        budget_bytes = movable + min(WORKSPACE_BYTES, peak_bytes)
        try:
            return plan_spill(trace, DEVICE, budget_bytes=budget_bytes, buffer_bytes=int(movable * share)).plan
        except MemtraceError:
            continue
    pytest.fail("no budget is large enough")


PLANNERS: dict[str, Callable[[Trace], Plan]] = {
    "recompute": lambda trace: plan_recompute(trace, device=DEVICE).plan,
    "offload": lambda trace: plan_offload(trace, device=DEVICE, bandwidths=TITAN_XP),
    "spill": lambda trace: spill(trace, 0.0),
    "buffered spill": lambda trace: spill(trace, 0.25),
}


@pytest.mark.parametrize("kind", PLANNERS)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_the_peak_is_the_predicted_one(program: PlannedProgram, kind: str, tmp_path: Path) -> None:
    gc.collect()
    trace, expected = record(build(program), tmp_path / "before.memtrace")
    plan = PLANNERS[kind](trace)
    gc.collect()
    live_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"]
    training = build(program)
    state = [(id(parameter), parameter.device, parameter.size()) for parameter in training.model.parameters()]
    with memtrace.apply(plan, training.model, training.optimizer):
        torch.cuda.reset_peak_memory_stats()
        after, losses = record(training, tmp_path / "after.memtrace")
        counted_bytes = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    measured_bytes = choose_step(after, DEVICE).cost.peak_bytes
    assert int(requested_bytes(after, DEVICE).bytes.max()) == pytest.approx(counted_bytes, rel=0.001)
    if kind == "buffered spill":  # the prediction holds wherever copies meet computation
        assert measured_bytes <= plan.predicted.peak_bytes * 1.001
    else:
        assert measured_bytes == pytest.approx(plan.predicted.peak_bytes, rel=0.005)
    if not on_null_device():
        assert all(map(torch.equal, losses, expected))
    assert state == [(id(parameter), parameter.device, parameter.size()) for parameter in training.model.parameters()]
    del training, losses, state
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_stats()["requested_bytes.all.current"] == live_bytes


@pytest.mark.parametrize("use", [None, "out", "in"])
def test_memory_of_a_copy_is_not_reused_before_the_copy_has_ended(use: str | None) -> None:
    """Also where another stream than the one that the memory belongs to waits for the copy."""
    memory, other = PinnedMemory(torch.device(DEVICE)), torch.cuda.Stream()
    num_bytes = 32 << 20
    device = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    address, host = device.data_ptr(), memory.allocate(num_bytes)
    torch.cuda.synchronize()
    side = memory._out if use != "in" else memory._in
    with torch.cuda.stream(side):
        torch.cuda._sleep(300_000_000)
    copy = memory.copy_in(device, host) if use == "in" else memory.copy_out(host, device)
    with torch.cuda.stream(other) if use else nullcontext():
        copy.wait()
        assert not copy.is_done(), "waiting for a copy does not stop the host"
        torch.cuda._sleep(300_000_000)  # what the computation does with the memory
    event = torch.cuda.Event()
    event.record(other)
    del device, copy
    again = torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE)
    if again.data_ptr() == address:
        again.zero_()
        reused = torch.cuda.Event()
        reused.record()
        reused.synchronize()
        assert side.query() and (use is None or event.query())
    memory.close()


def test_a_copy_that_nobody_waits_for_keeps_its_memory() -> None:
    memory = PinnedMemory(torch.device(DEVICE))
    num_bytes = 16 << 20
    device = torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE)
    with torch.cuda.stream(memory._out):
        torch.cuda._sleep(200_000_000)
    address = device.data_ptr()
    copy = memory.copy_out(memory.allocate(num_bytes), device)
    assert not copy.is_done()
    del copy, device
    assert not memory._out.query(), "dropping a copy does not stop the host"
    assert torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE).data_ptr() != address
    memory.close()


def test_a_step_does_not_wait_for_the_device_between_its_layers() -> None:
    """Forward of an offloaded model is queued while the device is still busy with what came before."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))).to(DEVICE)
    tensors = tuple(OffloadedTensor(str(number), 0, 256 * 256 * 4, 1, 2) for number in range(1, 6))
    plan = Plan(DEVICE, (Offload(tensors, DEVICE),), StepCost(1, None), StepCost(1, None))
    inputs = torch.ones(256, 256, device=DEVICE)
    with memtrace.apply(plan, model):
        model(inputs).sum().backward()
        torch.cuda.synchronize()
        torch.cuda._sleep(400_000_000)
        busy = torch.cuda.Event()
        busy.record()
        model(inputs).sum().backward()
        assert not busy.query()
        torch.cuda.synchronize()
