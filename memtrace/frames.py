"""Stack frames: how they are written, and what they reveal about the training step.

The rules name functions of PyTorch 2.0 to 2.13: optimizer steps, module calls, backward passes, recomputation, and the
C++ frames of CUDA snapshots. Whose code a frame is: ``memtrace.code_owner``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from memtrace.format.schema import PHASES
from memtrace.text import to_printable

FORWARD: Final = PHASES.index("forward")
BACKWARD: Final = PHASES.index("backward")
OPTIMIZER: Final = PHASES.index("optimizer")

_MAX_LINE_DIGITS: Final = 9

# The stack unwinder and the interpreter loop: part of every stack with C++ frames, whatever the program does.
_MACHINERY_FUNCTION: Final = re.compile(
    r"unwind::unwind|CapturedTraceback::gather|gather_with_cpp|^_start$|^__libc_start|^clone3?$|"
    r"^start_thread$|execute_native_thread_routine|"
    r"^_?Py(Eval|Object|Function|Run|_BytesMain)|^pymain_|^cfunction_|^method_vectorcall|^slot_tp_"
)
_MACHINERY_FILE: Final = re.compile(r"(Python|Objects|Modules)/\w+\.c$|ceval\.c$|pycore_ceval\.h$")
DISPATCHED_OPERATOR: Final = re.compile(r"^at::_ops::(\w+)::(?:call|redispatch)\(")
AUTOGRAD_NODE: Final = re.compile(r"^torch::autograd::(?:generated::)?(\w+)::apply\(")
# `File "train.py", line 12, in forward`, as Python's tracebacks print it.
_TRACEBACK_LINE: Final = re.compile(r'File "([^"\n]+)", line (\d{1,9})(?:, in ([^\n]+))?')
_MAX_TRACEBACK_CHARS: Final = 100_000
# `train.py(12): forward`, as torch.profiler names Python functions.
_PROFILER_FUNCTION: Final = re.compile(r"(.+)\((\d{1,9})\): (.*)")

_OPTIMIZER_FOLDER: Final = "torch/optim/"
_OPTIMIZER_BASE_CLASS: Final = "torch/optim/optimizer.py"
# They are in torch/optim, and their `step` changes no parameter.
_NOT_OPTIMIZERS: Final = ("lr_scheduler.py", "swa_utils.py")


@dataclass(frozen=True)
class Frame:
    """One frame of a call stack."""

    file: str
    """Path of the source file as the interpreter or the debug information gives it."""
    line: int
    """Line number; 0 where it is unknown."""
    function: str
    """Name of the function, qualified where Python provides that."""

    @classmethod
    def from_text(cls, text: str) -> Frame:
        """Parse the form used in the table ``names``: ``file<TAB>line<TAB>function``; the text can be damaged."""
        file, _, rest = text.partition("\t")
        line, _, function = rest.partition("\t")
        number = int(line) if line.isdecimal() and len(line) <= _MAX_LINE_DIGITS else 0
        return cls(to_printable(file), number, to_printable(function))

    @property
    def text(self) -> str:
        """The frame in the form that ``from_text`` parses."""
        return f"{self.file}\t{self.line}\t{self.function}"


def parse_traceback(lines: Iterable[object]) -> list[Frame]:
    """Parse a printed Python traceback.

    Args:
        lines: pieces of the traceback, outermost frame first; pieces that are not text are skipped.

    Returns:
        The frames, innermost first.
    """
    frames = [
        Frame(match[1], int(match[2]), (match[3] or "").strip())
        for text in lines
        if isinstance(text, str)
        for match in _TRACEBACK_LINE.finditer(text[:_MAX_TRACEBACK_CHARS])
    ]
    return frames[::-1]


def parse_profiler_function(name: str) -> Frame | None:
    """Parse the name that torch.profiler gives a Python function, ``file(line): function``; None for other names."""
    match = _PROFILER_FUNCTION.fullmatch(name)
    return Frame(match[1], int(match[2]), match[3]) if match else None


def is_stack_machinery(frame: Frame) -> bool:
    """Return whether a frame belongs to the stack unwinder or to CPython's interpreter loop."""
    return bool(_MACHINERY_FUNCTION.search(frame.function) or _MACHINERY_FILE.search(frame.file))


def dispatched_operator(frames: Iterable[Frame]) -> str:
    """Return the operator that the C++ frames of a call stack show, such as ``aten::linear``; "" if they show none.

    It is the outermost dispatched operator below the innermost Python frame or node of the autograd graph.

    Args:
        frames: a call stack, innermost frame first.
    """
    operator = ""
    for frame in frames:
        if frame.file.endswith(".py") or "torch::autograd::Node::operator()" in frame.function:
            break
        match = DISPATCHED_OPERATOR.match(frame.function)
        if match:
            operator = f"aten::{match[1]}"
    return operator


