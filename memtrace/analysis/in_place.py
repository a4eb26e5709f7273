"""Results that the program could write over an input: the operator has an in-place form, and the program chooses it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from memtrace.analysis.blocks import blocks
from memtrace.code_owner import Owner
from memtrace.format.arrays import Array
from memtrace.frames import Frame, normalize_path
from memtrace.trace import Trace

_IN_PLACE_OPERATORS: Final = frozenset(
    f"aten::{name}"
    for name in (
        "abs", "acos", "add", "addcdiv", "addcmul", "asin", "atan", "bernoulli", "ceil", "celu", "clamp", "clamp_max",
        "clamp_min", "clip", "cos", "cosh", "cumprod", "cumsum", "div", "dropout", "elu", "erf", "erfc", "exp",
        "exp2", "expm1", "fill", "floor", "fmod", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "lerp", "log",
        "log10", "log1p", "log2", "logit", "masked_fill", "mish", "mul", "native_dropout", "neg", "nan_to_num", "pow",
        "reciprocal", "relu", "relu6", "remainder", "round", "rrelu", "rsqrt", "selu", "sigmoid", "sign", "silu",
        "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "threshold", "tril", "triu", "trunc", "where",
    )
)  # fmt: skip
"""Operators whose result can take the place of their first argument (``relu_``, ``inplace=True``)."""
_WRAPPERS: Final = ("torch/nn/functional.py", "torch/_tensor.py", "torch/functional.py", "torch/_jit_internal.py")
"""Files of PyTorch whose functions call the operator that the caller asked for."""
_MODULES_WITH_OPTION: Final = ("torch/nn/modules/activation.py", "torch/nn/modules/dropout.py")
"""Files of the modules that have an option ``inplace``."""


def can_write_in_place(trace: Trace, block: Array) -> Array:
    """Return whether the program could let the operator that allocates each block write over an input.

    The line that calls the operator is the program's own, or that of a module with an option ``inplace``. A library's
    line is not the user's to change. Blocks without a call stack count if their operator has an in-place form.
    """
    columns = blocks(trace)
    keys, index = np.unique(np.stack([columns.op_name[block], columns.stack[block]]), axis=1, return_inverse=True)
    is_possible = [
        _has_in_place_form(trace.name(name)) and _is_choice_of_program(trace, trace.frames(stack))
        for name, stack in keys.T.tolist()
    ]
    return np.array(is_possible, bool)[index.reshape(-1)]


def _has_in_place_form(operator: str | None) -> bool:
    return (operator or "").partition(".")[0] in _IN_PLACE_OPERATORS


def _is_choice_of_program(trace: Trace, frames: Sequence[Frame]) -> bool:
    caller = next((frame for frame in frames if not normalize_path(frame.file).endswith(_WRAPPERS)), None)
    if caller is None or normalize_path(caller.file).endswith(_MODULES_WITH_OPTION):
        return True
    return trace.code_owner.owner(caller) is Owner.USER
