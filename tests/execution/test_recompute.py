"""Recomputation carried out on real models: the same losses, gradients and state, bit by bit."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import memtrace
from memtrace import MemtraceError, Plan
from memtrace.planning.actions import Recompute, Spill
from memtrace.planning.plan import PlanAction, StepCost
from tests.programs.planned import PROGRAMS, PlannedProgram, train

COST = StepCost(1, None)
ROOT = Path(__file__).parents[2]


def make_plan(*modules: str, kept: tuple[str, ...] = ()) -> Plan:
    return Plan("cpu", (Recompute(modules, kept),), COST, COST)


class Counted(nn.Linear):
    """A linear layer that counts its forward calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return super().forward(x)


class Dropped(nn.Module):
    """Dropout, batch norm, an in-place operator and a layer that both branches share."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, scale: float = 1.0, *, extra: dict[str, Any] | None = None) -> dict[str, Any]:
        y = self.drop(torch.relu_(self.norm(self.shared(x)) * scale))
        if extra is not None:
            y = y + extra["bias"][0]
        return {"hidden": [self.shared(y), (y, None)], "scale": scale}


class Dropping(nn.Module):
    """Calls its part twice, with non-tensor and keyword arguments, and reads a nested output."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Dropped()
        self.head = nn.Linear(8, 8)
        self.head.weight = self.part.shared.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.part(x, 2.0, extra={"bias": (x.detach(),)})["hidden"][0]
        output: torch.Tensor = self.head(self.part(first)["hidden"][1][0])
        return output


class RandomScale(nn.Module):
    """Multiplies by a number of Python's random generator."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x * random.random())


class RandomDepth(nn.Module):
    """Draws from Python's and NumPy's random generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.tanh(self.layer(x)) * random.random() + float(np.random.rand())  # noqa: NPY002 (the global generator)
        return output


