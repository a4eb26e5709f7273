"""Frames: their text form, and what they reveal about the training step."""

from __future__ import annotations

import pytest

from memtrace.frames import (
    BACKWARD,
    Frame,
    PhaseHint,
    category_hint,
    dispatched_operator,
    is_optimizer_base_frame,
    is_optimizer_frame,
    parse_profiler_function,
    parse_traceback,
    phase_hint,
    stack_phase,
)

SITE_PACKAGES = "/venv/lib/python3.11/site-packages"
USER = Frame("/home/me/project/train.py", 12, "train")


@pytest.mark.parametrize("frame", [USER, Frame("a b.py", 0, ""), Frame("", 0, "torch::unwind::unwind()")])
def test_the_text_of_a_frame_parses_to_the_same_frame(frame: Frame) -> None:
    assert Frame.from_text(frame.text) == frame


def test_a_line_that_is_not_a_number_becomes_zero() -> None:
    for text in ("x", "\N{SUPERSCRIPT TWO}", "9" * 5000):
        assert Frame.from_text(f"train.py\t{text}\tf") == Frame("train.py", 0, "f")


def test_a_frame_has_no_unprintable_characters() -> None:
    assert Frame.from_text("a\x1b[31m.py\t3\tf\u202e") == Frame("a\ufffd[31m.py", 3, "f\ufffd")


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


@pytest.mark.parametrize("function", ["_call_impl", "Module._call_impl", "Module._wrapped_call_impl"])
def test_a_module_call_is_recognised_by_the_qualified_and_the_plain_name_of_its_function(function: str) -> None:
    assert phase_hint(Frame("/lib/torch/nn/modules/module.py", 1, function)) is PhaseHint.MODULE_CALL
    assert category_hint(Frame("/lib/torch/nn/modules/module.py", 1, "Module.to.<locals>.convert")) == "parameter"