def normalize_path(file: str) -> str:
    """Return the path of a source file with forward slashes."""
    return file.replace("\\", "/")


# -- what a frame reveals about the training step -------------------------------------------------------------------


def is_optimizer_frame(frame: Frame) -> bool:
    """Return whether a frame is code of an optimizer of ``torch.optim`` (learning-rate schedulers are not)."""
    file = normalize_path(frame.file)
    return _OPTIMIZER_FOLDER in file and not file.endswith(_NOT_OPTIMIZERS)


def is_optimizer_base_frame(frame: Frame) -> bool:
    """Return whether a frame is code of ``torch.optim.Optimizer`` itself, which wraps the step of every optimizer."""
    return normalize_path(frame.file).endswith(_OPTIMIZER_BASE_CLASS)


class PhaseHint(Enum):
    """What one frame reveals about the phase of training that its call stack belongs to."""

    NONE = auto()
    MODULE_CALL = auto()
    BACKWARD = auto()
    OPTIMIZER_STEP = auto()
    RECOMPUTE = auto()
    FUNCTION_APPLY = auto()
    """``apply`` of a Python autograd Function, which runs the forward pass and the backward pass. As the outermost
    frame of a stack it is the backward pass, in a thread of autograd."""


def phase_hint(frame: Frame) -> PhaseHint:
    """Return what a frame reveals about the phase: the rules name functions of PyTorch that only one phase calls."""
    if "torch::autograd::Engine::" in frame.function:
        return PhaseHint.BACKWARD
    file, function = normalize_path(frame.file), _unqualified(frame.function)
    if "torch/" not in file:
        return PhaseHint.NONE
    if file.endswith("torch/utils/checkpoint.py"):
        return PhaseHint.RECOMPUTE if function in ("unpack_hook", "recompute_fn", "backward") else PhaseHint.NONE
    if file.endswith("torch/nn/modules/module.py"):
        return PhaseHint.MODULE_CALL if function in ("_call_impl", "_wrapped_call_impl") else PhaseHint.NONE
    if file.endswith(("torch/_tensor.py", "torch/autograd/__init__.py", "torch/autograd/graph.py")):
        return PhaseHint.BACKWARD if function in ("backward", "grad", "_engine_run_backward") else PhaseHint.NONE
    if file.endswith("torch/autograd/function.py"):
        return PhaseHint.FUNCTION_APPLY if function == "apply" else PhaseHint.NONE
    if is_optimizer_frame(frame) and function in ("step", "wrapper"):
        return PhaseHint.OPTIMIZER_STEP
    return PhaseHint.NONE


def _unqualified(function: str) -> str:
    """Return the last part of a Python function's name: recordings hold ``Module._call_impl``, files ``_call_impl``."""
    return function.rpartition(".")[2]


def stack_phase(hints: Sequence[PhaseHint]) -> tuple[int, bool]:
    """Return the phase of a call stack and whether it is a recomputation (activation checkpointing).

    The innermost hint wins, because the closure of an optimizer runs a forward and a backward pass; but a module that
    a backward pass calls belongs to the backward pass.

    Args:
        hints: the hints of all frames of the stack, innermost first.

    Returns:
        An index into ``PHASES`` (-1 where the phase is unknown), and True for a recomputation.
    """
    if PhaseHint.RECOMPUTE in hints:
        return BACKWARD, True
    if hints and hints[-1] is PhaseHint.FUNCTION_APPLY:
        return BACKWARD, False
    decisive = [hint for hint in hints if hint not in (PhaseHint.NONE, PhaseHint.FUNCTION_APPLY)]
    if not decisive:
        return -1, False
    if decisive[0] is PhaseHint.OPTIMIZER_STEP:
        return OPTIMIZER, False
    callers = [hint for hint in decisive if hint is not PhaseHint.MODULE_CALL]
    return (BACKWARD if callers and callers[0] is PhaseHint.BACKWARD else FORWARD), False


def category_hint(frame: Frame) -> str:
    """Return the category of what a function of PyTorch allocates, if it allocates for one purpose only.

    Returns:
        One of ``CATEGORIES``; "none" if the hints of its callers must be ignored; "" for every other function.
    """
    if "AccumulateGrad::accumulateGrad" in frame.function:
        return "gradient"
    function = _unqualified(frame.function)
    if is_optimizer_frame(frame):
        return "optimizer_state" if function == "_init_group" else ""
    file = normalize_path(frame.file)
    if "torch/nn/modules/" not in file:
        return ""
    if file.endswith("torch/nn/modules/module.py"):
        # Module.to, Module.cuda and Module.to_empty move parameters and buffers.
        if function in ("convert", "_apply", "to_empty"):
            return "parameter"
        return "none" if function == "_call_impl" else ""
    if function == "__init__":
        return "parameter"
    return "none" if function in ("reset_parameters", "forward") else ""
