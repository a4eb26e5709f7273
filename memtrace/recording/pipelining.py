"""Records the actions of pipeline schedules as spans of kind ``action``.

The stages of torch.distributed.pipelining are marked automatically. Their profiler ranges ("Forward 3") do not name the
stage, and 1F1B has no ranges, so the methods that all schedules call are wrapped. A step of a schedule is a range with
the name of the schedule's class.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final, Literal

from memtrace.errors import MemtraceError
from memtrace.format.schema import NAME_KINDS, SPAN_KINDS
from memtrace.recording.hook_errors import HookErrors
from memtrace.recording.observers import Observer
from memtrace.recording.plain_access import type_name

Direction = Literal["forward", "backward", "input_backward", "weight_backward"]
ACTION_LETTERS: Final = {"forward": "F", "backward": "B", "input_backward": "I", "weight_backward": "W"}
"""The letter of each direction in the notation of actions; see ``memtrace.format.schema.SPAN_KINDS``."""
_STAGE_MODULE: Final = "torch.distributed.pipelining.stage"
_SCHEDULE_MODULE: Final = "torch.distributed.pipelining.schedules"
TORCH_RANGE: Final = "torch.distributed.pipelining."
"""Prefix of the names of ranges that stand for one step of a torch schedule."""
_ACTION: Final = SPAN_KINDS.index("action")
_RANGE: Final = SPAN_KINDS.index("range")
_RANGE_NAME: Final = NAME_KINDS.index("range")


@dataclass
class PipelinePosition:
    """Where in a hand-written pipeline the program currently is."""

    stage: tuple[int, int] | None = None
    """Numbers of the stage and of the pipeline; None outside ``Recording.stage``."""
    is_in_microbatch: bool = False
    """Whether the program is inside ``Recording.microbatch``."""


def action_text(direction: Direction, stage: int, microbatch: int, pipeline: int = 0) -> str:
    """An action in the notation that ``memtrace.pipeline.schedules.actions`` parses, such as F0.3 or B2.5@1.

    Raises:
        MemtraceError: the direction is unknown.
    """
    if direction not in ACTION_LETTERS:
        raise MemtraceError(f"direction={direction!r} is unknown; pass one of {', '.join(ACTION_LETTERS)}")
    return f"{ACTION_LETTERS[direction]}{stage}.{microbatch}{f'@{pipeline}' if pipeline else ''}"


@contextmanager
def mark_action(observer: Observer, text: str) -> Iterator[None]:
    """Record what runs inside the ``with`` block as the action ``text``."""
    name, started_ns = observer.name_id(_RANGE_NAME, text), observer.now()
    try:
        yield
    finally:
        observer.span(_ACTION, name, started_ns, observer.now(), -1)


class _Marks:
    """Marks what torch's pipelining runs. Errors in a mark do not reach the program."""

    def __init__(self, observer: Observer, errors: HookErrors) -> None:
        self._observer = observer
        self._errors = errors

    @contextmanager
    def span(self, kind: int, text: Callable[[], str]) -> Iterator[None]:
        """Record what runs inside the ``with`` block as a span with the name that ``text`` returns."""
        observer, name, started_ns = self._observer, -1, -1
        try:
            name, started_ns = observer.name_id(_RANGE_NAME, text()), observer.now()
        except Exception as error:
            self._errors.caught(error)
        try:
            yield
        finally:
            if name >= 0:
                observer.span(kind, name, started_ns, observer.now(), -1)


def watch_pipelining(observer: Observer, errors: HookErrors, undo: ExitStack) -> None:
    """Mark the actions of torch's pipeline stages, even if the program imports them later."""
    marks = _Marks(observer, errors)
    patches: dict[str, Callable[[ModuleType], None]] = {
        _STAGE_MODULE: errors.protect(lambda module: _wrap_stage(module, marks, undo)),
        _SCHEDULE_MODULE: errors.protect(lambda module: _wrap_schedules(module, marks, undo)),
    }
    for name, patch in patches.items():
        if name in sys.modules:
            patch(sys.modules[name])
        else:
            watcher = _ImportWatcher(name, patch)
            sys.meta_path.insert(0, watcher)
            undo.callback(watcher.remove)


def _wrap_stage(module: ModuleType, marks: _Marks, undo: ExitStack) -> None:
    base = module._PipelineStageBase

    def wrap(method: str, direction: Callable[[dict[str, Any], Sequence[Any]], Direction]) -> None:
        original = getattr(base, method)

        @functools.wraps(original)
        def marked(self: Any, chunk: int, *args: Any, **kwargs: Any) -> Any:
            with marks.span(_ACTION, lambda: action_text(direction(kwargs, args), self.stage_index, chunk)):
                return original(self, chunk, *args, **kwargs)

        _replace(base, method, marked, undo)

    def backward(kwargs: dict[str, Any], args: Sequence[Any]) -> Direction:
        # backward_one_chunk(chunk, loss=None, full_backward=True, last_backward=False)
        full = kwargs.get("full_backward", args[1] if len(args) > 1 else True)
        return "backward" if full else "input_backward"

    wrap("forward_one_chunk", lambda kwargs, args: "forward")
    wrap("backward_one_chunk", backward)
    wrap("backward_weight_one_chunk", lambda kwargs, args: "weight_backward")


def _wrap_schedules(module: ModuleType, marks: _Marks, undo: ExitStack) -> None:
    _wrap_loss(module, marks, undo)
    for base in (module.PipelineScheduleSingle, module.PipelineScheduleMulti):
        _wrap_step(base, marks, undo)


def _wrap_step(base: type, marks: _Marks, undo: ExitStack) -> None:
    original = base.__dict__["step"]

    @functools.wraps(original)
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        with marks.span(_RANGE, lambda: f"{TORCH_RANGE}{type_name(self)}"):
            return original(self, *args, **kwargs)

    _replace(base, "step", step, undo)


def _wrap_loss(module: ModuleType, marks: _Marks, undo: ExitStack) -> None:
    """Mark the loss of a micro-batch, which is computed after the last stage's forward, as part of that forward."""
    base = module._PipelineSchedule
    original = base._maybe_compute_loss

    @functools.wraps(original)
    def marked(self: Any, stage: Any, output: Any, target_mbs: Any, mb_index: int, *args: Any, **kwargs: Any) -> Any:
        if not stage.is_last:
            return original(self, stage, output, target_mbs, mb_index, *args, **kwargs)
        with marks.span(_ACTION, lambda: action_text("forward", stage.stage_index, mb_index)):
            return original(self, stage, output, target_mbs, mb_index, *args, **kwargs)

    _replace(base, "_maybe_compute_loss", marked, undo)


def _replace(owner: type, name: str, replacement: Any, undo: ExitStack) -> None:
    original = owner.__dict__[name]
    setattr(owner, name, replacement)

    def restore() -> None:
        if owner.__dict__[name] is replacement:
            setattr(owner, name, original)

    undo.callback(restore)


class _ImportWatcher(importlib.abc.MetaPathFinder):
    """Calls ``on_import`` with the module ``name`` as soon as the program has imported it."""

    def __init__(self, name: str, on_import: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._on_import = on_import

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """The module's usual spec, with a loader that calls ``on_import``."""
        if fullname != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        return self._wrap_loader(spec) if spec is not None and spec.loader is not None else spec

    def remove(self) -> None:
        """Stop watching imports."""
        # By identity: comparing for equality would run code of the program's finders.
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def _wrap_loader(self, spec: ModuleSpec) -> ModuleSpec:
        loader: Any = spec.loader
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            original(module)
            self._on_import(module)

        loader.exec_module = exec_module
        return spec
