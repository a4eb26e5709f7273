"""Programs that do unusual things with their model and their optimizer train alike with a plan."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memtrace
from memtrace import MemtraceError, Plan
from memtrace.planning.actions import Offload, OffloadedTensor, Recompute, Spill
from memtrace.planning.plan import PlanAction, StepCost

WIDTH = 32
BATCH = 16
UNKNOWN = StepCost(0, None)


class Opaque(nn.Module):
    """Answers what is asked of it in its own way, as classes of users do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        out: torch.Tensor = self.drop(torch.tanh(self.linear(x - self.mean)))
        return out

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        raise AssertionError("asked for a truth value")

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared")

    __hash__ = nn.Module.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") and not hasattr(nn.Module, name) and name not in self.__dict__:
            raise AttributeError(name)
        return super().__getattr__(name)

    def parameters(self, recurse: bool = True) -> Any:
        return iter(())

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return iter(())

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return iter(())

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return iter(())

    def modules(self) -> Any:
        return iter(())

    def children(self) -> Any:
        return iter(())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Opaque() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out

    def parameters(self, recurse: bool = True) -> Any:
        """Only what is trained, as some libraries do it."""
        return iter([self.head.weight])


def every_parameter(model: nn.Module) -> list[nn.Parameter]:
    blocks: Any = model.blocks
    return [p for block in blocks for p in (block.linear.weight, block.linear.bias)] + [
        model.head.weight,  # type: ignore[list-item, union-attr]
        model.head.bias,  # type: ignore[list-item, union-attr]
    ]


NAMES = ("blocks.0", "blocks.1", "blocks.2")
ACTIONS: dict[str, PlanAction] = {
    "recompute": Recompute(NAMES, ()),
    "offload": Offload(tuple(OffloadedTensor(f"{name}.linear", 0, BATCH * WIDTH * 4, 1, 1) for name in NAMES), "cpu"),
    "spill": Spill((("blocks.0", "blocks.1"), ("blocks.2", "head")), 4000, recompute=True),
    "spill without recomputation": Spill((("blocks.0",), ("blocks.1", "blocks.2", "head")), 0, recompute=False),
}


