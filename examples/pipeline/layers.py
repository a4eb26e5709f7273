"""The layers of a small GPT, built one by one and identical in every process."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

HEADS = 4


class Sizes(NamedTuple):
    """Sizes of the model."""

    blocks: int
    width: int
    sequence: int
    vocabulary: int = 256

    @property
    def num_layers(self) -> int:
        """Blocks, embedding and head."""
        return self.blocks + 2


class Embedding(nn.Module):
    """Token and position embeddings."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.sequence, sizes.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))


class Block(nn.Module):
    """Attention and feed-forward with residual connections."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        shape = (batch, length, 3, HEADS, width // HEADS)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """Layer norm and decoder."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(sizes.width)
        self.decoder = nn.Linear(sizes.width, sizes.vocabulary)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(x))


def make_layer(number: int, sizes: Sizes) -> nn.Module:
    """Build layer ``number``; its weights depend only on the number."""
    with torch.random.fork_rng():
        torch.manual_seed(number)
        if number == 0:
            return Embedding(sizes)
        return Head(sizes) if number == sizes.num_layers - 1 else Block(sizes)


def make_layers(sizes: Sizes) -> list[nn.Module]:
    """Build all layers of the model."""
    return [make_layer(number, sizes) for number in range(sizes.num_layers)]


def samples(step: int, microbatch: int, batch: int, sizes: Sizes) -> torch.Tensor:
    """Sequences that count from random starts with random strides, the same in every process."""
    generator = torch.Generator().manual_seed(1000 * step + microbatch)
    start = torch.randint(sizes.vocabulary, (batch, 1), generator=generator)
    stride = torch.randint(1, 4, (batch, 1), generator=generator)
    return (start + stride * torch.arange(sizes.sequence + 1)) % sizes.vocabulary
