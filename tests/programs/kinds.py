"""Small training programs: each gives a step function. What they compute depends on the seed alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpt import GPT, synthetic_text, train_step
from torch import nn
from torch.utils.checkpoint import checkpoint

Step = Callable[[], torch.Tensor]


def _trainer(model: nn.Module, loss_of: Callable[[], torch.Tensor], **options: object) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, **options)

    def step() -> torch.Tensor:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def mlp() -> Step:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    return _trainer(model, lambda: nn.functional.cross_entropy(model(torch.randn(16, 64)), torch.randint(8, (16,))))


def cnn() -> Step:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
    return _trainer(model, lambda: model(torch.randn(4, 3, 8, 8)).square().mean())


def transformer() -> Step:
    model = GPT(vocabulary=64, width=32, layers=2, heads=2, length=16)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    return lambda: train_step(model, optimizer, synthetic_text(2, 16, 64))


def lstm() -> Step:
    model = nn.LSTM(16, 16, num_layers=2)
    return _trainer(model, lambda: model(torch.randn(5, 3, 16))[0].square().mean())


def checkpointed() -> Step:
    layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(2))

    def loss() -> torch.Tensor:
        x = torch.randn(2, 8, 32, requires_grad=True)
        for layer in layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()

    return _trainer(layers, loss)


def autocast() -> Step:
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 8))

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(torch.randn(16, 64)).float().square().mean()

    return _trainer(model, loss)


PROGRAMS = (mlp, cnn, transformer, lstm, checkpointed, autocast)
