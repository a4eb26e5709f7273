"""Train a small GPT on synthetic text: ``python examples/gpt.py [--steps N] [--record run.memtrace]``.

``--size gpt2`` trains a model of the size of GPT-2 (124 M parameters, sequences of 1,024 tokens). With ``--fake``
nothing is computed or allocated, and a recording contains the sizes of a real run, whatever the memory of the machine.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """One transformer layer."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder-only transformer.

    Args:
        vocabulary: number of tokens in the vocabulary.
        width: size of the hidden states.
        layers: number of transformer layers.
        heads: number of attention heads per layer.
        length: maximum number of tokens in a sequence.
        tied: whether the embedding and the output layer share their weight.
    """

    def __init__(
        self,
        vocabulary: int = 256,
        width: int = 128,
        layers: int = 4,
        heads: int = 4,
        length: int = 128,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def synthetic_text(batch: int, length: int, vocabulary: int = 256) -> torch.Tensor:
    """Counting sequences with random starts and strides, ``length + 1`` tokens each: learnable in a few steps."""
    start, stride = torch.randint(vocabulary, (batch, 1)), torch.randint(1, 4, (batch, 1))
    return (start + stride * torch.arange(length + 1)) % vocabulary


def compute_loss(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the next token."""
    logits = model(text[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, text: torch.Tensor) -> torch.Tensor:
    """Train on one batch and return its loss."""
    loss = compute_loss(model, text)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


SIZES = {
    "small": {"vocabulary": 256, "width": 128, "layers": 4, "heads": 4, "length": 128},
    "gpt2": {"vocabulary": 50257, "width": 768, "layers": 12, "heads": 12, "length": 1024, "tied": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="number of training steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="sequences per batch (default: %(default)s)")
    parser.add_argument("--record", metavar="TRACE", help="record the training with memtrace into this folder")
    parser.add_argument("--size", choices=SIZES, default="small", help="size of the model (default: %(default)s)")
    parser.add_argument("--fake", action="store_true", help="use fake tensors, which have sizes but no memory")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    size = SIZES[arguments.size]
    recording = fake = nullcontext()
    if arguments.record:
        import memtrace

        recording = memtrace.record(arguments.record)
    if arguments.fake:
        from torch._subclasses.fake_tensor import FakeTensorMode

        fake = FakeTensorMode()
    with fake, recording:
        model = GPT(**size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(arguments.steps):
            text = synthetic_text(arguments.batch, size["length"], size["vocabulary"])
            loss = train_step(model, optimizer, text)
            if not arguments.fake and (step % 5 == 0 or step == arguments.steps - 1):
                print(f"step {step:3d}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
