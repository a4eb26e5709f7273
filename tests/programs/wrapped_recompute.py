"""Trains wrapped models with and without recomputation, in a process group of one rank; prints a line for each."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import memtrace
from memtrace import Plan
from memtrace.planning.actions import Recompute
from memtrace.planning.plan import StepCost


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(3)))


def build_ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(build())


def build_fsdp() -> nn.Module:
    model, mesh = build(), init_device_mesh("cpu", (1,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    sharded: nn.Module = fully_shard(model, mesh=mesh)
    return sharded


def build_compiled_part() -> nn.Module:
    model = build()
    model[1][0].compile(backend="eager")  # type: ignore[index,operator]
    return model


def train(model: nn.Module, modules: tuple[str, ...]) -> list[float]:
    """Train four steps, with recomputation of some modules, and return the losses."""
    torch.manual_seed(1)
    cost = StepCost(1, None)
    plan = Plan("cpu", (Recompute(modules),), cost, cost)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with memtrace.apply(plan, model) if modules else nullcontext():
        for _ in range(4):
            loss = model(torch.randn(4, 8)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def main() -> None:
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
    for name, make, modules in (
        ("modules inside DDP", build_ddp, ("module.0", "module.2")),
        ("the DDP wrapper", build_ddp, ("DistributedDataParallel",)),
        ("FSDP2 units", build_fsdp, ("0", "1")),
        ("the FSDP2 root", build_fsdp, ("FSDPSequential",)),
        ("a module with a compiled part", build_compiled_part, ("1",)),
    ):
        expected, losses = train(make(), ()), train(make(), modules)
        print(f"{name}: {'equal' if losses == expected else 'different'}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
