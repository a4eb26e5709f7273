"""Offloading while a program runs: the same results, storages that leave memory, and a model that is left as it was."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import memtrace
from memtrace import MemtraceError, Plan
from memtrace.execution.host_memory import MappedMemory
from memtrace.planning.actions import Offload, OffloadedTensor
from memtrace.planning.plan import StepCost

SIZE = 64 * 64 * 4


def plan_of(*tensors: OffloadedTensor) -> Plan:
    return Plan("cpu", (Offload(tensors, "cpu"),), StepCost(1, None), StepCost(1, None))


def everything(model: nn.Module, size: int = SIZE) -> Plan:
    """Offload all that any module saves, with all kinds of waits and starts of copies back."""
    names = [name or type(model).__name__ for name, _ in model.named_modules()]
    return plan_of(
        *(
            OffloadedTensor(name, index, size, (None, 0, 2)[(number + index) % 3], (number + 2 * index) % 4)
            for number, name in enumerate([*names, ""])
            for index in range(8)
        )
    )


class Net(nn.Module):
    """Calls a module several times, works in place, and returns nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(64, 64)
        self.norm = nn.BatchNorm1d(64)
        self.act = nn.ReLU(inplace=True)
        self.drop = nn.Dropout(0.3)
        self.tied = nn.Linear(64, 64)
        self.tied.weight = self.shared.weight

    def forward(self, x: torch.Tensor, scale: float, *, extra: dict[str, Any]) -> dict[str, Any]:
        h = self.act(self.norm(self.shared(x)))
        h = self.drop(self.shared(h).tanh()) * h.t()[:, :64].t()
        h = torch.sigmoid(self.tied(h + extra["bias"][0])) * scale
        return {"out": [h, (h * h,)]}


def _train(use: Callable[[Net], Any] | None, step: Callable[[Net, torch.optim.Optimizer, int], None]) -> list[Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if use is None:
        for number in range(3):
            step(model, optimizer, number)
    else:
        with memtrace.apply(use(model), model, optimizer):
            for number in range(3):
                step(model, optimizer, number)
    return [*model.state_dict().values(), *(p.grad for p in model.parameters())]


def _loss(model: Net) -> torch.Tensor:
    out = model(torch.randn(64, 64), 2.0, extra={"bias": [torch.randn(64)]})["out"]
    return (out[0] + out[1][0]).pow(2).mean()


def plain(model: Net, optimizer: torch.optim.Optimizer, _: int) -> None:
    optimizer.zero_grad()
    _loss(model).backward()
    optimizer.step()


def accumulated(model: Net, optimizer: torch.optim.Optimizer, _: int) -> None:
    optimizer.zero_grad()
    for _ in range(3):
        _loss(model).backward()
    optimizer.step()


def several_forwards(model: Net, optimizer: torch.optim.Optimizer, _: int) -> None:
    optimizer.zero_grad()
    first, second = _loss(model), _loss(model)
    first.backward()
    second.backward()
    optimizer.step()


def joined(model: Net, optimizer: torch.optim.Optimizer, _: int) -> None:
    optimizer.zero_grad()
    (_loss(model) + _loss(model)).backward()
    optimizer.step()


def evaluated_between(model: Net, optimizer: torch.optim.Optimizer, _: int) -> None:
    optimizer.zero_grad()
    loss = _loss(model)
    with torch.no_grad():
        _loss(model)
    loss.backward()
    optimizer.step()


def twice(model: Net, optimizer: torch.optim.Optimizer, _: int) -> None:
    optimizer.zero_grad()
    loss = _loss(model)
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def penalised(model: Net, optimizer: torch.optim.Optimizer, _: int) -> None:
    """Backward through backward."""
    optimizer.zero_grad()
    loss = _loss(model)
    gradients = torch.autograd.grad(loss, list(model.shared.parameters()), create_graph=True)
    (loss + sum(gradient.pow(2).sum() for gradient in gradients)).backward()
    optimizer.step()


def interrupted(model: Net, optimizer: torch.optim.Optimizer, _: int) -> None:
    optimizer.zero_grad()
    with pytest.raises(KeyError):
        model(torch.randn(64, 64), 2.0, extra={})
    _loss(model)  # a graph without backward
    _loss(model).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "step", [plain, accumulated, several_forwards, joined, evaluated_between, twice, penalised, interrupted]
)
def test_results_are_those_without_the_plan_bit_by_bit(
    step: Callable[[Net, torch.optim.Optimizer, int], None],
) -> None:
    expected, results = _train(None, step), _train(everything, step)
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_a_storage_leaves_memory_and_comes_back() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64))
    stored: list[StorageWeakRef] = []
    watch = model[1].register_forward_hook(lambda _, __, out: stored.append(StorageWeakRef(out.untyped_storage())))
    with memtrace.apply(plan_of(OffloadedTensor("1", 0, SIZE, wait_nodes=1)), model):
        loss = model(torch.randn(64, 64)).sum()
        assert stored[0].expired()
        loss.backward()
    watch.remove()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_storage_that_two_operators_save_is_copied_once() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64))
    copied: list[int] = []
    copy_out = MappedMemory.copy_out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            MappedMemory,
            "copy_out",
            lambda self, host, source, *rest: copied.append(source.nbytes) or copy_out(self, host, source, *rest),
        )
        with memtrace.apply(everything(model), model):
            model(torch.randn(64, 64, requires_grad=True)).sum().backward()
    # The input, the result of Sigmoid, which the last layer saves too, and no weight.
    assert copied == [SIZE, SIZE]


