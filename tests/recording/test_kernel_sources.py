"""What the source of a kernel says about its arguments, and launches of Triton kernels."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import memtrace
from memtrace.frames import Frame
from memtrace.recording.generated_lines import GraphNode, LineSite, TracedGraph, find_modules, line_sites
from memtrace.recording.imports import after_import
from memtrace.recording.kernel_sources import parse_kernels, triton_accesses
from memtrace.recording.qualified_names import with_qualified_name
from tests.recording.compiled_programs import accessed_bytes_by_operator

READ, WRITTEN, BOTH = 1, 2, 3

GENERATED = '''
cpp_fused_add_0 = async_compile.cpp_pybinding(['float*', 'const float*', 'const int64_t*', 'float*', 'float*', 'const int64_t'], r"""
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* in_out_ptr0,
                       const float* in_ptr0,
                       const int64_t* in_ptr1,
                       float* out_ptr0,
                       float* out_ptr1,
                       const int64_t ks0)
{
    atomic_add(&out_ptr1[static_cast<int64_t>(in_ptr1[0])], static_cast<float>(in_ptr0[0]));
}
""")

triton_poi_fused_1 = async_compile.triton('triton_poi_fused_1', \'\'\'
@triton_heuristics.pointwise(
    size_hints={'x': 1024},
    triton_meta={'signature': {'in_ptr0': '*fp32', 'in_out_ptr0': '*fp32', 'out_ptr0': '*fp16', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}},
    inductor_meta={'mutated_arg_names': ['in_out_ptr0']},
)
@triton.jit
def triton_poi_fused_1(in_ptr0, in_out_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:]
    xmask = xindex < xnumel
    tmp0 = tl.load(in_ptr0 + (xindex), xmask)
    tmp1 = tl.load(in_out_ptr0 + (xindex), xmask)
    tmp2 = triton_helpers.maximum(tmp0, tmp1)
    tl.store(in_out_ptr0 + (xindex), tmp2, xmask)
    tl.store(out_ptr0 + (xindex), tmp2, xmask)
\'\'\', device_str='cuda')

other_kernel = async_compile.cutlass('other', 'so')
'''


def test_accesses_of_generated_kernels() -> None:
    kernels = parse_kernels(GENERATED)
    assert {name: kernel.language for name, kernel in kernels.items()} == {
        "cpp_fused_add_0": "cpp_pybinding",
        "triton_poi_fused_1": "triton",
        "other_kernel": "cutlass",
    }
    assert kernels["cpp_fused_add_0"].accesses == bytes([BOTH, READ, READ, WRITTEN, BOTH])
    assert kernels["triton_poi_fused_1"].accesses == bytes([READ, BOTH, WRITTEN])
    assert kernels["other_kernel"].accesses is None


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("tl.store(b + tl.arange(0, 4), tl.load(a + tl.arange(0, 4)))", [READ, WRITTEN]),
        ("p = a\n    p += 4\n    tl.atomic_add(p, tl.load(b))", [BOTH, READ]),
        ("i = tl.load(a)\n    tl.store(b + i, i)", [READ, WRITTEN]),
        ("p = tl.make_block_ptr(a, (4,), (1,), (0,), (4,), (0,))\n    tl.store(p, tl.load(b))", [WRITTEN, READ]),
        ("d = tl.make_tensor_descriptor(a, [4], [1], [4])\n    d.store([0], tl.load(b))", [WRITTEN, READ]),
        ("for i in range(4):\n        x = tl.load(p)\n        p = b + i\n    p = a", [READ, READ]),
        ("helper(a, tl.load(b))", [BOTH, READ]),
    ],
)
def test_accesses_of_triton_kernels(body: str, expected: list[int]) -> None:
    assert triton_accesses(f"@triton.jit\ndef kernel(a, b):\n    {body}\n") == bytes(expected)


@pytest.mark.parametrize("source", ["def kernel(:", "x = 1", ""])
def test_sources_that_cannot_be_analysed(source: str) -> None:
    assert triton_accesses(source) is None


def trace_text(line: int) -> str:
    return f'  File "model.py", line {line}, in forward\n    y = self.layer(x)\n'


CALL = """
class Runner:
    def call(self, args):
        buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.addmm]
        extern_kernels.addmm(bias, x, weight, alpha=1, beta=1, out=buf0)
        buf1 = buf0; del buf0  # reuse
        cpp_fused_relu_0(buf1)
        buf2 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        # Topologically Sorted Source Nodes: [linear_1], Original ATen: [aten.addmm]
        extern_kernels.addmm(bias, buf1, weight, alpha=1, beta=1, out=buf2)
        return (buf2, )
