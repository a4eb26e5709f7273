"""Training loops: optimizers, precision, accumulation, schedules, data loading, checkpoints on disk."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.programs.kinds import Result, kind
from tests.programs.kinds.common import make_mlp, state, train


def _loss_of(model: nn.Module, x: torch.Tensor | None = None) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(8, 16) if x is None else x).square().mean()
    return loss


@kind
def every_optimizer() -> Result:
    results = []
    for name in (
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
    ):
        model = make_mlp()
        optimizer = getattr(torch.optim, name)(model.parameters())
        results.append(train(model, lambda model=model: _loss_of(model), optimizer=optimizer))
    return results


@kind
def adam_in_its_implementations() -> Result:
    results = []
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}, {"amsgrad": True}):
        model = make_mlp()
        optimizer = torch.optim.Adam(model.parameters(), **options)
        results.append(train(model, lambda model=model: _loss_of(model), optimizer=optimizer))
    return results


@kind
def lbfgs_with_closure() -> Result:
    model, x = make_mlp(), torch.randn(8, 16)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = _loss_of(model, x)
        loss.backward()
        return loss

    return [[optimizer.step(closure) for _ in range(3)], state(model)]


class _SharpnessAware(torch.optim.Optimizer):
    """Takes two gradients a step (SAM)."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05, "rho": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        gradients = [p.grad.clone() for group in self.param_groups for p in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.add_(gradient, alpha=0.05)
        with torch.enable_grad():
            loss = closure()
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(gradient, alpha=0.05).sub_(parameter.grad, alpha=0.05)
        return loss


@kind
def sharpness_aware_minimisation() -> Result:
    model = make_mlp()
    optimizer = _SharpnessAware(model.parameters())
    losses = []
    for _ in range(3):
        x = torch.randn(8, 16)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = _loss_of(model, x)
            loss.backward()
            return loss

        closure()
        losses.append(optimizer.step(closure))
    return [losses, state(model)]


@kind
def mixed_precision_with_scaler() -> Result:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss_of(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return [scaler.get_scale(), state(model)]


@kind
def gradient_accumulation_and_evaluation() -> Result:
    model = make_mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    scores = []
    for step in range(8):
        (_loss_of(model) / 4).backward()
        if step % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                scores.append(_loss_of(model))
            model.train()
    return [scores, state(model)]


@kind
def schedules_of_the_learning_rate() -> Result:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)],
        milestones=[2],
    )
    rates = []
    for _ in range(5):
        _loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        rates.append(schedule.get_last_lr())
    return [rates, state(model)]


@kind
def stochastic_weight_averaging() -> Result:
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU())
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
    for _ in range(3):
        train(model, lambda: _loss_of(model), optimizer=optimizer, num_steps=1)
        average.update_parameters(model)
        schedule.step()
    torch.optim.swa_utils.update_bn([torch.randn(8, 16) for _ in range(3)], average)
    return state(average)


@kind
def checkpoint_and_resume() -> Result:
    model = make_mlp()
    optimizer = torch.optim.Adam(model.parameters())
    first = train(model, lambda: _loss_of(model), optimizer=optimizer)
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    stream.seek(0)
    saved = torch.load(stream, weights_only=True)
    model.load_state_dict(saved["model"], assign=True)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    return [first, train(model, lambda: _loss_of(model), optimizer=optimizer)]


class _Numbers(Dataset[dict[str, Any]]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": torch.full((16,), float(number)), "name": f"sample {number}", "nested": [number, (number,)]}


@kind
def data_loader_with_workers() -> Result:
    model, names = make_mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(_Numbers(), batch_size=4, num_workers=2, shuffle=True):
        names.append(batch["name"])
        train(model, lambda x=batch["x"]: _loss_of(model, x), optimizer=optimizer, num_steps=1)
    return [names, state(model)]


class _Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((16,), float(number)) for number in range(9))


@kind
def data_stream_in_the_main_process() -> Result:
    model = make_mlp()
    return [_loss_of(model, batch) for batch in DataLoader(_Stream(), batch_size=4)]


class _LazyBatch(dict[str, torch.Tensor]):
    """A mapping that makes its values when they are read, as those of data set libraries."""

    reads: ClassVar[list[str]] = []

    def __getitem__(self, key: str) -> torch.Tensor:
        self.reads.append(key)
        return torch.ones(8, 16)

    def __iter__(self) -> Iterator[str]:
        self.reads.append("iter")
        return super().__iter__()

    def __len__(self) -> int:
        self.reads.append("len")
        return 1


@kind
def lazy_mappings_as_inputs() -> Result:
    class FromMapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.layer(batch["x"])

    _LazyBatch.reads.clear()
    model = FromMapping()
    result = train(model, lambda: model(_LazyBatch()).square().mean())
    return [list(_LazyBatch.reads), result]


@kind
def endless_iterables_as_inputs() -> Result:
    import itertools

    class FromIterator(nn.Module):
        def forward(self, stream: Iterator[torch.Tensor]) -> torch.Tensor:
            return next(stream) + next(stream)

    stream = (torch.full((2,), float(number)) for number in itertools.count())
    model = FromIterator()
    return [model(stream) for _ in range(3)]


@kind
def retry_after_out_of_memory() -> Result:
    model, sizes, size = make_mlp(), [], 64
    while size > 4:
        try:
            if size > 8:
                raise torch.OutOfMemoryError("made up")
            _loss_of(model, torch.randn(size, 16)).backward()
        except torch.OutOfMemoryError:
            model.zero_grad()
        sizes.append(size)
        size //= 2
    return [sizes, [parameter.grad for parameter in model.parameters()]]


@kind
def real_allocation_failure() -> Result:
    try:
        torch.empty(1 << 60)
    except RuntimeError as error:
        return [type(error).__name__, train(model := make_mlp(), lambda: _loss_of(model))]
    raise AssertionError("an exbibyte was allocated")


@kind
def optimizer_with_hostile_methods() -> Result:
    class Hostile(torch.optim.SGD):
        calls: ClassVar[list[str]] = []

        def __eq__(self, other: object) -> bool:
            self.calls.append("eq")
            raise RuntimeError("no equality")

        def __hash__(self) -> int:
            return id(self)

        def __len__(self) -> int:
            self.calls.append("len")
            return 0

    model = make_mlp()
    result = train(model, lambda: _loss_of(model), optimizer=Hostile(model.parameters(), lr=0.1))
    return [Hostile.calls, result]


@kind
def deterministic_algorithms() -> Result:
    torch.use_deterministic_algorithms(True)
    try:
        model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 4))
        return train(model, lambda: model(torch.randint(10, (8,))).square().mean())
    finally:
        torch.use_deterministic_algorithms(False)