class OnlySigmoid(nn.Sequential):
    """A class of its own: the error that backward raises keeps the model alive, and other tests look at class names."""


def test_a_change_in_place_is_noticed_whether_the_tensor_has_left_or_not() -> None:
    model = OnlySigmoid(nn.Sigmoid())
    for tensors in ((), (OffloadedTensor("0", 0, SIZE, wait_nodes=0),)):
        with memtrace.apply(plan_of(OffloadedTensor("0", 5, 1), *tensors), model):
            x = torch.randn(64, 64, requires_grad=True)
            out = model(x)
            (x * 2).sum()
            with torch.no_grad():
                out.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()


def test_a_graph_without_backward_is_freed_with_its_result() -> None:
    model = OnlySigmoid(nn.Sigmoid())
    with memtrace.apply(plan_of(OffloadedTensor("0", 5, 1)), model):
        out = model(torch.randn(64, 64, requires_grad=True))
        storage = StorageWeakRef(out.untyped_storage())
        del out
        assert storage.expired()


def test_backward_after_the_block_gets_what_is_in_host_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = torch.randn(64, 64)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with memtrace.apply(everything(model), model):
        loss = model(x).sum()
    loss.backward()
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), expected, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_it_was_after_the_block(fails: bool) -> None:
    model = Net()
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    storages = [tensor.untyped_storage()._cdata for tensor in model.state_dict().values()]
    try:
        with memtrace.apply(everything(model), model):
            _loss(model).backward()
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    for name, module in model.named_modules():
        for key, value in before[name].items():
            if "hooks" in key:
                assert module.__dict__[key] == value or not module.__dict__[key]
    assert [tensor.untyped_storage()._cdata for tensor in model.state_dict().values()] == storages
    assert torch.relu(torch.ones(2, requires_grad=True)).grad_fn._saved_result.tolist() == [1, 1]  # type: ignore[union-attr]


def test_a_full_disk_leaves_tensors_in_memory_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    expected = _train(None, plain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        results = _train(everything, plain)
    assert [str(warning.message) for warning in caught if "no space in host memory" in str(warning.message)] != []
    assert len([w for w in caught if "memtrace" in str(w.message)]) == 1
    assert all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def test_a_module_that_the_model_lacks_is_an_error_before_the_first_step() -> None:
    model = Net()
    with (
        pytest.raises(MemtraceError, match=r"the plan names modules that the model \(Net\) does not have: missing\."),
        memtrace.apply(plan_of(OffloadedTensor("missing", 0, SIZE)), model),
    ):
        pytest.fail("the block ran")
