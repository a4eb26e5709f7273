"""Spilled models train as they would without the plan, bit by bit, under the budget."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memtrace
from memtrace import MemtraceError, Plan
from memtrace.analysis.peak import requested_bytes
from memtrace.execution.host_memory import MappedMemory
from memtrace.planning.actions import Spill
from memtrace.planning.plan import StepCost
from memtrace.planning.recorded_step import choose_step
from memtrace.recording.excluded_memory import excluded_ranges
from tests.programs.planned import PROGRAMS, PlannedProgram, Training, train

UNKNOWN = StepCost(0, None)
MANY = 1 << 30
"""A buffer that holds every shard."""


def spill(*shards: tuple[str, ...], buffer_bytes: int = 0, recompute: bool = True) -> Plan:
    return Plan("cpu", (Spill(shards, buffer_bytes, recompute),), UNKNOWN, UNKNOWN)


def leaf_shards(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """A shard for every module without children that is called and has parameters."""
    return tuple(
        (name,) for name, module in model.named_modules() if not list(module.children()) and list(module.parameters())
    )


def final_tensors(training: Training) -> list[torch.Tensor]:
    """Parameters, buffers, gradients and optimizer state."""
    state = [
        value
        for group in training.optimizer.param_groups
        for parameter in group["params"]
        for value in training.optimizer.state[parameter].values()
    ]
    gradients = [p.grad for p in training.model.parameters() if p.grad is not None]
    return [*training.model.state_dict().values(), *gradients, *state]


def assert_equal(spilled: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert len(spilled) == len(plain)
    for one, other in zip(spilled, plain, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("buffer_bytes", "recompute"), [(0, True), (40_000, True), (MANY, False)])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_programs_train_bitwise_equal(program: PlannedProgram, buffer_bytes: int, recompute: bool) -> None:
    plain, spilled = program.small(2), program.small(2)
    torch.manual_seed(1)
    expected = train(plain)
    torch.manual_seed(1)
    plan = spill(*leaf_shards(spilled.model), buffer_bytes=buffer_bytes, recompute=recompute)
    with memtrace.apply(plan, spilled.model, spilled.optimizer):
        losses = train(spilled)
        inside = [value.clone() for value in final_tensors(spilled)]
    assert_equal(losses, expected)
    assert_equal(inside, final_tensors(plain))
    assert_equal(final_tensors(spilled), final_tensors(plain))


WIDTH = 24


class Block(nn.Module):
    """A block with dropout, batch statistics, an operator in place, and more arguments than one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, shift: torch.Tensor | None = None) -> dict[str, Any]:
        y = nn.functional.dropout(self.relu(self.norm(self.linear(x))), 0.2, self.training)
        return {"outputs": [y * scale + (0 if shift is None else shift)], "name": "block"}


