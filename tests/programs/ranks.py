"""One rank of a small job: ``python -m tests.programs.ranks ddp|fsdp|kill FOLDER``, its place from the environment."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

STEPS, WIDTH, SLOW_RANK = 4, 64, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.relu(self.wide(x)))


def shard(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh)
    return model


def train(kind: str) -> None:
    torch.manual_seed(0)
    rank = dist.get_rank()
    model = shard(Net()) if kind == "fsdp" else nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    samples = 2048 if kind == "ddp" and rank == SLOW_RANK else 16
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(samples, WIDTH)).square().mean().backward()
        optimizer.step()
        if kind == "kill" and step == 1:
            time.sleep(1)
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    kind = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recording = nullcontext()
    if len(sys.argv) > 2:
        import memtrace

        recording = memtrace.record(sys.argv[2], flush_seconds=0.2)
    with recording:
        train(kind)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
