"""The hooks a recording puts into torch: module calls, the autograd engine's entry, optimizer steps, pipeline stages.

All are undone.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import optimizer as optimizer_hooks

from memtrace.format.schema import NAME_KINDS, SPAN_KINDS
from memtrace.recording.labels import Labeller
from memtrace.recording.observers import Observer
from memtrace.recording.pipelining import watch_pipelining


def install(observer: Observer, labeller: Labeller, stepped: Callable[[torch.optim.Optimizer], None]) -> ExitStack:
    """Put the hooks in; closing the stack takes them out. ``stepped`` is told of every optimizer step's end."""
    undo = ExitStack()
    try:
        _watch_modules(observer, labeller, undo)
        _watch_backward(observer, undo)
        flush = _watch_collections(observer, undo)

        def after_step(optimizer: torch.optim.Optimizer) -> None:
            flush()
            stepped(optimizer)

        _watch_optimizers(labeller, after_step, undo)
        watch_pipelining(observer, undo)
    except BaseException:
        undo.close()
        raise
    return undo


def _watch_modules(observer: Observer, labeller: Labeller, undo: ExitStack) -> None:
    """Wrap ``Module.__call__``: torch's global forward hooks would cost every module call several times more."""
    original = torch.nn.Module.__call__
    push, pop, name_of, known = (
        observer.push_module,
        observer.pop_module,
        labeller.module_name,
        labeller.known_modules,
    )
    is_compiling = torch.compiler.is_compiling

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        name = known.get(id(self))
        if name is None:
            name = name_of(self)
        if push(name) == 1 and torch.is_grad_enabled():
            labeller.label_inputs((args, kwargs))
        try:
            return original(self, *args, **kwargs)
        finally:
            pop(name)

    def restore() -> None:
        if torch.nn.Module.__call__ is call:
            torch.nn.Module.__call__ = original  # type: ignore[method-assign]

    functools.update_wrapper(call, original)
    observer.hide_frames_of(call.__code__)
    torch.nn.Module.__call__ = call  # type: ignore[method-assign]
    undo.callback(restore)


def _watch_backward(observer: Observer, undo: ExitStack) -> None:
    original = torch.autograd.graph._engine_run_backward

    @functools.wraps(original)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*args, **kwargs)
        started = observer.begin_backward()
        try:
            return original(*args, **kwargs)
        finally:
            observer.end_backward(started)

    # torch.compiler's own tracing patches the function in the same two places.
    places: tuple[Any, ...] = (torch.autograd.graph, torch.autograd)
    for place in places:
        place._engine_run_backward = run_backward

    def restore() -> None:
        for place in places:
            if place._engine_run_backward is run_backward:
                place._engine_run_backward = original

    undo.callback(restore)


def _watch_collections(observer: Observer, undo: ExitStack) -> Callable[[], None]:
    """Note the garbage collections that freed something: what they free, reference cycles held.

    A collection can begin anywhere, inside the observer as well: its span is written later, by the returned function.
    """
    now, started = observer.now, [0]
    ended: list[tuple[int, int]] = []
    name = observer.name_id(NAME_KINDS.index("range"), "gc")

    def collects(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            started[0] = now()
        elif info.get("collected"):
            ended.append((started[0], now()))

    def flush() -> None:
        while ended:
            observer.span(SPAN_KINDS.index("range"), name, *ended.pop(), -1)

    gc.callbacks.append(collects)
    undo.callback(flush)
    undo.callback(gc.callbacks.remove, collects)
    return flush


def _watch_optimizers(labeller: Labeller, stepped: Callable[[torch.optim.Optimizer], None], undo: ExitStack) -> None:
    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            labeller.before_optimizer_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            labeller.after_optimizer_step(optimizer)
            stepped(optimizer)

    undo.callback(optimizer_hooks.register_optimizer_step_pre_hook(before).remove)
    undo.callback(optimizer_hooks.register_optimizer_step_post_hook(after).remove)
