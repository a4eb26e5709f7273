"""Names and categories of parameters, gradients and optimizer state, however the program trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

import memtrace
from memtrace.analysis.blocks import blocks
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

SIDE = 100
WEIGHT_BYTES = SIDE * SIDE * 4


def record(program: Callable[[], object], path: Path) -> Trace:
    with memtrace.record(path, observer="native"):
        program()
    return memtrace.load(path)


def is_of(trace: Trace, category: str) -> np.ndarray:
    """Which blocks are of a category and of the recording: other tests of the process leave memory behind."""
    table = blocks(trace)
    return (table.category == CATEGORIES.index(category)) & (table.alloc_event >= 0)


class Pair(nn.Sequential):
    """A class of its own, so that models that other tests have left do not change the names."""


class Single(nn.Linear):
    """The same with one layer."""


def names(trace: Trace, category: str) -> set[str]:
    """The names of the large blocks of a category."""
    table = blocks(trace)
    rows = np.flatnonzero(is_of(trace, category) & (table.size >= WEIGHT_BYTES))
    return {str(trace.name(int(name))) if name >= 0 else "" for name in table.name[rows]}


def bytes_of(trace: Trace, category: str) -> int:
    table = blocks(trace)
    return int(table.size[is_of(trace, category)].sum())


def loss_of(model: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    return model(torch.randn(4, SIDE)).square().mean()


def step_with_closure(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)  # type: ignore[arg-type]


def test_parameters_that_a_closure_uses_first_have_the_names_of_their_modules(tmp_path: Path) -> None:
    def program() -> None:
        model = Pair(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE))
        step_with_closure(torch.optim.Adam(model.parameters()), model)

    trace = record(program, tmp_path / "run.memtrace")
    weights = {"Pair.0.weight", "Pair.1.weight"}
    assert names(trace, "parameter") == names(trace, "gradient") == weights
    moments = {f"{weight}.{moment}" for weight in weights for moment in ("exp_avg", "exp_avg_sq")}
    assert names(trace, "optimizer_state") == moments


def test_the_history_of_lbfgs_is_optimizer_state(tmp_path: Path) -> None:
    kept: list[object] = []

    def program() -> None:
        model = nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE))
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5)
        step_with_closure(optimizer, model)
        kept.append((model, optimizer))

    trace = record(program, tmp_path / "run.memtrace")
    assert {"LBFGS.old_dirs", "LBFGS.old_stps", "LBFGS.d"} <= names(trace, "optimizer_state")
    table = blocks(trace)
    is_live = table.free_event < 0
    unknown_bytes = table.size[is_live & is_of(trace, "unknown")].sum()
    assert unknown_bytes < 0.02 * table.size[is_live & (table.alloc_event >= 0)].sum()


def test_copies_of_a_model_that_are_never_called_are_parameters(tmp_path: Path) -> None:
    def program() -> None:
        model = Single(SIDE, SIDE)
        average = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                average.weight.lerp_(model.weight, 0.1)

    assert names(record(program, tmp_path / "run.memtrace"), "parameter") == {"Single.weight", "Single#2.weight"}


def test_parameters_and_gradients_of_torch_func(tmp_path: Path) -> None:
    def program() -> None:
        model = Single(SIDE, SIDE, bias=False)
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = functional_call(model, parameters, (x,))
            return out.square().mean()

        for _ in range(6):
            gradients = grad(loss)(parameters, torch.randn(4, SIDE))
            parameters = {name: value - 0.1 * gradients[name] for name, value in parameters.items()}
        loss(parameters, torch.randn(4, SIDE))

    trace = record(program, tmp_path / "run.memtrace")
    assert names(trace, "parameter") == names(trace, "gradient") == {"Single.weight"}
    table = blocks(trace)
    assert (is_of(trace, "parameter") & (table.size == WEIGHT_BYTES)).sum() == 7
    assert (is_of(trace, "gradient") & (table.size == WEIGHT_BYTES)).sum() == 6
    assert bytes_of(trace, "unknown") < 0.05 * table.size.sum()


def test_gradients_that_autograd_returns_are_labelled(tmp_path: Path) -> None:
    def program() -> None:
        model = Single(SIDE, SIDE, bias=False)
        for _ in range(3):
            (gradient,) = torch.autograd.grad(loss_of(model), list(model.parameters()))
            with torch.no_grad():
                model.weight.sub_(gradient)

    assert names(record(program, tmp_path / "run.memtrace"), "gradient") == {"Single.weight"}


def test_a_part_of_a_model_has_the_name_of_the_model(tmp_path: Path) -> None:
    """Also a part that is added after the first call, as in constructors that probe shapes."""

    class Autoencoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(SIDE, SIDE)
            width = self.encoder(torch.zeros(1, SIDE)).shape[1]
            self.decoder = nn.Linear(width, SIDE)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.encoder(x)
            return out

    def program() -> None:
        model = Autoencoder()
        model.decoder(model.encode(torch.randn(4, SIDE))).sum().backward()

    trace = record(program, tmp_path / "run.memtrace")
    assert names(trace, "parameter") == {"Autoencoder.encoder.weight", "Autoencoder.decoder.weight"}


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_buckets_of_distributed_data_parallel_are_gradients(gradient_as_bucket_view: bool, tmp_path: Path) -> None:
    def program() -> None:
        model = nn.parallel.DistributedDataParallel(
            nn.Sequential(nn.Linear(SIDE, SIDE), nn.Linear(SIDE, SIDE)), gradient_as_bucket_view=gradient_as_bucket_view
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(4):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        trace = record(program, tmp_path / "run.memtrace")
    finally:
        torch.distributed.destroy_process_group()
    table = blocks(trace)
    # The constructor sends the parameters in a buffer of the same size, which aten::cat makes.
    is_cat = np.array([name >= 0 and trace.name(int(name)) == "aten::cat" for name in table.op_name])
    buckets = np.flatnonzero((table.size == 2 * (WEIGHT_BYTES + 4 * SIDE)) & ~is_cat)
    assert len(buckets) > 0
    assert (table.category[buckets] == CATEGORIES.index("gradient")).all()
