"""Keeps torch.compile from compiling memtrace's hooks.

Within a compiled program, every Python function that runs is a candidate for compilation. Compiling a hook would cost
time, add graphs and recompilations, and warn about functions written in C++. ``torch._dynamo`` itself is not imported:
that takes seconds, and most programs do not need it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

_eval_frame: Final[Any] = torch._C._dynamo.eval_frame
_Function = TypeVar("_Function", bound=Callable[..., Any])
_SKIP_WITH_CALLEES: Final = _eval_frame._FrameExecStrategy(_eval_frame._FrameAction.SKIP, _eval_frame._FrameAction.SKIP)


def never_compiled(function: _Function) -> _Function:
    """Return ``function``. torch.compile leaves it alone from now on, with all functions that it calls."""
    code: Any = function
    _eval_frame.set_code_exec_strategy(code.__code__, _SKIP_WITH_CALLEES)
    return function