class Model(nn.Module):
    """Blocks, one of them called twice, a weight that two layers share, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.offset = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.offset
        for number, block in enumerate([*self.blocks, self.blocks[0]]):
            x = x + block(x, 0.5, shift=x if number % 2 else None)["outputs"][0]
        out: torch.Tensor = self.last(x)
        return out


SHARDS = (("first",), ("blocks.0", "blocks.1"), ("blocks.2", "last"))
Optimizers = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, centered=True),
}


def training(optimizer: Optimizers = OPTIMIZERS["AdamW"]) -> Training:
    torch.manual_seed(0)
    model = Model()
    batches = tuple((torch.randn(8, WIDTH), torch.randn(8, WIDTH)) for _ in range(4))
    return Training(model, optimizer(model.parameters()), batches, lambda m, b: (m(b[0]) - b[1]).pow(2).mean())


def assert_program_is_equal(
    program: Callable[[Training], list[torch.Tensor]],
    optimizer: Optimizers = OPTIMIZERS["AdamW"],
    *,
    recompute: bool = True,
) -> None:
    """Run a program with and without a plan and compare its losses and everything that it leaves."""
    plain, spilled = training(optimizer), training(optimizer)
    torch.manual_seed(1)
    expected = program(plain)
    torch.manual_seed(1)
    plan = spill(*SHARDS, buffer_bytes=4000, recompute=recompute)
    with memtrace.apply(plan, spilled.model, spilled.optimizer):
        losses = program(spilled)
    assert_equal(losses, expected)
    assert_equal(final_tensors(spilled), final_tensors(plain))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    assert_program_is_equal(train, OPTIMIZERS[name])


def accumulate(training: Training) -> list[torch.Tensor]:
    """Several micro-batches for each step, gradients clipped by their norm, set to zero in place."""
    losses = []
    for _ in range(2):
        for batch in training.batches:
            loss = training.loss(training.model, batch)
            loss.backward()
            losses.append(loss.detach())
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
        losses.append(norm)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)
    return losses


def evaluate_between(training: Training) -> list[torch.Tensor]:
    """Evaluation, an averaged copy of the model, and changes of parameters between the steps."""
    losses, average = train(training), None
    for mode in (torch.no_grad, torch.inference_mode):
        training.model.eval()
        with mode():
            losses.append(training.loss(training.model, training.batches[0]).clone())
        training.model.train()
        average = copy.deepcopy(training.model)
        with torch.no_grad():
            for parameter, averaged in zip(training.model.parameters(), average.parameters(), strict=True):
                averaged.lerp_(parameter, 0.5)
                parameter.data.clamp_(-0.2, 0.2)
        losses += [training.loss(average, training.batches[1]).detach(), *train(training)]
    return losses


def several_forwards(training: Training) -> list[torch.Tensor]:
    """Two forwards before one backward, a backward that keeps the graph, and gradients asked for by name."""
    model, optimizer, (one, two, *_) = training.model, training.optimizer, training.batches
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        first, second = training.loss(model, one), training.loss(model, two)
        (first + second).backward(retain_graph=True)
        (first * 2).backward()
        losses += [
            first.detach(),
            second.detach(),
            *torch.autograd.grad(training.loss(model, one), [*model.parameters()]),
        ]
        optimizer.step()
    return losses


def scaled_and_scheduled(training: Training) -> list[torch.Tensor]:
    """Autocast, a gradient scaler, a schedule of the learning rate, and a closure."""
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, 0.5)
    losses = []
    for batch in training.batches:
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = training.loss(training.model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(training.optimizer)
        scaler.step(training.optimizer)
        scaler.update()
        schedule.step()
        losses.append(loss.detach())

    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.loss(training.model, training.batches[0])
        loss.backward()
        return loss

    losses.append(torch.as_tensor(training.optimizer.step(closure)).detach())
    return losses


def reload(training: Training) -> list[torch.Tensor]:
    """Save and load model and optimizer in the middle."""
    losses = train(training)
    file = io.BytesIO()
    torch.save([training.model.state_dict(), training.optimizer.state_dict()], file)
    losses += train(training)
    model, optimizer = torch.load(io.BytesIO(file.getvalue()))
    training.model.load_state_dict(model)
    training.optimizer.load_state_dict(optimizer)
    return losses + train(training)


def step_in_backward(training: Training) -> list[torch.Tensor]:
    """Parameters that change as soon as their gradient is there."""

    def update(parameter: torch.Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad  # type: ignore[operator]
        parameter.grad = None

    handles = [p.register_post_accumulate_grad_hook(update) for p in training.model.parameters()]
    losses = []
    for batch in training.batches:
        loss = training.loss(training.model, batch)
        loss.backward()
        losses.append(loss.detach())
    for handle in handles:
        handle.remove()
    return losses


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize(
    "program", [accumulate, evaluate_between, several_forwards, scaled_and_scheduled, reload, step_in_backward]
)
def test_ways_of_training(program: Callable[[Training], list[torch.Tensor]], recompute: bool) -> None:
    assert_program_is_equal(program, recompute=recompute)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[object]:
    return [
        [(name, sorted(module.__dict__)) for name, module in model.named_modules()],
        [list(module._forward_hooks) + list(module._forward_pre_hooks) for module in model.modules()],
        list(torch.nn.modules.module._global_forward_hooks),
        [(id(p), p.size(), p.stride(), list(p._backward_hooks or ()), p.requires_grad) for p in model.parameters()],
        [list(map(id, group["params"])) for group in optimizer.param_groups],
        [len(optimizer._optimizer_step_pre_hooks), len(optimizer._optimizer_step_post_hooks)],
        list(model.state_dict()),
    ]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was_after_the_block(fails: bool) -> None:
    case = training()
    train(case)
    before, values = snapshot(case.model, case.optimizer), [value.clone() for value in final_tensors(case)]
    ranges = excluded_ranges()
    try:
        with memtrace.apply(spill(*SHARDS), case.model, case.optimizer):
            assert snapshot(case.model, case.optimizer) != before
            if fails:
                case.model.eval()
                case.loss(case.model, case.batches[0])
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert snapshot(case.model, case.optimizer) == before
    assert_equal(final_tensors(case), values)
    assert excluded_ranges() == ranges
    train(case)


def test_training_goes_on_after_a_backward_that_failed() -> None:
    plain, spilled = training(), training()

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("stop")

    def run(case: Training) -> list[torch.Tensor]:
        torch.manual_seed(1)
        handle = case.model.get_parameter("blocks.1.linear.weight").register_hook(fail)
        with pytest.raises(RuntimeError, match="stop"):
            train(case)
        handle.remove()
        case.optimizer.zero_grad()
        return train(case)

    expected = run(plain)
    with memtrace.apply(spill(*SHARDS, buffer_bytes=MANY), spilled.model, spilled.optimizer):
        losses = run(spilled)
    assert_equal(losses, expected)
    assert_equal(final_tensors(spilled), final_tensors(plain))


def test_a_pickled_model_is_not_spilled() -> None:
    case = training()
    with memtrace.apply(spill(*SHARDS), case.model, case.optimizer):
        copied = pickle.loads(pickle.dumps(case.model))
    case.model.eval()
    copied.eval()
    assert torch.equal(copied(case.batches[0][0]), case.model(case.batches[0][0]))


def test_what_cannot_be_spilled_is_an_error_before_the_first_step() -> None:
    case = training()
    before = snapshot(case.model, case.optimizer)
    lbfgs = torch.optim.LBFGS(case.model.parameters())
    cases: list[tuple[Plan, Any, str]] = [
        (spill(("missing",)), case.optimizer, "missing"),
        (spill(*SHARDS), (), "pass the optimizer"),
        (spill(*SHARDS), lbfgs, "LBFGS updates parameters together"),
        (spill(("blocks.0",), ("blocks.0.linear",)), case.optimizer, "contains it"),
    ]
    for plan, optimizer, message in cases:
        with pytest.raises(MemtraceError, match=message), memtrace.apply(plan, case.model, optimizer):
            pass
        assert snapshot(case.model, case.optimizer) == before


class NormedSGD(torch.optim.SGD):
    """An optimizer of the program that divides all gradients by their common norm."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        nn.utils.clip_grad_norm_(parameters, 1e-3)
        return super().step(closure)


