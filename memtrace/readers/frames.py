"""What a frame of a stack tells: which frames are nobody's code, and the phase of training a stack belongs to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Final

from memtrace.format.schema import PHASES

FORWARD: Final = PHASES.index("forward")
BACKWARD: Final = PHASES.index("backward")
OPTIMIZER: Final = PHASES.index("optimizer")

# The machinery that takes stacks and calls Python functions: in every stack with C++ frames, and nobody's doing.
_NOISE: Final = re.compile(
    r"unwind::unwind|CapturedTraceback::gather|gather_with_cpp|^_start$|^__libc_start|"
    r"^_?Py(Eval|Object|Function|Run|_BytesMain)|^pymain_|^cfunction_|^method_vectorcall|^slot_tp_"
)
_PYTHON_SOURCE: Final = re.compile(r"(Python|Objects|Modules)/\w+\.c$|ceval\.c$|pycore_ceval\.h$")
_DISPATCHED: Final = re.compile(r"^at::_ops::(\w+)::(?:call|redispatch)\(")
# `File "train.py", line 12, in forward`, as Python's own tracebacks write it.
_TRACEBACK_LINE: Final = re.compile(r'File "([^"\n]+)", line (\d{1,9})(?:, in ([^\n]+))?')


class Sign(Enum):
    """What a frame says about the phase of the stack it is in."""

    NONE = 0
    MODULE_CALL = 1
    BACKWARD = 2
    OPTIMIZER_STEP = 4
    RECOMPUTE = 8
    FUNCTION_APPLY = 16
    """Either way of an autograd Function written in Python; as the outermost frame it is the backward, on a thread of
    autograd's own."""


def is_noise(file: str, function: str) -> bool:
    """Whether the frame is the interpreter's or the stack taker's own."""
    return bool(_NOISE.search(function) or _PYTHON_SOURCE.search(file))


def sign_of(file: str, function: str) -> Sign:
    """What the frame says about the phase, by the functions of torch that only one phase calls."""
    if "torch::autograd::Engine::" in function:
        return Sign.BACKWARD
    place = file.replace("\\", "/")
    if "torch/" not in place:
        return Sign.NONE
    if place.endswith("torch/utils/checkpoint.py"):
        return Sign.RECOMPUTE if function in ("unpack_hook", "recompute_fn", "backward") else Sign.NONE
    if place.endswith("torch/nn/modules/module.py"):
        return Sign.MODULE_CALL if function in ("_call_impl", "_wrapped_call_impl") else Sign.NONE
    if place.endswith(("torch/_tensor.py", "torch/autograd/__init__.py", "torch/autograd/graph.py")):
        return Sign.BACKWARD if function in ("backward", "grad", "_engine_run_backward") else Sign.NONE
    if place.endswith("torch/autograd/function.py"):
        return Sign.FUNCTION_APPLY if function == "apply" else Sign.NONE
    if "torch/optim/" in place and not place.endswith(("lr_scheduler.py", "swa_utils.py")):
        return Sign.OPTIMIZER_STEP if function in ("step", "wrapper") else Sign.NONE
    return Sign.NONE


def hint_of(file: str, function: str) -> str:
    """The category of what a function of torch allocates, where it allocates for one purpose only; "none" where its
    callers' hints must not count; "" for every other function."""
    if "AccumulateGrad::accumulateGrad" in function:
        return "gradient"
    place = file.replace("\\", "/")
    if "torch/optim/" in place:
        return "optimizer_state" if function == "_init_group" else ""
    if "torch/nn/modules/" not in place:
        return ""
    if place.endswith("torch/nn/modules/module.py"):
        # Module.to and its kin move parameters and buffers.
        return (
            "parameter" if function in ("convert", "_apply", "to_empty") else "none" if function == "_call_impl" else ""
        )
    return "parameter" if function == "__init__" else "none" if function in ("reset_parameters", "forward") else ""


def operator_of(frames: Iterable[tuple[str, str]]) -> str:
    """The operator that allocates, by the C++ frames of a stack as (file, function), innermost first; "" without those.

    It is the outermost dispatched one below the innermost Python frame or node of the autograd graph.
    """
    found = ""
    for file, function in frames:
        if file.endswith(".py") or "torch::autograd::Node::operator()" in function:
            break
        match = _DISPATCHED.search(function)
        if match:
            found = f"aten::{match[1]}"
    return found


def phase_of(signs: Sequence[Sign]) -> tuple[int, bool]:
    """The phase (an index into PHASES, -1: not told) and whether it is a recomputation, from the signs of all frames
    of a stack, innermost first.

    The innermost sign wins, since an optimizer's closure runs forward and backward; but a module called by a backward
    is part of it.
    """
    if Sign.RECOMPUTE in signs:
        return BACKWARD, True
    if signs and signs[-1] is Sign.FUNCTION_APPLY:
        return BACKWARD, False
    telling = [sign for sign in signs if sign not in (Sign.NONE, Sign.FUNCTION_APPLY)]
    if not telling:
        return -1, False
    if telling[0] is Sign.OPTIMIZER_STEP:
        return OPTIMIZER, False
    callers = [sign for sign in telling if sign is not Sign.MODULE_CALL]
    return (BACKWARD if callers and callers[0] is Sign.BACKWARD else FORWARD), False


def parse_traceback(lines: Iterable[object]) -> list[tuple[str, int, str]]:
    """File, line and function of each frame in a printed traceback (outermost first), innermost first."""
    found = [
        (match[1], int(match[2]), (match[3] or "").strip())
        for text in lines
        if isinstance(text, str)
        for match in _TRACEBACK_LINE.finditer(text[:100_000])
    ]
    return found[::-1]
