"""Reads and writes of operators that a program defines itself."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import memtrace
from tests.recording.compiled_programs import accessed_bytes_by_operator

SIZE_BYTES = 4000


@pytest.fixture(scope="module", autouse=True)
def operators() -> Iterator[None]:
    """``memtrace_tests::scaled`` allocates its result; ``memtrace_tests::add_into`` writes its first argument."""

    @torch.library.custom_op("memtrace_tests::scaled", mutates_args=())
    def scaled(x: torch.Tensor, factor: float) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * factor).clone()

    @torch.library.custom_op("memtrace_tests::add_into", mutates_args=("total",))
    def add_into(total: torch.Tensor, x: torch.Tensor) -> None:
        total.numpy()[...] += x.numpy()

    yield
    scaled._lib._destroy()
    add_into._lib._destroy()


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_custom_operators_read_and_write_what_their_schema_says(tmp_path: Path, observer: str) -> None:
    x, total = torch.ones(1000), torch.zeros(1000)
    with memtrace.record(tmp_path / "run.memtrace", observer=observer):
        torch.ops.memtrace_tests.scaled(x, 2.0)
        torch.ops.memtrace_tests.add_into(total, x)
    accessed = accessed_bytes_by_operator(memtrace.load(tmp_path / "run.memtrace"))
    assert accessed["memtrace_tests::scaled"] == 2 * SIZE_BYTES  # reads the argument, writes the result
    assert accessed["memtrace_tests::add_into"] == 3 * SIZE_BYTES  # reads both arguments, writes one


class Custom(torch.autograd.Function):
    """Calls other operators in both directions."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.neg()


@pytest.mark.parametrize("observer", ["native", "dispatch"])
def test_operators_within_an_autograd_function_are_recorded(tmp_path: Path, observer: str) -> None:
    x = torch.ones(1000, requires_grad=True)
    with memtrace.record(tmp_path / "run.memtrace", observer=observer):
        Custom.apply(x).backward(torch.ones(1000))  # type: ignore[no-untyped-call]
    accessed = accessed_bytes_by_operator(memtrace.load(tmp_path / "run.memtrace"))
    assert accessed["aten::exp"] == accessed["aten::neg"] == 2 * SIZE_BYTES
