"""Training of the whole model in one process, with the weights that a pipeline schedule uses."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from layers import make_layers, samples
from torch import nn

from memtrace.pipeline.schedules.schedule import STASH, Schedule

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Weights = dict[str, torch.Tensor]


def train_with_flush(arguments: argparse.Namespace, num_microbatches: int, loss: Loss) -> list[nn.Module]:
    """Train the layers one update per step; returns them with the gradients of the last step."""
    layers = make_layers(arguments.sizes)
    model = nn.Sequential(*layers)
    optimizer = make_optimizer(list(model.parameters()))
    for step in range(arguments.steps):
        optimizer.zero_grad()
        for m in range(num_microbatches):
            text = samples(step, m, arguments.batch, arguments.sizes)
            (loss(model(text[:, :-1]), text[:, 1:]) / num_microbatches).backward()
        optimizer.step()
    return layers


def train_without_flush(
    arguments: argparse.Namespace, schedule: Schedule, bounds: Sequence[int], loss: Loss
) -> list[nn.Module]:
    """Train the layers micro-batch by micro-batch by the formulas of the papers, with all weight versions kept.

    Stage s of D computes micro-batch k (from 0) with version max(k - (D - s) + 1, 0) under PipeDream, because D - s
    micro-batches are in flight, and with version max(floor(k / m) - 1, 0) under PipeDream-2BW.
    """
    layers = make_layers(arguments.sizes)
    stages = [nn.Sequential(*layers[begin:end]) for begin, end in pairwise(bounds)]
    optimizers = [make_optimizer(list(stage.parameters())) for stage in stages]
    history = [[_copy_weights(stage)] for stage in stages]
    count, every = schedule.num_microbatches, schedule.update_every or 1
    for number in range(arguments.steps * count):
        step, m = divmod(number, count)
        text = samples(step, m, arguments.batch, arguments.sizes)
        value = text[:, :-1]
        used = []
        for stage, module in enumerate(stages):
            if schedule.update == STASH:
                version = step * count + max(m - (len(stages) - stage) + 1, 0)
            else:
                version = max(number // every - 1, 0)
            used.append(history[stage][version])
            value = torch.func.functional_call(module, used[-1], (value,))
        (loss(value, text[:, 1:]) / every).backward()
        if (number + 1) % every == 0:
            for module, weights, optimizer, versions in zip(stages, used, optimizers, history, strict=True):
                _update(module, weights, optimizer)
                versions.append(_copy_weights(module))
    return layers


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of the example."""
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=False)


def _copy_weights(module: nn.Module) -> Weights:
    return {name: parameter.detach().clone().requires_grad_() for name, parameter in module.named_parameters()}


def _update(module: nn.Module, weights: Weights, optimizer: torch.optim.Optimizer) -> None:
    """Update the parameters of ``module`` with the gradients of ``weights``."""
    for name, parameter in module.named_parameters():
        parameter.grad, weights[name].grad = weights[name].grad, None
    optimizer.step()
