"""What the schema of an operator says about its reads and writes, for the dispatch observer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

_OVERWRITES: Final = ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
                      "_foreach_copy_", "_foreach_zero_", "set_", "resize_", "eye_")  # fmt: skip
"""In-place operators that do not read what they overwrite."""
_NO_ACCESS: Final = ("set_data", "requires_grad_", "retain_grad", "record_stream", "is_", "_has_", "size", "stride",
                     "resize_", "set_", "sym_", "detach", "alias")  # fmt: skip
"""Operators that access no memory."""
_VIEWS: Final = ("_unsafe_view", "_reshape_alias")
"""Operators that return views although their schemas do not say so."""


class ArgumentAccess(NamedTuple):
    """Whether an operator reads and writes the memory of an argument."""

    reads: bool
    writes: bool


@dataclass(frozen=True)
class OperatorInfo:
    """What the schema of an operator says about its accesses."""

    name: str
    """Qualified name with overload, such as ``aten::add.Tensor``."""
    accesses: dict[int | str, ArgumentAccess]
    """Accesses by position, or by name for keyword-only arguments. Arguments without access are left out."""
    writes_result: bool
    """Whether the operator fills the memory that it allocates."""
    is_recorded: bool
    """False for operators that access no memory and for the markers of profiler ranges."""


def inspect_operator(operator: Any) -> OperatorInfo:
    """What the schema of an ``OpOverload`` says about its accesses."""
    schema = operator._schema
    short_name = schema.name.split("::")[-1]
    accesses: dict[int | str, ArgumentAccess] = {}
    for position, argument in enumerate(schema.arguments):
        if "Tensor" not in str(argument.type) or short_name in _VIEWS:
            continue
        alias = argument.alias_info
        writes = alias is not None and alias.is_write
        # An argument with an alias that is not written is the base of a view: making a view accesses no memory.
        reads = alias is None or (writes and not argument.is_out and not short_name.startswith(_OVERWRITES))
        if reads or writes:
            accesses[argument.name if argument.kwarg_only else position] = ArgumentAccess(reads, writes)
    is_range = schema.name.startswith("profiler::_record_function")
    is_attribute = schema.name.startswith("prim::")  # prim::device, which fake tensors are asked for by autograd
    return OperatorInfo(
        name=schema.name + (f".{schema.overload_name}" if schema.overload_name else ""),
        accesses=accesses,
        writes_result=not short_name.startswith(("empty", "new_empty")),
        is_recorded=not (is_range or is_attribute or short_name.startswith(_NO_ACCESS)),
    )


def next_sequence_nr() -> int:
    """Sequence number of the next autograd node of the calling thread."""
    number: int = torch._C._autograd._get_sequence_nr()
    return number


def running_node_sequence_nr() -> int:
    """Sequence number of the autograd node that runs in the calling thread; -1 if there is none."""
    node = torch._C._current_autograd_node()
    number = node._sequence_nr() if node is not None else -1
    return number if number < 1 << 63 else -1  # AccumulateGrad has the largest unsigned number
