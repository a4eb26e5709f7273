"""The hooks that a recording installs in torch: module calls, backward, optimizer steps, pipeline stages.

All of them are removed when the recording ends.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch.optim import optimizer as optimizer_hooks

from memtrace.format.schema import NAME_KINDS, SPAN_KINDS
from memtrace.recording.labels import Labeller
from memtrace.recording.observers import Observer
from memtrace.recording.pipelining import watch_pipelining

_RANGE: Final = SPAN_KINDS.index("range")
_RANGE_NAME: Final = NAME_KINDS.index("range")


def install_hooks(
    observer: Observer,
    labeller: Labeller,
    optimizer_stepped: Callable[[torch.optim.Optimizer], None],
    undo: ExitStack,
) -> None:
    """Install all hooks; closing ``undo`` removes them.

    Args:
        observer: is notified of module calls, backward passes and garbage collections.
        labeller: labels the tensors of modules and optimizers.
        optimizer_stepped: called after every optimizer step.
        undo: receives what removes the hooks.
    """
    _watch_modules(observer, labeller, undo)
    _watch_backward(observer, undo)
    flush_collections = _watch_collections(observer, undo)

    def after_step(optimizer: torch.optim.Optimizer) -> None:
        flush_collections()
        optimizer_stepped(optimizer)

    _watch_optimizers(labeller, after_step, undo)
    watch_pipelining(observer, undo)


def _watch_modules(observer: Observer, labeller: Labeller, undo: ExitStack) -> None:
    """Wrap ``Module.__call__``. torch's global forward hooks would make every module call several times slower."""
    original = torch.nn.Module.__call__
    push, pop, name_module, known = (
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
            name = name_module(self)
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
        started_ns = observer.begin_backward()
        try:
            return original(*args, **kwargs)
        finally:
            observer.end_backward(started_ns)

    # torch.compiler's own tracing patches the function in the same two modules.
    modules: tuple[Any, ...] = (torch.autograd.graph, torch.autograd)
    for module in modules:
        module._engine_run_backward = run_backward

    def restore() -> None:
        for module in modules:
            if module._engine_run_backward is run_backward:
                module._engine_run_backward = original

    undo.callback(restore)


def _watch_collections(observer: Observer, undo: ExitStack) -> Callable[[], None]:
    """Record garbage collections that freed objects: reference cycles kept those objects' memory alive.

    A collection can start anywhere, also inside the observer, so its span is recorded later, by the returned function.
    """
    now, started_ns = observer.now, [0]
    collections: list[tuple[int, int]] = []
    name = observer.name_id(_RANGE_NAME, "gc")

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            started_ns[0] = now()
        elif info.get("collected"):
            collections.append((started_ns[0], now()))

    def flush() -> None:
        while collections:
            observer.span(_RANGE, name, *collections.pop(), -1)

    gc.callbacks.append(on_collection)
    undo.callback(flush)
    undo.callback(gc.callbacks.remove, on_collection)
    return flush


def _watch_optimizers(labeller: Labeller, after_step: Callable[[torch.optim.Optimizer], None], undo: ExitStack) -> None:
    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            labeller.before_optimizer_step(optimizer)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            labeller.after_optimizer_step(optimizer)
            after_step(optimizer)

    undo.callback(optimizer_hooks.register_optimizer_step_pre_hook(before).remove)
    undo.callback(optimizer_hooks.register_optimizer_step_post_hook(after).remove)