class Counting(nn.Module):
    """A buffer that forward reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        output: torch.Tensor = torch.tanh(self.layer(x)) / self.seen.clone()
        return output


def accumulate(model: nn.Module) -> list[torch.Tensor]:
    """Gradient accumulation, several forwards before one backward, and an evaluation between."""
    losses = []
    for _ in range(3):
        first, second = (model(torch.randn(4, 8)).square().mean() for _ in range(2))
        (first + second).backward()
        model.eval()
        with torch.no_grad():
            losses.append(model(torch.ones(4, 8)).sum())
        model.train()
        third = model(torch.randn(4, 8, requires_grad=True)).square().mean()
        third.backward()
        losses += [first.detach(), second.detach(), third.detach()]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        model.zero_grad()
    return losses


@dataclass(frozen=True)
class Result:
    losses: list[torch.Tensor]
    state: dict[str, torch.Tensor]


def run_model(build: Callable[[], nn.Module], plan: Plan | None) -> Result:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = build()
    if plan is None:
        losses = accumulate(model)
    else:
        with memtrace.apply(plan, model):
            losses = accumulate(model)
    return Result([*losses, torch.rand(1), torch.tensor(random.random())], model.state_dict())


def assert_equal(result: Result, expected: Result) -> None:
    assert all(torch.equal(one, other) for one, other in zip(result.losses, expected.losses, strict=True))
    assert result.state.keys() == expected.state.keys()
    assert all(torch.equal(value, expected.state[name]) for name, value in result.state.items())


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "shared, tied, nested containers": (Dropping, ("part", "head")),
    "modules inside modules": (Dropping, ("part", "part.shared", "part.norm")),
    "whole model": (Dropping, ("",)),
    "random generators": (lambda: nn.Sequential(RandomDepth(), RandomDepth()), ("0", "1")),
    "buffers that forward reads": (lambda: nn.Sequential(Counting(), Counting(), nn.Linear(8, 8)), ("0", "1")),
    "sequential": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout()), nn.Linear(8, 8)),
        ("0",),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kept", [(), ("aten::addmm", "aten::tanh")])
def test_results_are_equal_bit_by_bit(name: str, kept: tuple[str, ...]) -> None:
    build, modules = CASES[name]
    names = tuple(module or type(build()).__name__ for module in modules)
    assert_equal(run_model(build, make_plan(*names, kept=kept)), run_model(build, None))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_training_programs_give_equal_losses(program: PlannedProgram) -> None:
    expected, training = program.small(3), program.small(3)
    names = [name for name, module in training.model.named_modules() if name and "." not in name]
    names += [name for name, _ in training.model.named_modules() if name.count(".") == 1]
    losses = train(program.small(3))
    with memtrace.apply(make_plan(*names), training.model, training.optimizer):
        torch.manual_seed(0)
        recomputed = train(training)
    torch.manual_seed(0)
    expected_losses = train(expected)
    assert len(losses) == len(recomputed)
    assert all(torch.equal(one, other) for one, other in zip(recomputed, expected_losses, strict=True))
    for one, other in zip(training.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


def test_a_module_is_called_again_in_backward_unless_gradients_are_off() -> None:
    model = nn.Sequential(Counted(4, 4), nn.ReLU(), nn.Linear(4, 1))
    with memtrace.apply(make_plan("0"), model):
        Counted.calls = 0
        loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        assert Counted.calls == 1
        loss.backward()
        assert Counted.calls == 2
        with torch.no_grad():
            model(torch.ones(2, 4))
        assert Counted.calls == 3


def test_a_plan_does_less_than_nested_checkpoints_would() -> None:
    model = nn.Sequential(nn.Sequential(Counted(4, 4), nn.ReLU()), nn.Linear(4, 1))
    with memtrace.apply(make_plan("0", "0.0"), model):
        Counted.calls = 0
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert Counted.calls == 2


def test_after_the_block_the_model_is_as_it_was() -> None:
    model = Dropping()
    before = [dict(vars(module)) for module in model.modules()]
    handle = model.part.register_forward_hook(lambda *_: None)
    with pytest.raises(KeyError), memtrace.apply(make_plan("part", "head"), model):
        raise KeyError
    handle.remove()
    assert [dict(vars(module)) for module in model.modules()] == before


def test_a_forward_that_the_program_has_replaced_is_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    replaced = model[0].forward
    model[0].forward = replaced
    with memtrace.apply(make_plan("0"), model):
        pass
    assert model[0].__dict__["forward"] is replaced
    with memtrace.apply(make_plan("0"), model):
        model[0].forward = torch.relu
    assert model[0].forward is torch.relu


def test_backward_after_the_block_repeats_calls_of_the_block() -> None:
    model = nn.Sequential(Counted(4, 4), nn.Tanh())
    inputs = torch.ones(2, 4, requires_grad=True)
    with memtrace.apply(make_plan("0"), model):
        loss = model(inputs).sum()
    Counted.calls = 0
    loss.backward()
    assert Counted.calls == 1


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_the_model_are_models_of_their_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    with memtrace.apply(make_plan("0"), model):
        other = copied(model)
        with torch.no_grad():
            other[0].weight.zero_()  # type: ignore[index]
            other[0].bias.zero_()  # type: ignore[index]
        assert not other(torch.ones(1, 4)).any()
        assert model(torch.ones(1, 4)).any()


def test_several_backward_passes_repeat_the_call_alike() -> None:
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(), RandomScale()), nn.Linear(4, 1))
    inputs = torch.randn(6, 4, requires_grad=True)
    with memtrace.apply(make_plan("0"), model):
        loss = model(inputs).square().sum()
        (first,) = torch.autograd.grad(loss, inputs, retain_graph=True)
        (second,) = torch.autograd.grad(loss, inputs)
    assert torch.equal(first, second)


def test_hooks_on_the_module_run_once_and_hooks_inside_it_again() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 1))
    runs: list[str] = []
    model[0].register_forward_hook(lambda *_: runs.append("outside"))
    model[0][0].register_forward_hook(lambda *_: runs.append("inside"))
    with memtrace.apply(make_plan("0"), model):
        model(torch.ones(2, 4)).sum().backward()
    assert runs == ["inside", "outside", "inside"]


def test_function_transforms_run_without_checkpoints() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def loss(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x).sum()
        return result

    expected = torch.func.grad(loss)(torch.ones(4))
    with memtrace.apply(make_plan("0"), model):
        assert torch.equal(torch.func.grad(loss)(torch.ones(4)), expected)
        assert torch.equal(torch.func.vmap(model)(torch.ones(3, 4)), model(torch.ones(3, 4)))


def compiled() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.compile()
    return model


@pytest.mark.parametrize(
    ("build", "name", "message"),
    [
        (compiled, "0", "compiled by torch.compile"),
        (lambda: nn.DataParallel(nn.Sequential(nn.Linear(4, 4))), "module.0", "DataParallel"),
        (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4))), "0", "compiled by torch.jit"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_cannot_be_recomputed_is_an_error_before_the_first_step(
    build: Callable[[], nn.Module], name: str, message: str
) -> None:
    model = build()
    with pytest.raises(MemtraceError, match=message), memtrace.apply(make_plan(name), model):
        pytest.fail("the block must not run")


def test_an_operator_that_torch_lacks_is_an_error_before_the_first_step() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with (
        pytest.raises(MemtraceError, match="aten::no_such_operator, which this torch"),
        memtrace.apply(make_plan("0", kept=("aten::no_such_operator",)), model),
    ):
        pytest.fail("the block must not run")
    assert "forward" not in model[0].__dict__


def test_wrapped_models_give_equal_losses(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.programs.wrapped_recompute", str(tmp_path / "store")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "modules inside DDP: equal",
        "the DDP wrapper: equal",
        "FSDP2 units: equal",
        "the FSDP2 root: equal",
        "a module with a compiled part: equal",
    ]


class Secretive(nn.Module):
    """Does not show its parts to those who ask it for them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.tanh(self.norm(self.layer(x)))
        return output

    def _hide(self, *args: object, **options: object) -> Any:
        raise AssertionError("this model does not list its parts")

    modules = named_modules = parameters = named_parameters = buffers = named_buffers = _hide
    children = named_children = _hide


@pytest.mark.parametrize("action", [Recompute(("layer", "norm")), Spill((("layer",), ("norm",)), 0)])
def test_a_model_is_not_asked_for_its_parts(action: PlanAction) -> None:
    results = []
    for actions in ((), (action,)):
        torch.manual_seed(0)
        model = Secretive()
        tensors = [model.layer.weight, model.layer.bias, model.norm.weight, model.norm.bias]
        optimizer = torch.optim.SGD(tensors, lr=0.1)
        with memtrace.apply(Plan("cpu", actions, COST, COST), model, optimizer):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(4, 8)).square().mean().backward()
                optimizer.step()
        results.append([tensor.detach().clone() for tensor in (*tensors, model.norm.running_mean)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