def test_an_optimizer_that_couples_parameters_is_refused() -> None:
    case = training(lambda parameters: NormedSGD(parameters, lr=0.1))
    with pytest.raises(MemtraceError, match="together"), memtrace.apply(spill(*SHARDS), case.model, case.optimizer):
        pass


def wide() -> Training:
    """Eight blocks of 256 KiB of parameters, 1 MiB of state each."""
    torch.manual_seed(0)
    width = 180
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, 2 * width), nn.Linear(2 * width, width)) for _ in range(8)))
    batches = tuple((torch.randn(4, width), torch.randn(4, width)) for _ in range(10))
    return Training(
        model,
        torch.optim.AdamW(model.parameters()),
        batches,
        lambda model, batch: (model(batch[0]) - batch[1]).pow(2).mean(),
    )


def profiled_peak(run: Callable[[], object]) -> int:
    """By how much the CPU memory of torch rises while a function runs, counted by torch's own profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.device_type() == torch.autograd.DeviceType.CPU
    ]
    level = peak = 0
    for _, num_bytes in sorted(changes):
        level += num_bytes
        peak = max(peak, level)
    return peak


@pytest.mark.parametrize("buffer_bytes", [0, 512 << 10])
def test_the_peak_stays_under_a_quarter_of_the_state(tmp_path: Path, buffer_bytes: int) -> None:
    expected = train(wide())
    case = wide()
    budget_bytes = sum(parameter.nbytes for parameter in case.model.parameters())
    shards = tuple((str(number),) for number in range(8))
    gc.collect()
    with memtrace.apply(spill(*shards, buffer_bytes=buffer_bytes), case.model, case.optimizer):
        with memtrace.record(tmp_path / "run.memtrace", model=case.model, optimizer=case.optimizer):
            losses = train(case)
        profiled = profiled_peak(lambda: train(case))
        state_bytes = sum(tensor.nbytes for tensor in final_tensors(case))
    assert_equal(losses, expected)
    assert state_bytes > 4 * budget_bytes * 0.99
    # Other tests of the process have memory too; of this one the batches exist before the recording.
    batches = sum(tensor.nbytes for batch in case.batches for tensor in batch)
    trace = memtrace.load(tmp_path / "run.memtrace")
    recorded = choose_step(trace, "cpu").cost.peak_bytes - requested_bytes(trace, "cpu").start
    assert batches + recorded < budget_bytes
    assert batches + profiled < budget_bytes
    assert recorded == pytest.approx(profiled, rel=0.1)


def test_host_memory_is_reused_and_left_out_of_recordings(tmp_path: Path) -> None:
    memory = MappedMemory()
    first = memory.allocate(1 << 20)
    address = first.data_ptr()
    assert excluded_ranges()[-1][0] <= address
    with memtrace.record(tmp_path / "run.memtrace"):
        (first + 1).sum()
    view = first[10:20]
    del first
    assert memory.allocate(1 << 20).data_ptr() != address, "a view still uses the memory"
    del view
    assert memory.allocate(1 << 20).data_ptr() == address
    memory.close()
    sizes = memtrace.load(tmp_path / "run.memtrace").events["size"]
    assert (sizes == 1 << 20).sum() == 2, "the allocation and the free of the result of the addition"
