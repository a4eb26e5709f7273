"""torch.distributed in one process (gloo, one rank)."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from tests.programs.kinds import Result, kind
from tests.programs.kinds.common import make_mlp, train


@contextlib.contextmanager
def _one_rank() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(8, 16)).square().mean()
    return loss


@kind
def collectives() -> Result:
    with _one_rank():
        tensor, parts = torch.ones(4), [torch.zeros(4)]
        dist.all_reduce(tensor)
        dist.all_gather(parts, tensor)
        dist.broadcast(tensor, 0)
        dist.barrier()
        return [tensor, parts]


@kind
def distributed_data_parallel() -> Result:
    with _one_rank():
        model = nn.parallel.DistributedDataParallel(make_mlp(), gradient_as_bucket_view=True)
        return train(model, lambda: _loss_of(model))


@kind
def zero_redundancy_optimizer() -> Result:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    with _one_rank():
        model = nn.parallel.DistributedDataParallel(make_mlp())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam)
        return train(model, lambda: _loss_of(model), optimizer=optimizer)


@kind
def fully_sharded() -> Result:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with _one_rank():
        mesh = init_device_mesh("cpu", (1,))
        model = make_mlp()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters())
        train(model, lambda: _loss_of(model), optimizer=optimizer)
        return [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]


@kind
def tensor_parallel() -> Result:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with _one_rank():
        mesh = init_device_mesh("cpu", (1,))
        model = parallelize_module(make_mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        _loss_of(model).backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]  # type: ignore[union-attr]


@kind
def distributed_tensors() -> Result:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    with _one_rank():
        mesh = init_device_mesh("cpu", (1,))
        x = distribute_tensor(torch.arange(12.0).reshape(3, 4), mesh, [Shard(0)])
        return (x @ x.T).full_tensor()
