"""Training programs for the comparison of CUDA recordings with torch's own history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Run:
    """What a program needs to run on a device."""

    device: torch.device
    mark: Callable[[], None]
    """Takes a reading of the allocator's counters, which the trace must reproduce."""
    seed: int = 0
    """Determines a random program."""


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activations of the next block."""
        batch, length, width = x.shape
        q, k, v = self.qkv(self.first_norm(x)).view(batch, length, 3, 8, width // 8).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / 8).softmax(-1)
        x = x + self.out((scores @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second_norm(x))


class Transformer(nn.Module):
    """A small language model; with ``recompute``, activations of its blocks are recomputed in backward."""

    def __init__(self, width: int = 512, num_blocks: int = 3, *, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8000, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 8000)
        self.recompute = recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def train_transformer(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Train for some steps with batches of different lengths."""
    for step in range(num_steps):
        tokens = torch.zeros(4, 96 + 64 * (step % 3), dtype=torch.long, device=run.device)
        logits = model(tokens)
        functional.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        run.mark()
        optimizer.step()
        optimizer.zero_grad()
        run.mark()


def transformer(run: Run) -> object:
    """A transformer with AdamW."""
    with run.device:
        model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    train_transformer(run, model, optimizer, 4)
    return model, optimizer


def checkpointing(run: Run) -> object:
    """A transformer that recomputes its activations, with SGD and momentum."""
    with run.device:
        model = Transformer(recompute=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    train_transformer(run, model, optimizer, 3)
    return model, optimizer


def mixed_precision(run: Run) -> object:
    """Autocast to half precision with scaled gradients."""
    with run.device:
        model = Transformer(width=384)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    for step in range(3):
        tokens = torch.zeros(4, 128 + 64 * step, dtype=torch.long, device=run.device)
        with torch.autocast("cuda", torch.float16):
            logits = model(tokens)
            loss = functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        scaled: torch.Tensor = scaler.scale(loss)
        scaled.backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        run.mark()
    return model, optimizer


def cnn(run: Run) -> object:
    """A convolutional network with batch normalization, without cuDNN; the last batch is smaller."""
    with run.device:
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
            nn.Flatten(), nn.Dropout(0.1), nn.Linear(1024, 10),
        )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    for num_images in (16, 16, 5):
        images = torch.randn(num_images, 3, 64, 64, device=run.device)
        functional.cross_entropy(model(images), torch.zeros(num_images, dtype=torch.long, device=run.device)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        run.mark()
    with torch.no_grad():
        model.eval()(torch.randn(40, 3, 64, 64, device=run.device))
    run.mark()
    return model, optimizer


def lstm(run: Run) -> object:
    """A recurrent network on sequences of different lengths, without cuDNN."""
    with run.device:
        model = nn.LSTM(96, 256, num_layers=2, dropout=0.1)
        head = nn.Linear(256, 3000)
    optimizer = torch.optim.RMSprop([*model.parameters(), *head.parameters()])
    for length in (9, 23, 4):
        outputs, _ = model(torch.randn(length, 32, 96, device=run.device))
        head(outputs).logsumexp(-1).mean().backward()
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        run.mark()
    return model, head, optimizer


def gan(run: Run) -> object:
    """A generator and a critic with a gradient penalty, which needs a double backward pass."""
    with run.device:
        generator = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 3072), nn.Tanh())
        critic = nn.Sequential(nn.Linear(3072, 512), nn.LeakyReLU(0.2), nn.Linear(512, 1))
    optimizers = [torch.optim.Adam(part.parameters(), betas=(0.5, 0.9)) for part in (generator, critic)]
    for batch in (128, 200):
        real = torch.randn(batch, 3072, device=run.device)
        fake = generator(torch.randn(batch, 64, device=run.device))
        mixed = torch.lerp(real, fake.detach(), 0.5).requires_grad_()
        (gradient,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        penalty = (gradient.norm(dim=1) - 1).square().mean()
        (critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        run.mark()
        (-critic(fake).mean()).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        run.mark()
    return generator, critic, optimizers
