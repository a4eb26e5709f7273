"""Eight real training programs of 30 steps with tiny networks, for step detection: tests and benchmarks/steps.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrace

STEPS = 30


@dataclass(frozen=True)
class Program:
    """``run`` trains; ``wanted`` is the share of steps whose boundary must be the optimizer's."""

    name: str
    run: Callable[[], None]
    wanted: float


def _loop(model: nn.Module, loss_of: Callable[[int], torch.Tensor], each: Callable[[int], None] | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for number in range(STEPS):
        optimizer.zero_grad()
        loss_of(number).backward()
        optimizer.step()
        if each is not None:
            each(number)


def _mlp_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8))


def _classify(model: nn.Module) -> torch.Tensor:
    return nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.randint(8, (16,)))


def mlp() -> None:
    model = _mlp_model()
    _loop(model, lambda _: _classify(model))


def cnn() -> None:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 4))
    _loop(model, lambda _: model(torch.randn(4, 3, 8, 8)).square().mean())


def _encoder() -> nn.ModuleList:
    return nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(2))


def transformer() -> None:
    layers = _encoder()

    def loss(_: int) -> torch.Tensor:
        x = torch.randn(2, 8, 32)
        for layer in layers:
            x = layer(x)
        return x.square().mean()

    _loop(layers, loss)


def checkpointed() -> None:
    layers = _encoder()

    def loss(_: int) -> torch.Tensor:
        x = torch.randn(2, 8, 32, requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()

    _loop(layers, loss)


def lstm() -> None:
    model = nn.LSTM(16, 32, num_layers=2)
    _loop(model, lambda number: model(torch.randn(4 + number * 7 % 13, 3, 16))[0].square().mean())


def accumulation() -> None:
    model = _mlp_model()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(STEPS):
        for _ in range(4):
            (_classify(model) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluation() -> None:
    model = _mlp_model()

    def evaluate(number: int) -> None:
        if number % 5 == 4:
            model.eval()
            with torch.no_grad():
                for _ in range(3):
                    _classify(model).item()
            model.train()

    _loop(model, lambda _: _classify(model), evaluate)


def gan() -> None:
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
    critic = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    of_generator = torch.optim.Adam(generator.parameters())
    of_critic = torch.optim.Adam(critic.parameters())
    judge = nn.functional.binary_cross_entropy_with_logits
    for _ in range(STEPS):
        of_critic.zero_grad()
        made = generator(torch.randn(8, 16))
        right, wrong = torch.ones(8, 1), torch.zeros(8, 1)
        (judge(critic(torch.randn(8, 32)), right) + judge(critic(made.detach()), wrong)).backward()
        of_critic.step()
        of_generator.zero_grad()
        judge(critic(made), right).backward()
        of_generator.step()


def not_iterative() -> None:
    """Different work every time: nothing repeats."""
    for number in range(40):
        width = 8 + 5 * number
        model = nn.Sequential(*(nn.Linear(width + i, width + i + 1) for i in range(1 + number * 7 % 5)))
        with torch.no_grad():
            model(torch.randn(3 + number, width))


PROGRAMS = (
    Program("MLP", mlp, 0.99),
    Program("CNN, batch norm", cnn, 0.99),
    Program("transformer", transformer, 0.99),
    Program("LSTM, varying lengths", lstm, 0.95),
    Program("accumulation of 4", accumulation, 0.95),
    Program("evaluation every 5", evaluation, 0.95),
    Program("GAN, two optimizers", gan, 0.95),
    Program("transformer, checkpointed", checkpointed, 0.99),
)


def recorded(run: Callable[[], None], path: Path, **options: bool) -> memtrace.Trace:
    """The trace of a program, which is trained with the same seed every time."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with memtrace.record(path, **options):
        run()
    return memtrace.load(path)
