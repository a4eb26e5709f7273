"""Training programs of small distributed jobs: ``python tests/programs/ranks.py PROGRAM [TRACE [WORLD_SIZE PORT]]``.

Without WORLD_SIZE the process is one rank of the job that its environment describes, as under torchrun. With WORLD_SIZE
it imports torch once, forks that many ranks and prints their exit codes as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS, WIDTH, SLOW_RANK, KILLED_RANK = 4, 64, 2, 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(torch.relu(self.wide(x)))


def record(trace: str | None) -> Any:
    """A recording into ``trace``, or nothing without a path."""
    if trace is None:
        return nullcontext()
    import memtrace

    return memtrace.record(trace, flush_seconds=0.2)


def shard(model: nn.Module) -> nn.Module:
    """Apply FSDP2 to a model and its children."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh)
    return model


def train(model: nn.Module, num_samples: int = 16, after_step: Callable[[int], None] | None = None) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(num_samples, WIDTH)).square().mean().backward()
        optimizer.step()
        if after_step is not None:
            after_step(step)


def data_parallel(trace: str | None) -> None:
    """Data parallelism; SLOW_RANK has by far the largest batch."""
    dist.init_process_group("gloo")
    with record(trace):
        train(nn.parallel.DistributedDataParallel(Net()), 2048 if dist.get_rank() == SLOW_RANK else 16)
    dist.destroy_process_group()


def fully_sharded(trace: str | None) -> None:
    """FSDP2."""
    dist.init_process_group("gloo")
    with record(trace):
        train(shard(Net()))
    dist.destroy_process_group()


def wait_for_written_step(rank_folder: Path) -> None:
    """Wait until a training step is on disk."""
    import pyarrow.parquet as pq

    deadline = time.monotonic() + 60
    while True:
        parts = [pq.read_table(path, columns=["kind"]) for path in rank_folder.glob("spans-*.parquet")]
        if any("step" in part["kind"].to_pylist() for part in parts):
            return
        assert time.monotonic() < deadline, "no step was written"
        time.sleep(0.01)


def killed(trace: str) -> None:
    """Data parallelism; KILLED_RANK is killed after its first two steps are on disk."""
    dist.init_process_group("gloo")
    with record(trace) as recording:

        def wait_for_kill(step: int) -> None:
            if step == 1 and dist.get_rank() == KILLED_RANK:
                wait_for_written_step(recording.path / f"rank={KILLED_RANK}")
                os.kill(os.getpid(), signal.SIGKILL)

        train(nn.parallel.DistributedDataParallel(Net()), after_step=wait_for_kill)
    dist.destroy_process_group()


def joining_late(trace: str) -> None:
    """Processes that start to record before they join their process group."""
    rank, world_size = int(os.environ.pop("RANK")), int(os.environ.pop("WORLD_SIZE"))
    address = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
    with record(trace):
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(STEPS):
            model(torch.randn(8, 8)).sum().backward()
            optimizer.step()
            dist.barrier()
        dist.destroy_process_group()


PROGRAMS = {program.__name__: program for program in (data_parallel, fully_sharded, killed, joining_late)}


def launch(program: str, trace: str, world_size: int, port: str) -> list[int]:
    """Fork the ranks of a job and return their exit codes; negative signal numbers for killed ranks."""
    import memtrace.recording.session  # noqa: F401

    if program == "fully_sharded":
        import torch.distributed.fsdp  # noqa: F401
    children = []
    for rank in range(world_size):
        child = os.fork()
        if child == 0:
            sys.argv = [program, str(rank)]
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            run_rank(program, trace)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def run_rank(program: str, trace: str) -> None:
    """Run one forked rank and end its process."""
    exit_code = 1
    try:
        run(program, trace)
        exit_code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(exit_code)


def run(program: str, trace: str | None) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    PROGRAMS[program](trace)


def main() -> None:
    program, trace, *job = (*sys.argv[1:], None) if len(sys.argv) == 2 else sys.argv[1:]
    if job:
        print(json.dumps(launch(program, trace, int(job[0]), job[1])))
    else:
        run(program, trace)


if __name__ == "__main__":
    main()
