"""Operators with kernels of their own are recorded as the boxed fallback records them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import memtrace
from memtrace.recording.observers import typed_operators
from memtrace.recording.observers.build import load_native
from memtrace.recording.observers.toolchain import torch_headers
from memtrace.trace import Trace
from tests.recording.helpers import record_steps

OPERATOR_COLUMNS = ("name", "module", "stack", "phase", "recompute", "sequence_nr")


def train_transformer() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    model(torch.randn(2, 4, 16)).square().mean().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def train_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Dropout(), nn.Flatten(), nn.Linear(16, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    nn.functional.cross_entropy(model(torch.randn(2, 1, 4, 4)), torch.tensor([0, 2])).backward()
    optimizer.step()
    optimizer.zero_grad()


def train_with_autocast_and_checkpoints() -> None:
    model = nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())
    with torch.autocast("cpu", torch.bfloat16):
        hidden = torch.utils.checkpoint.checkpoint(model, torch.arange(6), use_reentrant=False)
        hidden.float().softmax(-1).sum().backward()
    torch.optim.AdamW(model.parameters(), fused=True).step()


def transform_functions() -> None:
    def loss(weight: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        return (sample @ weight).tanh().pow(2).sum()

    weight, samples = torch.randn(3, 3), torch.randn(4, 3)
    torch.func.vmap(torch.func.grad(loss), (None, 0))(weight, samples)


def use_lists_and_optional_tensors() -> None:
    parts = [torch.randn(3, requires_grad=True) for _ in range(3)]
    stacked = torch.stack([torch.cat(parts), torch.cat(parts)])
    first, *_ = stacked.unbind(0)
    nn.functional.layer_norm(first.view(3, 3).t(), (3,)).masked_fill(torch.eye(3) > 0, 0.0).mean().backward()
    nn.functional.batch_norm(stacked.detach(), None, None, training=True).clamp(min=0.0)


def call_composite_operators() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    torch.einsum("ij,kj->ik", weight, nn.functional.linear(weight, weight).reshape(4, 4)).square().mean().backward()
    with torch.inference_mode():
        nn.functional.linear(weight, weight).to(torch.float64).softmax(-1).flatten()
    with torch.autocast("cpu", torch.bfloat16):
        (weight @ weight).sum()
    TwoTensor(weight.detach(), weight.detach()).matmul(weight).reshape(-1)


@contextmanager
def boxed_kernels() -> Iterator[None]:
    native = load_native().module
    native.use_typed_kernels(False)
    try:
        yield
    finally:
        native.use_typed_kernels(True)


def rows(program: Callable[[], None], path: Path) -> list[tuple[Any, ...]]:
    """The events of a program with their operators, but without times, addresses and the order of the frees."""

    def step() -> None:
        torch.manual_seed(0)
        program()

    step()
    gc.collect()
    gc.disable()
    try:
        trace = record_steps(step, path, num_steps=2)
    finally:
        gc.enable()
    names = dict(zip(trace.names["id"].tolist(), trace.names["text"].tolist(), strict=True))
    ops = trace.ops.sort_values("op_id")
    ops["sequence_nr"] -= ops["sequence_nr"].min()
    columns = [ops[name].astype(object).where(ops[name].notna(), None) for name in OPERATOR_COLUMNS]
    calls = {
        op_id: (names.get(name), names.get(module), stack is not None and tuple(trace.frames(stack)), *others)
        for op_id, name, module, stack, *others in zip(ops["op_id"], *columns, strict=True)
    }
    events = trace.events[trace.events["kind"] != "baseline"]
    described = [
        (kind, block, calls.get(op_id), None if pd.isna(size) else size)
        for kind, block, op_id, size in zip(
            events["kind"], events["block_id"], events["op_id"], events["size"], strict=True
        )
    ]
    # Where torch keeps tensors in hash tables, such as autocast's cache, their addresses decide which is freed first.
    frees = [row for row in described if row[0] == "free"]
    return [row for row in described if row[0] != "free"] + sorted(frees, key=lambda row: row[1])


@pytest.mark.parametrize(
    "program",
    [
        train_transformer,
        train_convolutions,
        train_with_autocast_and_checkpoints,
        transform_functions,
        use_lists_and_optional_tensors,
        call_composite_operators,
    ],
)
def test_typed_and_boxed_kernels_record_the_same(program: Callable[[], None], tmp_path: Path) -> None:
    torch.set_num_threads(1)
    recorded = []
    for name, kernels in ("typed", nullcontext), ("boxed", boxed_kernels):
        with kernels():  # called from the same line, so that the stacks are equal
            recorded.append(rows(program, tmp_path / f"{name}.memtrace"))
    typed, boxed = recorded
    assert typed == boxed
    assert len(typed) > 20


def recorded_operators(trace: Trace) -> set[str]:
    return {trace.name(name) for name in trace.ops["name"].dropna()}


def test_composite_operators_are_skipped(tmp_path: Path) -> None:
    weight = torch.randn(4, 4)
    trace = record_steps(lambda: nn.functional.linear(weight, weight), tmp_path / "x.memtrace")
    assert torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough("aten::linear", "DeferredInit")
    assert not torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough("aten::mm", "DeferredInit")
    assert {"aten::mm"} <= recorded_operators(trace)
    assert "aten::linear" not in set(trace.names["text"])


def test_a_kernel_that_a_program_adds_to_its_composite_operator_is_recorded(tmp_path: Path) -> None:
    library = torch.library.Library("memtrace_composite", "DEF")
    library.define("copy(Tensor x) -> Tensor")
    library.impl("copy", lambda x: x.relu(), "CompositeImplicitAutograd")
    values = torch.randn(4)
    with memtrace.record(tmp_path / "x.memtrace"):
        library.impl("copy", lambda x: x.clone(), "CPU")  # the kernels of the mode are registered already
        torch.ops.memtrace_composite.copy(values)
    assert "memtrace_composite::copy" in recorded_operators(memtrace.load(tmp_path / "x.memtrace"))


def test_torch_has_the_operators_that_are_listed() -> None:
    listed = sum(len(names) for names in typed_operators.OPERATORS.values())
    sources = typed_operators.typed_sources(torch_headers())
    assert sum(text.count("at::_ops::") for text in sources.values()) == listed


def test_an_operator_that_torch_lacks_is_left_out(tmp_path: Path) -> None:
    header = tmp_path / "ATen" / "ops" / "mm_ops.h"
    header.parent.mkdir(parents=True)
    header.write_text("struct TORCH_API mm {\n};\nstruct TORCH_API mm_out {\n};\n")
    (source,) = typed_operators.typed_sources(tmp_path).values()
    assert source.count("at::_ops::") == 1 and "at::_ops::mm>" in source


def test_results_are_the_same_under_typed_kernels(tmp_path: Path) -> None:
    def result() -> torch.Tensor:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        layer(torch.randn(2, 4, 16)).square().mean().backward()
        return torch.cat([parameter.grad.flatten() for parameter in layer.parameters() if parameter.grad is not None])

    plain = result()
    with memtrace.record(tmp_path / "run.memtrace", observer="native"):
        recorded = result()
    assert torch.equal(plain, recorded)
