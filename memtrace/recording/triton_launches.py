"""Records the Triton kernels that the program launches itself: ``kernel[grid](...)``.

Which arguments a kernel reads and writes is found in its source (``kernel_sources``).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

from memtrace.format.schema import NAME_KINDS
from memtrace.recording.imports import after_import
from memtrace.recording.kernel_sources import READS, WRITES, parameter_accesses
from memtrace.recording.observers import Observer
from memtrace.recording.plain_access import is_tensor
from memtrace.recording.untraced import never_compiled

_OPERATOR: Final = NAME_KINDS.index("operator")


def watch_triton_launches(observer: Observer, report: Callable[[str], None], undo: ExitStack) -> None:
    """Record all launches until ``undo`` is closed.

    Args:
        observer: records the kernels.
        report: receives why launches are not recorded.
        undo: receives what ends the recording of launches.
    """

    def watch(jit: Any) -> None:
        try:
            _exchange_run(jit.JITFunction, _Launches(observer, jit.JITFunction.run), report, undo)
        except Exception as error:
            report(f"Triton kernels cannot be observed ({type(error).__name__}: {error})")

    after_import("triton.runtime.jit", watch, undo)


def _exchange_run(kernel_class: Any, launches: _Launches, report: Callable[[str], None], undo: ExitStack) -> None:
    original = kernel_class.__dict__["run"]

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launch = original
        if not kwargs.get("warmup"):  # which only compiles
            try:
                launch = launches.find(kernel, args, kwargs)
            except Exception as error:
                report(f"a launch of a Triton kernel ({type(error).__name__}: {error})")
        return launch(kernel, *args, **kwargs)

    never_compiled(run)
    observer_code = run.__code__
    launches.hide(observer_code)
    kernel_class.run = run

    def restore() -> None:
        if kernel_class.__dict__.get("run") is run:
            kernel_class.run = original

    undo.callback(restore)


class _Launches:
    """The observed kernels, by kernel and by the arguments that are tensors.

    Args:
        observer: makes them.
        run: launches a kernel: ``JITFunction.run``.
    """

    def __init__(self, observer: Observer, run: Callable[..., Any]) -> None:
        self._observer = observer
        self._run = run
        self._accesses: dict[int, tuple[Any, dict[str, int] | None]] = {}  # by id; the kernel is kept alive
        self._observed: dict[tuple[int, tuple[str, ...]], Callable[..., Any]] = {}
        self.hide = observer.hide_frames_of

    def find(self, kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
        """The function that launches ``kernel`` and records it."""
        names = [*kernel.arg_names[: len(args)], *kwargs]
        tensors = tuple(name for name, value in zip(names, (*args, *kwargs.values()), strict=False) if is_tensor(value))
        key = (id(kernel), tensors)
        if key not in self._observed:
            if id(kernel) not in self._accesses:
                self._accesses[id(kernel)] = kernel, source_accesses(kernel.fn)
            by_parameter = self._accesses[id(kernel)][1]
            unknown = READS | WRITES
            accesses = bytes(unknown if by_parameter is None else by_parameter.get(name, unknown) for name in tensors)
            name_id = self._observer.name_id(_OPERATOR, f"triton::{kernel.fn.__name__}")
            self._observed[key] = self._observer.observed_kernel(self._run, None, name_id, accesses)
        return self._observed[key]


def source_accesses(function: Callable[..., Any]) -> dict[str, int] | None:
    """Return the accesses of the parameters of a Triton kernel; None where its source is missing."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, ValueError, TypeError, RecursionError):
        return None
    definition = tree.body[0] if tree.body else None
    return parameter_accesses(definition) if isinstance(definition, ast.FunctionDef) else None
