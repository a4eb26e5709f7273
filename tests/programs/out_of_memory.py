"""Programs that run out of memory on a device of 2 GiB: ``python out_of_memory.py NAME TRACE [FIX]``.

Each trains a few steps in its own way and fails, unless FIX is the change that the verdict on its trace recommends.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memtrace

DEVICE = "cuda"
STEPS = 3


class Block(nn.Module):
    """Keeps nine times the bytes of its output for backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.down = nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(self.act(self.up(self.norm(x))))
        return x + hidden


class Net(nn.Module):
    """A stack of blocks and a classifier."""

    def __init__(self, width: int, depth: int, num_classes: int, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, num_classes)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def train(model: Net, batch: int, fix: str) -> None:
    """Train a model with AdamW, which is run in backward where that is the fix."""
    model.to(DEVICE)
    width = model.head.in_features
    if fix == "in-backward":
        optimizers = {parameter: torch.optim.AdamW([parameter]) for parameter in model.parameters()}

        def update(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True if fix == "fused" else None)
    for _ in range(STEPS):
        x, y = torch.randn(batch, width, device=DEVICE), torch.zeros(batch, dtype=torch.long, device=DEVICE)
        count = int(fix) if fix.isdigit() else 1
        for x_part, y_part in zip(x.chunk(count), y.chunk(count), strict=True):
            (nn.functional.cross_entropy(model(x_part), y_part) / count).backward()
        if fix != "in-backward":
            optimizer.step()
            optimizer.zero_grad()


def forward(fix: str) -> None:
    """The activations of a deep model do not fit."""
    train(Net(768, 12, 1000, checkpointed=fix == "checkpoint"), 6144, fix)


def backward(fix: str) -> None:
    """The gradient of the classifier's output does not fit beside the activations."""
    train(Net(512, 6, 12000, checkpointed=fix == "checkpoint"), 6144, fix)


def optimizer_state(fix: str) -> None:
    """The state that the first step creates does not fit beside the gradients."""
    train(Net(2048, 4, 1000), 64, fix)


def optimizer_temporaries(fix: str) -> None:
    """The temporary tensors of the update do not fit beside the state."""
    train(Net(2048, 3, 1000), 64, fix)


def fragmentation(_fix: str) -> None:
    """Results that are kept split the memory that ever longer sequences leave: much is free, in blocks too small."""
    layer, kept = nn.Linear(1024, 1024, device=DEVICE), []
    with torch.no_grad():
        for length in (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10):
            encoded = layer(torch.randn(length, 1024, device=DEVICE))
            kept.append(torch.empty(length * 5 // 8, 1024, device=DEVICE))
            del encoded
        layer(torch.randn(170 << 10, 1024, device=DEVICE))


def another_process(fix: str) -> None:
    """Another process takes the memory that the second step needs."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(4):
        if number == 2 and fix != "alone":
            take = ctypes.CDLL("libcuda.so.1").nullcuda_take
            take.argtypes = [ctypes.c_int, ctypes.c_int64]
            take(0, 1 << 30)
        model(torch.randn(6144 * (1 + number), 1024, device=DEVICE)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()


def too_large(fix: str) -> None:
    """One request exceeds the device: a shape is wrong."""
    x = torch.randn(64, 1024, device=DEVICE)
    columns = 1024 if fix == "shape" else 1024 * 1024
    torch.empty(len(x), columns, 16, device=DEVICE)


PROGRAMS: dict[str, Callable[[str], None]] = {
    function.__name__: function
    for function in (
        forward, backward, optimizer_state, optimizer_temporaries, fragmentation, another_process, too_large
    )
}  # fmt: skip


def main() -> None:
    name, path, *fix = sys.argv[1:]
    with memtrace.record(path):
        PROGRAMS[name](fix[0] if fix else "")
    print("completed")


if __name__ == "__main__":
    main()
