"""Sites: a stack told by the user's own innermost line."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path

import numpy as np

from memtrace.format.arrays import Array
from memtrace.trace import Frame, Trace

_INSIDE = ("/site-packages/", "/dist-packages/", "<frozen ", "<string>", "<eval_with_key>")
# Frames of C++, as a CUDA snapshot with all stacks has them: torch's own and the libraries beneath it.
_NATIVE = (".cpp", ".cc", ".c", ".cxx", ".h", ".hpp", ".cu", ".cuh", ".so", ".o")
_NODE = re.compile(r"torch::autograd::(?:generated::)?(\w+)::apply\(")
_OPERATOR = re.compile(r"at::_ops::(\w+)::")
_LIBRARY_MODULE = re.compile(r"^[a-z]:/.*/lib/(\w+)(\.py$|/)", re.IGNORECASE)
_STANDARD = (
    sysconfig.get_paths()["stdlib"],
    str(Path(__file__).parent.parent),
    str(Path(__file__).parents[2] / "cli"),
)


def is_internal(frame: Frame) -> bool:
    """Whether a frame belongs to torch, to Python's library or to memtrace, not to the user."""
    file = frame.file.replace("\\", "/")
    if any(part in file for part in _INSIDE) or file.startswith(_STANDARD) or file in ("??", ""):
        return True
    if "/lib/python3" in file or "/torch/" in file or file.startswith("torch/") or file.endswith(_NATIVE):
        return True
    windows = _LIBRARY_MODULE.match(file)
    return windows is not None and windows[1] in sys.stdlib_module_names


def own_frame(frames: list[Frame]) -> Frame | None:
    """The user's own innermost frame; the innermost of all where there is no own one; None for an empty stack."""
    return next((frame for frame in frames if not is_internal(frame)), frames[0] if frames else None)


def site(trace: Trace, stack: int) -> str | None:
    """'file:line function' of the user's own innermost line; None where there is no stack.

    Where autograd's threads ran no Python, the node of the graph stands for the line, else the outermost operator.
    """
    frames = trace.frames(stack)
    frame = own_frame(frames)
    if frame is None:
        return None
    if is_internal(frame):
        node = next((match[1] for other in frames if (match := _NODE.match(other.function))), None)
        if node is not None:
            return f"{node} (autograd)"
        operators = [match[1] for other in frames if (match := _OPERATOR.match(other.function))]
        if operators:
            return f"aten::{operators[-1]} (torch)"
    parts = Path(frame.file.replace("\\", "/")).parts
    return f"{'/'.join(parts[-2:])}:{frame.line} {frame.function}"


def sites_of(trace: Trace, stacks: Array) -> tuple[list[str | None], Array]:
    """The distinct sites of some stacks (several may lead to one line), and for each stack the place of its own."""
    distinct, place = np.unique(stacks, return_inverse=True)
    texts = [site(trace, int(stack)) for stack in distinct]
    sites = list(dict.fromkeys(texts))
    number = {text: at for at, text in enumerate(sites)}
    return sites, np.array([number[text] for text in texts], np.int64)[place]
