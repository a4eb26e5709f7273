"""The operators that get kernels of their own in the native observer, and the sources generated for them.

An operator that is not listed is recorded by the boxed fallback: the same, but more slowly. So the list holds what
training calls often and what takes little time itself. Names are those of the classes in ``ATen/ops/*_ops.h``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

NUM_SOURCES: Final = 2
"""Sources that are compiled side by side."""

OPERATORS: Final = {
    # Views.
    "_reshape_alias": ("_reshape_alias",),
    "_unsafe_view": ("_unsafe_view",),
    "alias": ("alias",),
    "as_strided": ("as_strided",),
    "detach": ("detach",),
    "expand": ("expand",),
    "permute": ("permute",),
    "select": ("select_int",),
    "slice": ("slice_Tensor",),
    "split": ("split_Tensor",),
    "squeeze": ("squeeze", "squeeze_dim"),
    "t": ("t",),
    "transpose": ("transpose_int",),
    "unbind": ("unbind_int",),
    "unsqueeze": ("unsqueeze",),
    "view": ("view",),
    "zeros": ("zeros",),
    # Creation and copies.
    "_to_copy": ("_to_copy",),
    "cat": ("cat",),
    "clone": ("clone",),
    "copy": ("copy_",),
    "empty": ("empty_memory_format",),
    "empty_like": ("empty_like",),
    "empty_strided": ("empty_strided",),
    "fill": ("fill__Scalar",),
    "new_empty_strided": ("new_empty_strided",),
    "ones_like": ("ones_like",),
    "scalar_tensor": ("scalar_tensor",),
    "stack": ("stack",),
    "where": ("where_self",),
    "zero": ("zero_",),
    "zeros_like": ("zeros_like",),
    # Arithmetic.
    "_local_scalar_dense": ("_local_scalar_dense",),
    "add": ("add_Tensor", "add__Tensor", "add_Scalar", "add__Scalar"),
    "addcdiv": ("addcdiv", "addcdiv_"),
    "addcmul": ("addcmul", "addcmul_"),
    "all": ("all",),
    "amax": ("amax",),
    "clamp": ("clamp",),
    "clamp_min": ("clamp_min",),
    "cos": ("cos",),
    "cumsum": ("cumsum",),
    "div": ("div_Tensor", "div__Tensor", "div_Scalar"),
    "eq": ("eq_Tensor", "eq_Scalar"),
    "exp": ("exp",),
    "gather": ("gather",),
    "index_select": ("index_select",),
    "isneginf": ("isneginf",),
    "lerp": ("lerp__Scalar",),
    "log": ("log",),
    "masked_fill": ("masked_fill_Scalar", "masked_fill__Scalar"),
    "max": ("max", "max_dim"),
    "maximum": ("maximum",),
    "mean": ("mean", "mean_dim"),
    "mul": ("mul_Tensor", "mul__Tensor", "mul_Scalar"),
    "ne": ("ne_Scalar",),
    "neg": ("neg",),
    "pow": ("pow_Tensor_Scalar", "pow_Scalar"),
    "reciprocal": ("reciprocal",),
    "rsqrt": ("rsqrt",),
    "rsub": ("rsub_Scalar",),
    "sin": ("sin",),
    "sqrt": ("sqrt",),
    "sub": ("sub_Tensor", "sub__Tensor"),
    "sum": ("sum", "sum_dim_IntList"),
    # Layers, forward and backward.
    "_fused_dropout": ("_fused_dropout",),
    "_log_softmax": ("_log_softmax",),
    "_log_softmax_backward_data": ("_log_softmax_backward_data",),
    "_softmax": ("_softmax",),
    "_softmax_backward_data": ("_softmax_backward_data",),
    "addmm": ("addmm",),
    "baddbmm": ("baddbmm",),
    "bernoulli": ("bernoulli__float",),
    "bmm": ("bmm",),
    "embedding": ("embedding",),
    "embedding_dense_backward": ("embedding_dense_backward",),
    "gelu": ("gelu",),
    "gelu_backward": ("gelu_backward",),
    "mm": ("mm",),
    "native_batch_norm": ("native_batch_norm",),
    "native_batch_norm_backward": ("native_batch_norm_backward",),
    "native_dropout": ("native_dropout",),
    "native_dropout_backward": ("native_dropout_backward",),
    "native_layer_norm": ("native_layer_norm",),
    "native_layer_norm_backward": ("native_layer_norm_backward",),
    "nll_loss_backward": ("nll_loss_backward",),
    "nll_loss_forward": ("nll_loss_forward",),
    "relu": ("relu", "relu_"),
    "select_backward": ("select_backward",),
    "sigmoid": ("sigmoid",),
    "sigmoid_backward": ("sigmoid_backward",),
    "silu": ("silu",),
    "silu_backward": ("silu_backward",),
    "slice_backward": ("slice_backward",),
    "tanh": ("tanh",),
    "tanh_backward": ("tanh_backward",),
    "threshold_backward": ("threshold_backward",),
    # Optimizers, and the clipping of gradients.
    "_foreach_add": ("_foreach_add__Scalar", "_foreach_add__List"),
    "_foreach_addcdiv": ("_foreach_addcdiv__ScalarList",),
    "_foreach_addcmul": ("_foreach_addcmul__Scalar",),
    "_foreach_lerp": ("_foreach_lerp__Scalar",),
    "_foreach_mul": ("_foreach_mul__Scalar", "_foreach_mul__Tensor"),
    "_foreach_norm": ("_foreach_norm_Scalar",),
    "_fused_adamw": ("_fused_adamw_",),
    "linalg_vector_norm": ("linalg_vector_norm",),
}
"""Names of operators by the header that declares them; one that a version of torch lacks is left out."""


def typed_sources(torch_include: Path) -> dict[str, str]:
    """Return the generated sources by file name, for the torch whose headers lie in ``torch_include``."""
    declared = [
        (header, name)
        for header, names in OPERATORS.items()
        for name in names
        if f" {name} {{" in _read(torch_include / _header_name(header))
    ]
    sources = [declared[i::NUM_SOURCES] for i in range(NUM_SOURCES)]
    return {f"typed_kernels_{i}.cpp": _source(operators) for i, operators in enumerate(sources) if operators}


def _header_name(header: str) -> str:
    return f"ATen/ops/{header}_ops.h"


def _read(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _source(operators: list[tuple[str, str]]) -> str:
    lines = [
        "// Generated by memtrace/recording/observers/typed_operators.py.",
        '#include "typed_kernels.h"',
        "",
        *(f"#include <{header}>" for header in sorted({_header_name(header) for header, _ in operators})),
        "",
        "namespace memtrace {",
        "",
        "static const TypedKernels kernels(typed_kernels<",
        ",\n".join(f"    at::_ops::{name}" for _, name in operators) + ">());",
    ]
    return "\n".join([*lines, "", "}  // namespace memtrace", ""])
