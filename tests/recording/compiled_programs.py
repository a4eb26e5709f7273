"""Programs compiled by torch.compile, for the tests of compiled regions and their campaign."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import memtrace
from memtrace.analysis.blocks import blocks
from memtrace.analysis.event_codes import KIND
from memtrace.format.schema import PHASES
from memtrace.trace import Trace


class Layer(nn.Module):
    """Two products with an activation between them, which Inductor fuses with what surrounds it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.up(x))
        return self.down(hidden)


class Network(nn.Module):
    """Layers of the same code and a loss."""

    def __init__(self, width: int = 32, num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def batch(width: int = 32) -> tuple[torch.Tensor]:
    """A batch for ``Network``."""
    return (torch.randn(16, width, generator=torch.Generator().manual_seed(1)),)


def train(
    model: nn.Module, compiled: Callable[..., torch.Tensor], path: Path | None, observer: str = "native", steps: int = 3
) -> list[float]:
    """The losses of a few training steps, recorded into ``path`` unless it is None."""
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    inputs, losses = batch(), []

    def step() -> None:
        loss = compiled(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    if path is None:
        for _ in range(steps):
            step()
        return losses
    with memtrace.record(path, observer=observer):
        for _ in range(steps):
            step()
    return losses


def fresh_network() -> Network:
    """A network with the same parameters every time."""
    torch.manual_seed(0)
    return Network()


def _accesses(trace: Trace) -> Iterator[tuple[int, int]]:
    """Row of the operator call, and size of the block, of each access."""
    size = blocks(trace).size
    events = trace.columns("events", "kind", "block_id", "op_id")
    row_of_op = {int(op): row for row, op in enumerate(trace.columns("ops", "op_id")["op_id"])}
    for row in np.flatnonzero((events["kind"] == KIND["read"]) | (events["kind"] == KIND["write"])):
        yield row_of_op[int(events["op_id"][row])], int(size[int(events["block_id"][row])])


def accessed_bytes(trace: Trace) -> Counter[tuple[str, str, str]]:
    """Bytes accessed by module, phase and line of this file."""
    ops = trace.columns("ops", "module", "phase", "stack")
    result: Counter[tuple[str, str, str]] = Counter()
    for op, num_bytes in _accesses(trace):
        frames = trace.frames(int(ops["stack"][op])) if ops["stack"][op] >= 0 else []
        line = next((str(frame.line) for frame in frames if frame.file == __file__), "")
        module = (trace.name(int(ops["module"][op])) if ops["module"][op] >= 0 else None) or ""
        result[re.sub(r"#\d+", "", module), PHASES[ops["phase"][op]], line] += num_bytes
    return result


def accessed_bytes_by_operator(trace: Trace) -> Counter[str]:
    """Bytes accessed by name of the operator."""
    name = trace.columns("ops", "name")["name"]
    result: Counter[str] = Counter()
    for op, num_bytes in _accesses(trace):
        result[(trace.name(int(name[op])) if name[op] >= 0 else None) or ""] += num_bytes
    return result


def generated_modules() -> list[Any]:
    """The modules of generated code that are loaded."""
    from torch._inductor.codecache import PyCodeCache

    return [module for module in PyCodeCache.modules if hasattr(module, "call")]
