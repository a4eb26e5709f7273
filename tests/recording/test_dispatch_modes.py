"""Operators under dispatch modes and inside tensor subclasses are recorded with their stacks, reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import memtrace
from memtrace.analysis.blocks import blocks
from memtrace.format.schema import CATEGORIES
from memtrace.trace import Trace

LARGE_BYTES = 10_000


class Doing(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Wrapped(torch.Tensor):
    """A tensor subclass that wraps a tensor, as DTensor and quantized tensors do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        wrapper: Wrapped = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )
        return wrapper

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Wrapped) else x, (args, kwargs or {}))
        return tree_map(lambda x: Wrapped(x) if isinstance(x, torch.Tensor) else x, func(*args, **kwargs))


def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saves = operator == torch.ops.aten.mm.default
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts() -> Any:
    return create_selective_checkpoint_contexts(policy)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def train(mode: Callable[[], AbstractContextManager[Any]], *, selective: bool = False) -> list[torch.Tensor]:
    """Three steps under a mode; returns the parameters."""
    torch.manual_seed(0)
    layers = nn.ModuleList(Block() for _ in range(2))
    optimizer = torch.optim.AdamW(layers.parameters())
    for _ in range(3):
        with mode():
            x = torch.randn(64, 64)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=selective_contexts) if selective else layer(x)
            x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in layers.parameters()]


@contextmanager
def single_process_group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def record(program: Callable[[], object], path: Path) -> tuple[object, Trace]:
    with memtrace.record(path, observer="native"):
        result = program()
    return result, memtrace.load(path)


MODES: dict[str, Callable[[], object]] = {
    "selective checkpointing": lambda: train(nullcontext, selective=True),
    "FlopCounterMode": lambda: train(lambda: FlopCounterMode(display=False)),
    "a mode of the program": lambda: train(Doing),
    "two modes": lambda: train(lambda: _nested(Doing(), FlopCounterMode(display=False)), selective=True),
}


@contextmanager
def _nested(outer: Any, inner: Any) -> Iterator[None]:
    with outer, inner:
        yield


@pytest.mark.parametrize("name", MODES)
def test_operators_under_a_mode_are_recorded_as_without_it(name: str, tmp_path: Path) -> None:
    expected = MODES[name]()
    actual, trace = record(MODES[name], tmp_path / "run.memtrace")
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))  # type: ignore[call-overload]
    table = blocks(trace)
    large = np.flatnonzero((table.size >= LARGE_BYTES) & (table.alloc_event >= 0))
    assert len(large) > 50
    assert (table.stack[large] >= 0).all()
    assert (table.op_name[large] >= 0).all()
    is_lasting = np.isin(table.category[large], [CATEGORIES.index(name) for name in ("activation", "optimizer_state")])
    assert is_lasting.any()
    assert (table.num_reads[large[is_lasting]] > 0).all()
    assert (table.num_writes[large[is_lasting]] > 0).all()


def test_backward_operators_under_a_mode_have_the_module_of_their_forward_operators(tmp_path: Path) -> None:
    _, trace = record(MODES["a mode of the program"], tmp_path / "run.memtrace")
    ops = trace.ops
    is_product = ops.name.map(lambda name: trace.name(int(name)) == "aten::mm", na_action="ignore").fillna(False)
    backward = ops[is_product.astype(bool) & (ops.phase == "backward")]
    modules = {trace.name(int(module)) for module in backward.module.dropna()}
    assert modules == {f"ModuleList.{layer}.{part}" for layer in (0, 1) for part in ("up", "down")}


def test_operators_inside_a_tensor_subclass_are_recorded(tmp_path: Path) -> None:
    def program() -> list[float]:
        torch.manual_seed(0)
        weight = nn.Parameter(Wrapped(torch.randn(64, 64)))
        optimizer = torch.optim.Adam([weight])
        losses = []
        for _ in range(3):
            loss = (Wrapped(torch.ones(8, 64)) @ weight).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.inner.item())  # type: ignore[attr-defined]
        return losses

    expected = program()
    actual, trace = record(program, tmp_path / "run.memtrace")
    assert actual == expected
    table = blocks(trace)
    for category in ("parameter", "gradient", "optimizer_state"):
        rows = np.flatnonzero((table.category == CATEGORIES.index(category)) & (table.size == 64 * 64 * 4))
        assert len(rows) > 0, category
        assert (table.num_reads[rows] > 0).all(), category
        assert (table.op_name[rows] >= 0).all(), category


def test_the_optimizer_state_of_fully_sharded_parameters_is_read(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def program() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        mesh = init_device_mesh("cpu", (1,))
        for part in (*model, model):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    with single_process_group():
        _, trace = record(program, tmp_path / "run.memtrace")
    table = blocks(trace)
    state = np.flatnonzero((table.category == CATEGORIES.index("optimizer_state")) & (table.size >= LARGE_BYTES))
    assert len(state) == 4
    assert (table.num_reads[state] >= 4).all()
    assert (table.num_writes[state] >= 3).all()


def test_torch_is_left_as_it_was(tmp_path: Path) -> None:
    """The table of Python functions that torch calls is put back."""
    states = []

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            states.append(torch._C._dispatch_tls_is_dispatch_key_excluded("DeferredInit"))
            return func(*args, **(kwargs or {}))

    def look() -> None:
        with Looking():
            torch.ones(3)

    look()
    record(look, tmp_path / "run.memtrace")
    look()
    assert states == [True, False, True]
