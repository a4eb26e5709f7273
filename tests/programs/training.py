"""Training programs of 30 steps with small models, for step detection: used by tests and benchmarks/steps.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import memtrace
from tests.programs import tasks
from tests.programs.tasks import Task

STEPS = 30


@dataclass(frozen=True)
class Program:
    """A training program."""

    name: str
    run: Callable[[], None]
    wanted: float
    """Share of the steps that must be detected with the boundaries of the optimizer steps."""


def train(task: Task, after_step: Callable[[int], None] | None = None) -> None:
    """Train for STEPS steps; ``after_step`` is called with the number of each step at its end."""
    optimizer = torch.optim.AdamW(task.model.parameters())
    for number in range(STEPS):
        optimizer.zero_grad()
        task.loss(number).backward()
        optimizer.step()
        if after_step is not None:
            after_step(number)


def accumulation() -> None:
    """One optimizer step for four micro-batches."""
    task = tasks.mlp()
    optimizer = torch.optim.AdamW(task.model.parameters())
    for number in range(STEPS):
        for _ in range(4):
            (task.loss(number) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()


def evaluation() -> None:
    """An evaluation after every fifth step."""
    task = tasks.mlp()

    def evaluate(number: int) -> None:
        if number % 5 == 4:
            task.model.eval()
            with torch.no_grad():
                for _ in range(3):
                    task.loss(number).item()
            task.model.train()

    train(task, evaluate)


def gan() -> None:
    """Two models with an optimizer each."""
    generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32))
    critic = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))
    generator_optimizer = torch.optim.Adam(generator.parameters())
    critic_optimizer = torch.optim.Adam(critic.parameters())
    loss = nn.functional.binary_cross_entropy_with_logits
    for _ in range(STEPS):
        critic_optimizer.zero_grad()
        samples = generator(torch.randn(8, 16))
        real, fake = torch.ones(8, 1), torch.zeros(8, 1)
        (loss(critic(torch.randn(8, 32)), real) + loss(critic(samples.detach()), fake)).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        loss(critic(samples), real).backward()
        generator_optimizer.step()


def not_iterative() -> None:
    """A program without steps: it does different work all the time."""
    for number in range(40):
        width = 8 + 5 * number
        model = nn.Sequential(*(nn.Linear(width + i, width + i + 1) for i in range(1 + number * 7 % 5)))
        with torch.no_grad():
            model(torch.randn(3 + number, width))


def transformer() -> None:
    """A transformer, one optimizer step per batch."""
    train(tasks.transformer())


PROGRAMS = (
    Program("MLP", lambda: train(tasks.mlp()), 0.99),
    Program("CNN, batch norm", lambda: train(tasks.cnn()), 0.99),
    Program("transformer", transformer, 0.99),
    Program("LSTM, varying lengths", lambda: train(tasks.lstm()), 0.95),
    Program("accumulation of 4", accumulation, 0.95),
    Program("evaluation every 5", evaluation, 0.95),
    Program("GAN, two optimizers", gan, 0.95),
    Program("transformer, checkpointed", lambda: train(tasks.checkpointed_transformer()), 0.99),
)


def recorded(run: Callable[[], None], path: Path, **options: bool) -> memtrace.Trace:
    """Run a program with a fixed seed and return its trace."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with memtrace.record(path, **options):
        run()
    return memtrace.load(path)
