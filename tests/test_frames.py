"""Frames: their text form, whose code they are, and what they reveal about the training step."""

from __future__ import annotations

import json as standard_library_module

import pytest

import memtrace.trace
from memtrace.frames import (
    BACKWARD,
    Frame,
    PhaseHint,
    dispatched_operator,
    format_allocation_site,
    innermost_user_frame,
    is_library_frame,
    is_optimizer_base_frame,
    is_optimizer_frame,
    parse_profiler_function,
    parse_traceback,
    stack_phase,
)

SITE_PACKAGES = "/venv/lib/python3.11/site-packages"
USER = Frame("/home/me/project/train.py", 12, "train")


@pytest.mark.parametrize("frame", [USER, Frame("a b.py", 0, ""), Frame("", 0, "torch::unwind::unwind()")])
def test_the_text_of_a_frame_parses_to_the_same_frame(frame: Frame) -> None:
    assert Frame.from_text(frame.text) == frame


def test_a_line_that_is_not_a_number_becomes_zero() -> None:
    assert Frame.from_text("train.py\tx\tf") == Frame("train.py", 0, "f")


@pytest.mark.parametrize(
    "file",
    [
        f"{SITE_PACKAGES}/torch/nn/modules/module.py",
        "/usr/lib/python3/dist-packages/numpy/core.py",
        "torch/nn/functional.py",
        r"C:\Users\me\torch\nn\functional.py",
        r"C:\Python311\Lib\threading.py",
        "/opt/conda/lib/python3.12/threading.py",
        standard_library_module.__file__,
        memtrace.trace.__file__,
        "<frozen importlib._bootstrap>",
        "<string>",
        "<eval_with_key>.5",
        "??",
        "",
        "/build/aten/src/ATen/native/Linear.cpp",
        "libtorch_cpu.so",
    ],
)
def test_library_frames_are_not_user_frames(file: str) -> None:
    assert is_library_frame(Frame(file, 1, "f"))


@pytest.mark.parametrize("file", ["train.py", "/home/me/project/train.py", r"C:\me\train.py", "/home/me/cli/main.py"])
def test_files_of_the_user_are_user_frames(file: str) -> None:
    assert not is_library_frame(Frame(file, 1, "f"))


def test_the_innermost_user_frame_is_below_library_frames() -> None:
    library = Frame(f"{SITE_PACKAGES}/torch/nn/modules/module.py", 1773, "_call_impl")
    assert innermost_user_frame([library, USER, Frame("/home/me/main.py", 1, "<module>")]) == USER
    assert innermost_user_frame([library]) == library
    assert innermost_user_frame([]) is None


@pytest.mark.parametrize(
    ("stack", "site"),
    [
        ([Frame("x.cpp", 0, "at::_ops::mm::call(int)"), USER], "project/train.py:12 train"),
        ([Frame(r"C:\me\train.py", 3, "f")], "me/train.py:3 f"),
        ([Frame("x.cpp", 0, "at::_ops::sum::redispatch(int)"), Frame("x.cpp", 0, "at::_ops::sum_to::call(int)")], "aten::sum_to (torch)"),
        (
            [Frame("x.cpp", 0, "at::_ops::mm::call(int)"), Frame("x.cpp", 0, "torch::autograd::generated::MmBackward0::apply(int)")],
            "MmBackward0 (autograd)",
        ),
        ([Frame("alloc.cpp", 0, "c10::malloc")], "alloc.cpp:0 c10::malloc"),
        ([], None),
    ],
)  # fmt: skip
def test_an_allocation_site_names_user_code_or_what_torch_ran(stack: list[Frame], site: str | None) -> None:
    assert format_allocation_site(stack) == site


@pytest.mark.parametrize(
    ("stack", "operator"),
    [
        (
            [
                Frame("a.cpp", 0, "at::_ops::empty_strided::redispatch(c10::DispatchKeySet)"), Frame("b.cpp", 0, "at::_ops::clone::call(at::Tensor)"),
                Frame("m.py", 3, "forward"), Frame("c.cpp", 0, "at::_ops::linear::call(at::Tensor)"),
            ],
            "aten::clone",
        ),
        (
            [
                Frame("a.cpp", 0, "at::_ops::mm::call("), Frame("", 0, "torch::autograd::Node::operator()(x)"),
                Frame("", 0, "at::_ops::add::call("),
            ],
            "aten::mm",
        ),
        ([Frame("m.py", 3, "forward")], ""),
    ],
)  # fmt: skip
def test_the_operator_is_the_outermost_one_below_python_and_autograd(stack: list[Frame], operator: str) -> None:
    assert dispatched_operator(stack) == operator


def test_schedulers_are_not_optimizers() -> None:
    optim = f"{SITE_PACKAGES}/torch/optim"
    assert is_optimizer_frame(Frame(f"{optim}/adamw.py", 243, "step"))
    assert is_optimizer_frame(Frame(r"C:\torch\optim\sgd.py", 1, "step"))
    assert not is_optimizer_frame(Frame(f"{optim}/lr_scheduler.py", 1, "step"))
    assert not is_optimizer_frame(Frame(f"{optim}/swa_utils.py", 1, "update_parameters"))
    assert is_optimizer_base_frame(Frame(f"{optim}/optimizer.py", 516, "wrapper"))
    assert not is_optimizer_base_frame(Frame(f"{optim}/adamw.py", 243, "step"))


def test_a_stack_without_hints_has_no_phase() -> None:
    assert stack_phase([]) == (-1, False) and stack_phase([PhaseHint.NONE]) == (-1, False)
    assert stack_phase([PhaseHint.RECOMPUTE]) == (BACKWARD, True)


def test_printed_tracebacks_are_parsed_innermost_first() -> None:
    lines = ['File "a b.py", line 3, in f', 'File "c.py", line 4']
    assert parse_traceback(lines) == [Frame("c.py", 4, ""), Frame("a b.py", 3, "f")]
    assert parse_traceback([None, 3, "nothing"]) == []


def test_python_functions_of_the_profiler_are_parsed() -> None:
    assert parse_profiler_function("me/model.py(7): forward") == Frame("me/model.py", 7, "forward")
    assert parse_profiler_function("nn.Module: Linear_0") is None
