"""Marks what a rank of a pipeline is at: the actions of a schedule, as spans of kind ``action``.

The stages of torch.distributed.pipelining are marked by themselves. Their own ranges ("Forward 3") do not say which
stage they are of, and 1F1B has none, so the methods that every schedule calls are wrapped instead. A step of a schedule
is a range with the name of its class.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, Literal

from memtrace.errors import MemtraceError
from memtrace.format.schema import NAME_KINDS, SPAN_KINDS
from memtrace.recording.observers import Observer

Direction = Literal["forward", "backward", "input_backward", "weight_backward"]
LETTERS: Final = {"forward": "F", "backward": "B", "input_backward": "I", "weight_backward": "W"}
"""The letters of ``memtrace.format.schema.SPAN_KINDS``' actions."""
_STAGE_MODULE: Final = "torch.distributed.pipelining.stage"
_SCHEDULE_MODULE: Final = "torch.distributed.pipelining.schedules"
TORCH_RANGE: Final = "torch.distributed.pipelining."
_ACTION: Final = SPAN_KINDS.index("action")
_RANGE: Final = SPAN_KINDS.index("range")
_RANGE_NAME: Final = NAME_KINDS.index("range")


def action_text(direction: Direction, stage: int, microbatch: int, pipeline: int = 0) -> str:
    """The name of an action, as ``memtrace.pipeline.schedules.actions`` reads it: F0.3, B2.5@1."""
    if direction not in LETTERS:
        raise MemtraceError(f"direction={direction!r} is none of {', '.join(LETTERS)}")
    return f"{LETTERS[direction]}{stage}.{microbatch}{f'@{pipeline}' if pipeline else ''}"


@contextmanager
def mark_action(observer: Observer, text: str) -> Iterator[None]:
    """What runs inside is the action ``text``."""
    name, started = observer.name_id(_RANGE_NAME, text), observer.now()
    try:
        yield
    finally:
        observer.span(_ACTION, name, started, observer.now(), -1)


def watch_pipelining(observer: Observer, undo: ExitStack) -> None:
    """Mark the actions of torch's stages from now on, also where the program imports them later."""
    patches: dict[str, Callable[[ModuleType], None]] = {
        _STAGE_MODULE: lambda module: _wrap_stage(module, observer, undo),
        _SCHEDULE_MODULE: lambda module: _wrap_schedules(module, observer, undo),
    }
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
        else:
            finder = _WhenImported(name, patch)
            sys.meta_path.insert(0, finder)
            undo.callback(finder.forget)


def _wrap_stage(module: ModuleType, observer: Observer, undo: ExitStack) -> None:
    base = module._PipelineStageBase

    def wrap(method: str, direction: Callable[[dict[str, Any], Sequence[Any]], Direction]) -> None:
        original = getattr(base, method)

        @functools.wraps(original)
        def marked(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            with mark_action(observer, action_text(direction(kwargs, args), self.stage_index, chunk)):
                return original(self, chunk, *args, **kwargs)

        _replace(base, method, marked, undo)

    def backward(kwargs: dict[str, Any], args: Sequence[Any]) -> Direction:
        # backward_one_chunk(chunk, loss=None, full_backward=True, last_backward=False)
        full = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
        return "backward" if full else "input_backward"

    wrap("forward_one_chunk", lambda kwargs, args: "forward")
    wrap("backward_one_chunk", backward)
    wrap("backward_weight_one_chunk", lambda kwargs, args: "weight_backward")


def _wrap_schedules(module: ModuleType, observer: Observer, undo: ExitStack) -> None:
    _wrap_loss(module, observer, undo)
    for base in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
        _wrap_step(base, observer, undo)


def _wrap_step(base: type, observer: Observer, undo: ExitStack) -> None:
    original = base.__dict__["step"]

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        name, started = observer.name_id(_RANGE_NAME, f"{TORCH_RANGE}{type(self).__name__}"), observer.now()
        try:
            return original(self, *args, **kwargs)
        finally:
            observer.span(_RANGE, name, started, observer.now(), -1)

    _replace(base, "step", step, undo)


def _wrap_loss(module: ModuleType, observer: Observer, undo: ExitStack) -> None:
    """The loss of a micro-batch is part of its last stage's forward, but computed after it."""
    base = module._PipelineSchedule
    original = base._maybe_compute_loss

    @functools.wraps(original)
    def marked(self: Any, stage: Any, output: Any, target_mbs: Any, mb_index: int, *args: Any, **kwargs: Any) -> Any:
        if not stage.is_last:
            return original(self, stage, output, target_mbs, mb_index, *args, **kwargs)
        with mark_action(observer, action_text("forward", stage.stage_index, mb_index)):
            return original(self, stage, output, target_mbs, mb_index, *args, **kwargs)

    _replace(base, "_maybe_compute_loss", marked, undo)


def _replace(owner: type, name: str, replacement: Any, undo: ExitStack) -> None:
    original = owner.__dict__[name]
    setattr(owner, name, replacement)

    def restore() -> None:
        if owner.__dict__[name] is replacement:
            setattr(owner, name, original)

    undo.callback(restore)


class _WhenImported(importlib.abc.MetaPathFinder):
    """Calls ``then`` with a module as soon as it has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """The spec that the others find, with a loader that tells us."""
        if fullname != self._name:
            return None
        self.forget()
        spec = importlib.util.find_spec(fullname)
        return self._telling(spec) if spec is not None and spec.loader is not None else spec

    def forget(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _telling(self, spec: ModuleSpec) -> ModuleSpec:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        loader.exec_module = exec_module
        return spec