class Case:
    """A model with two optimizers, a scheduler of each, and data."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Model()
        parameters = every_parameter(self.model)
        self.optimizers = [torch.optim.AdamW(parameters[:3], lr=0.01), torch.optim.SGD(parameters[3:], 0.1, 0.9)]
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in self.optimizers]
        self.data = [(torch.randn(BATCH, WIDTH), torch.randint(4, (BATCH,))) for _ in range(3)]

    def loss(self, number: int) -> torch.Tensor:
        inputs, targets = self.data[number % len(self.data)]
        return nn.functional.cross_entropy(self.model(inputs), targets)

    def step(self, number: int) -> torch.Tensor:
        loss = self.loss(number)
        loss.backward()
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            schedule.step()
        return loss.detach()

    def tensors(self) -> list[torch.Tensor]:
        """Everything that training changes."""
        values = [*self.model.state_dict().values()]
        for optimizer in self.optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                values += [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
        return [value.detach().clone() for value in values]


def clipped_and_averaged(case: Case) -> list[torch.Tensor]:
    """Norms of gradients between backward and step, and an average of the weights after it."""
    average = [parameter.detach().clone() for parameter in every_parameter(case.model)]
    results = []
    for number in range(4):
        loss = case.loss(number)
        loss.backward()
        results += [loss.detach(), nn.utils.clip_grad_norm_(every_parameter(case.model), 0.1)]
        for optimizer in case.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch._foreach_lerp_(average, [parameter.detach() for parameter in every_parameter(case.model)], 0.2)
    return results + average


def checkpointed_between(case: Case) -> list[torch.Tensor]:
    """A checkpoint that is written after a step, between forward and backward, and between backward and step."""
    results = []
    for number in range(3):
        loss = case.loss(number)
        files = [save(case)]
        loss.backward()
        files.append(save(case))
        for optimizer in case.optimizers:
            optimizer.step()
        files.append(save(case))
        for optimizer in case.optimizers:
            optimizer.zero_grad()
        results.append(loss.detach())
        for file in files:
            results += flatten(torch.load(io.BytesIO(file)))
    return results


def save(case: Case) -> bytes:
    file = io.BytesIO()
    torch.save([case.model.state_dict(), *(optimizer.state_dict() for optimizer in case.optimizers)], file)
    return file.getvalue()


def flatten(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [tensor for part in parts for tensor in flatten(part)]


def resumed(case: Case) -> list[torch.Tensor]:
    """State that is read back in the middle of training."""
    results = [case.step(number) for number in range(2)]
    states = torch.load(io.BytesIO(save(case)))
    results += [case.step(number) for number in range(2)]
    case.model.load_state_dict(states[0])
    for optimizer, state in zip(case.optimizers, states[1:], strict=True):
        optimizer.load_state_dict(state)
    return results + [case.step(number) for number in range(2)]


def evaluated(case: Case) -> list[torch.Tensor]:
    results = []
    for number in range(3):
        results.append(case.step(number))
        case.model.eval()
        with torch.no_grad():
            results.append(case.loss(number + 1))
        case.model.train()
    return results


def closures(case: Case) -> list[torch.Tensor]:
    def closure() -> torch.Tensor:
        for optimizer in case.optimizers:
            optimizer.zero_grad()
        loss = case.loss(0)
        loss.backward()
        return loss

    return [torch.as_tensor(case.optimizers[number % 2].step(closure)).detach() for number in range(4)]


def moved(case: Case) -> list[torch.Tensor]:
    """``to`` where nothing has to be moved."""
    results = []
    for number in range(3):
        case.model.to("cpu", torch.float32)
        results.append(case.step(number))
    return results


def kept_views(case: Case) -> list[torch.Tensor]:
    """Weights that the program keeps from a forward are those of that forward."""
    kept: list[torch.Tensor] = []

    def keep(module: nn.Module, arguments: Any, output: Any) -> None:
        kept.append(module.weight.detach().t())  # type: ignore[union-attr, operator]

    head: Any = case.model.head
    handle = head.register_forward_hook(keep)
    loss = case.loss(0)
    loss.backward()
    handle.remove()
    return [loss.detach(), *kept]


def gradients_looked_at(case: Case) -> list[torch.Tensor]:
    """Gradients are there after the step of the optimizer, as it leaves them."""
    results = []
    for number in range(3):
        case.loss(number).backward()
        for optimizer in case.optimizers:
            optimizer.step()
        results += [p.grad.clone() for p in every_parameter(case.model) if p.grad is not None]
        for optimizer in case.optimizers:
            optimizer.zero_grad()
    return results


@pytest.mark.parametrize("kind", ACTIONS)
@pytest.mark.parametrize(
    "program",
    [
        clipped_and_averaged,
        checkpointed_between,
        resumed,
        evaluated,
        closures,
        moved,
        kept_views,
        gradients_looked_at,
    ],
)
def test_programs_give_the_same_results(program: Callable[[Case], list[torch.Tensor]], kind: str) -> None:
    plain, planned = Case(), Case()
    torch.manual_seed(1)
    expected = [tensor.clone() for tensor in program(plain)]
    torch.manual_seed(1)
    plan = Plan("cpu", (ACTIONS[kind],), UNKNOWN, UNKNOWN)
    keys = list(planned.model.state_dict())
    with memtrace.apply(plan, planned.model, planned.optimizers):
        results = [tensor.clone() for tensor in program(planned)]
        inside = planned.tensors()
    assert all(map(torch.equal, results, expected)) and len(results) == len(expected)
    assert all(map(torch.equal, inside, plain.tensors()))
    assert all(map(torch.equal, planned.tensors(), plain.tensors()))
    assert list(planned.model.state_dict()) == keys


@pytest.mark.parametrize("kind", ["recompute", "spill"])
def test_a_compiled_model_is_refused_before_the_first_step(kind: str) -> None:
    compiled: Any = torch.compile(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), backend="eager")
    optimizer = torch.optim.SGD(compiled.parameters(), 0.1)
    names = ("_orig_mod.0", "_orig_mod.1")
    action: PlanAction = Recompute(names, ()) if kind == "recompute" else Spill(tuple((n,) for n in names), 0, True)
    with (
        pytest.raises(MemtraceError, match=r"torch\.compile"),
        memtrace.apply(Plan("cpu", (action,), UNKNOWN, UNKNOWN), compiled, optimizer),
    ):
        pass
