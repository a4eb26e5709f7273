"""Small models with the loss of one training step. What they compute depends on torch's seed alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[], torch.Tensor]
"""Runs one training step and returns the loss."""


@dataclass(frozen=True)
class Task:
    """A model to train."""

    model: nn.Module
    loss: Callable[[int], torch.Tensor]
    """Computes the loss of a step from the number of the step."""


def mlp() -> Task:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 8))
    return Task(model, lambda _: nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.randint(8, (16,))))


def cnn() -> Task:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 16, 4))
    return Task(model, lambda _: model(torch.randn(4, 3, 8, 8)).square().mean())


def _encoder_layers() -> nn.ModuleList:
    return nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(2))


def transformer() -> Task:
    layers = _encoder_layers()

    def loss(_: int) -> torch.Tensor:
        x = torch.randn(2, 8, 32)
        for layer in layers:
            x = layer(x)
        return x.square().mean()

    return Task(layers, loss)


def checkpointed_transformer() -> Task:
    layers = _encoder_layers()

    def loss(_: int) -> torch.Tensor:
        x = torch.randn(2, 8, 32, requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()

    return Task(layers, loss)


def gpt() -> Task:
    from gpt import GPT, compute_loss, synthetic_text  # examples/gpt.py: not on the path of benchmarks/steps.py

    model = GPT(vocabulary=64, width=32, layers=2, heads=2, length=16)
    return Task(model, lambda _: compute_loss(model, synthetic_text(2, 16, 64)))


def lstm() -> Task:
    """An LSTM on sequences of varying lengths."""
    model = nn.LSTM(16, 32, num_layers=2)
    return Task(model, lambda number: model(torch.randn(4 + number * 7 % 13, 3, 16))[0].square().mean())


def autocast_mlp() -> Task:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def loss(_: int) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.randn(16, 64)).float().square().mean()

    return Task(model, loss)


TASKS = (mlp, cnn, transformer, checkpointed_transformer, gpt, lstm, autocast_mlp)


def make_step(task: Task) -> Step:
    """A function that trains the task by one step per call."""
    optimizer = torch.optim.AdamW(task.model.parameters(), foreach=False)
    num_steps = 0

    def step() -> torch.Tensor:
        nonlocal num_steps
        loss = task.loss(num_steps)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        num_steps += 1
        return loss.detach()

    return step
