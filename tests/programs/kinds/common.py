"""What many of the programs share: a small model and a training loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def make_mlp(width: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))


def state(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model."""
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]


def train(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    *,
    num_steps: int = 3,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[torch.Tensor]:
    """Train a model for a few steps and return the losses, then the parameters and buffers."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(num_steps):
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value.detach())
    return [*losses, *state(model)]


def train_mlp(**options: object) -> list[torch.Tensor]:
    model = make_mlp()
    return train(model, lambda: model(torch.randn(8, 16)).square().mean(), **options)  # type: ignore[arg-type]