"""
KERNELS = """
cpp_fused_relu_0 = async_compile.cpp_pybinding(['float*'], r'''
extern "C"  void  kernel(float* in_out_ptr0)
''')
"""


def test_lines_of_repeated_layers_get_the_modules_of_their_own_calls() -> None:
    source = KERNELS + CALL
    first = KERNELS.count("\n") + 4
    # Inductor writes the kernel when it has come to the second product: the trace of the call is that of line 10.
    linemap = [[first, first + 4, first + 5], [trace_text(10), trace_text(10), trace_text(10)]]
    sites = line_sites(source, linemap, parse_kernels(source))
    frames = next(site.frames for site in sites if site.frames)
    nodes = [GraphNode(name, frames, module) for module, name in enumerate(["linear", "relu", "linear_1", "relu_1"])]
    modules = find_modules(sites, [TracedGraph(nodes)])

    def module_at(line: int) -> int:
        return [module for site, module in zip(sites, modules, strict=True) if site.first_line <= line][-1]

    assert [module_at(first + offset) for offset in (0, 2, 4, 5, 7)] == [0, 0, 1, 2, 2]
    assert find_modules(sites, []) == [-1] * len(sites)
    assert find_modules([LineSite(0, ())], [TracedGraph(nodes)]) == [-1]


def scale(source: torch.Tensor, target: torch.Tensor, factor: float) -> None:
    """The source of a Triton kernel; in the tests it is called as a Python function instead."""
    tl.store(target, tl.load(source) * factor)  # type: ignore[name-defined]  # noqa: F821


class StandInKernel:
    """Has the interface of ``triton.runtime.jit.JITFunction``: the tests run without Triton and without a GPU."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn = function
        self.arg_names = list(inspect.signature(function).parameters)

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> tuple[int, ...]:
        """Launch the kernel."""
        return grid

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


@pytest.mark.parametrize("observer", ["native", "dispatch"])
@pytest.mark.parametrize("is_imported_later", [False, True])
def test_launches_of_triton_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observer: str, is_imported_later: bool
) -> None:
    name = "triton.runtime.jit"
    jit = ModuleType(name)
    jit.JITFunction = StandInKernel  # type: ignore[attr-defined]
    original = StandInKernel.run
    monkeypatch.delitem(sys.modules, name, raising=False)
    if not is_imported_later:
        monkeypatch.setitem(sys.modules, name, jit)
    kernel, source, target = StandInKernel(scale), torch.ones(1000), torch.empty(500)
    with memtrace.record(tmp_path / "run.memtrace", observer=observer):
        if is_imported_later:
            finder = next(finder for finder in sys.meta_path if getattr(finder, "_name", None) == name)
            finder._call(jit)  # type: ignore[attr-defined]
        assert kernel[(4,)](source, target, 2.0) == (4,)
        assert kernel[(8,)](source, factor=2.0, target=target) == (8,)
        kernel.run(source, target, 2.0, grid=(1,), warmup=True)
    assert StandInKernel.run is original
    operators = accessed_bytes_by_operator(memtrace.load(tmp_path / "run.memtrace"))
    assert operators["triton::scale"] == 2 * (4000 + 2000)


def test_a_module_is_reported_after_its_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_later.py").write_text("value = 1")
    monkeypatch.syspath_prepend(str(tmp_path))
    reported: list[int] = []
    finders = list(sys.meta_path)
    with ExitStack() as undo:
        after_import("imported_later", lambda module: reported.append(module.value), undo)
        module = importlib.import_module("imported_later")
        assert reported == [1]
        after_import("imported_later", lambda module: reported.append(module.value + 1), undo)
    monkeypatch.delitem(sys.modules, "imported_later")
    assert reported == [1, 2]
    assert type(module.__loader__).__module__ == type(module.__spec__.loader).__module__  # type: ignore[union-attr]
    assert "memtrace" not in type(module.__loader__).__module__
    assert sys.meta_path == finders


class Outer:
    """A class whose method gives away its own frame."""

    def frame(self) -> tuple[Frame, str]:
        """The frame as a stack trace has it, and the qualified name."""
        running = sys._getframe()
        code = running.f_code
        return Frame(code.co_filename, running.f_lineno, code.co_name), getattr(code, "co_qualname", code.co_name)


def test_functions_in_stack_traces_get_their_qualified_names() -> None:
    frame, name = Outer().frame()
    assert with_qualified_name(frame).function == name
    other = Frame(frame.file, frame.line, "another")
    missing = Frame("/nowhere.py", 3, "forward")
    assert [with_qualified_name(other), with_qualified_name(missing)] == [other, missing]
