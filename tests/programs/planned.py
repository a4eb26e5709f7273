"""Training programs on which plans are carried out: by tests in small sizes, by benchmarks/plans.py in full sizes.

Everything that they compute depends on torch's seed alone, so that two runs can be compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets."""
SEED = 0


@dataclass(frozen=True)
class Training:
    """A model with everything that its training needs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: tuple[Batch, ...]
    """One for each step, made in advance."""
    loss: Callable[[nn.Module, Batch], torch.Tensor]


@dataclass(frozen=True)
class PlannedProgram:
    """A program in two sizes. The functions set the seed and take the number of steps."""

    name: str
    small: Callable[[int], Training]
    """Milliseconds for each step."""
    full: Callable[[int], Training]
    """Hundreds of milliseconds for each step on two cores; activations larger than the model's state."""


def train(training: Training) -> list[torch.Tensor]:
    """Train on all batches and return the losses; the dropout masks depend on the seed that the program has set."""
    losses = []
    for batch in training.batches:
        training.optimizer.zero_grad()
        loss = training.loss(training.model, batch)
        loss.backward()
        training.optimizer.step()
        losses.append(loss.detach())
        del loss
    return losses


def on_device(training: Training, device: str) -> Training:
    """Return a training whose model, batches and optimizer are on a device."""
    model = training.model.to(device)
    batches = tuple((inputs.to(device), targets.to(device)) for inputs, targets in training.batches)
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batches, training.loss)


def mlp(num_steps: int, *, width: int, depth: int, batch: int) -> Training:
    """Linear layers with ReLU and dropout."""
    torch.manual_seed(SEED)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1)) for _ in range(depth)]
    model = nn.Sequential(*blocks, nn.Linear(width, 10))
    inputs = [(torch.randn(batch, width), torch.randint(10, (batch,))) for _ in range(num_steps)]
    return _training(model, inputs, _classification_loss)


class _Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.first_norm(self.first(x)))
        return self.activation(self.second_norm(self.second(y)) + x)


class _ConvNet(nn.Module):
    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(_Residual(channels) for _ in range(depth))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


def cnn(num_steps: int, *, channels: int, depth: int, image: int, batch: int) -> Training:
    """A residual network whose batch norms have running statistics and whose ReLUs work in place."""
    torch.manual_seed(SEED)
    model = _ConvNet(channels, depth)
    inputs = [(torch.randn(batch, 3, image, image), torch.randint(10, (batch,))) for _ in range(num_steps)]
    return _training(model, inputs, _classification_loss)


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class _GptBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = _Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class _Gpt(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_GptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def gpt(num_steps: int, *, width: int, layers: int, heads: int, length: int, vocabulary: int, batch: int) -> Training:
    """A decoder-only transformer with dropout."""
    torch.manual_seed(SEED)
    model = _Gpt(vocabulary, width, layers, heads, length)
    return _training(model, _random_text(num_steps, batch, length, vocabulary), _language_loss)


class _LstmModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = self.dropout(layer(x)[0])
        logits: torch.Tensor = self.head(x)
        return logits


def lstm(num_steps: int, *, width: int, layers: int, length: int, vocabulary: int, batch: int) -> Training:
    """LSTM layers, which return nested tuples; one dropout module is called after each of them."""
    torch.manual_seed(SEED)
    model = _LstmModel(vocabulary, width, layers)
    return _training(model, _random_text(num_steps, batch, length, vocabulary), _language_loss)


class _TiedModel(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def tied_embeddings(num_steps: int, *, width: int, depth: int, length: int, vocabulary: int, batch: int) -> Training:
    """A language model whose head has the weight of its embedding."""
    torch.manual_seed(SEED)
    model = _TiedModel(vocabulary, width, depth)
    return _training(model, _random_text(num_steps, batch, length, vocabulary), _language_loss)


def nested_sequential(num_steps: int, *, width: int, groups: int, depth: int, batch: int) -> Training:
    """Sequential modules inside sequential modules inside a sequential module."""
    torch.manual_seed(SEED)

    def unit() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    model = nn.Sequential(
        *(nn.Sequential(*(unit() for _ in range(depth)), nn.Dropout(0.1)) for _ in range(groups)), nn.Linear(width, 10)
    )
    inputs = [(torch.randn(batch, width), torch.randint(10, (batch,))) for _ in range(num_steps)]
    return _training(model, inputs, _classification_loss)


PROGRAMS = (
    PlannedProgram(
        "MLP",
        lambda steps: mlp(steps, width=64, depth=6, batch=256),
        lambda steps: mlp(steps, width=512, depth=12, batch=4096),
    ),
    PlannedProgram(
        "CNN",
        lambda steps: cnn(steps, channels=8, depth=4, image=16, batch=8),
        lambda steps: cnn(steps, channels=32, depth=8, image=32, batch=32),
    ),
    PlannedProgram(
        "GPT",
        lambda steps: gpt(steps, width=64, layers=3, heads=4, length=32, vocabulary=128, batch=8),
        lambda steps: gpt(steps, width=512, layers=8, heads=8, length=128, vocabulary=2048, batch=4),
    ),
    PlannedProgram(
        "LSTM",
        lambda steps: lstm(steps, width=48, layers=3, length=16, vocabulary=64, batch=8),
        lambda steps: lstm(steps, width=256, layers=4, length=64, vocabulary=512, batch=32),
    ),
    PlannedProgram(
        "tied embeddings",
        lambda steps: tied_embeddings(steps, width=64, depth=4, length=32, vocabulary=128, batch=8),
        lambda steps: tied_embeddings(steps, width=512, depth=6, length=128, vocabulary=4096, batch=8),
    ),
    PlannedProgram(
        "nested sequential",
        lambda steps: nested_sequential(steps, width=64, groups=3, depth=2, batch=256),
        lambda steps: nested_sequential(steps, width=512, groups=4, depth=3, batch=2048),
    ),
)


def _training(model: nn.Module, batches: list[Batch], loss: Callable[[nn.Module, Batch], torch.Tensor]) -> Training:
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-3), tuple(batches), loss)


def _random_text(num_steps: int, batch: int, length: int, vocabulary: int) -> list[Batch]:
    texts = [torch.randint(vocabulary, (batch, length + 1)) for _ in range(num_steps)]
    return [(text[:, :-1].contiguous(), text[:, 1:].contiguous()) for text in texts]


def _classification_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def _language_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
