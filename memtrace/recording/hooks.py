"""The hooks that a recording installs in torch: module calls, backward, optimizer steps, pipeline stages.

All of them are removed when the recording ends. None of them can fail the program (``HookErrors``), and none runs code
of the program's objects (``plain_access``).
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import optimizer as optimizer_hooks

from memtrace.recording.instrument import InstrumentError, instrument
from memtrace.recording.labels import Labeller
from memtrace.recording.observers import ModuleCalls, Observer
from memtrace.recording.pipelining import watch_pipelining
from memtrace.recording.untraced import never_compiled


def install_hooks(observer: Observer, labeller: Labeller, undo: ExitStack) -> None:
    """Install all hooks but those of optimizers; closing ``undo`` removes them.

    Args:
        observer: is notified of module calls, backward passes and garbage collections.
        labeller: labels the tensors of modules.
        undo: receives what removes the hooks.
    """
    errors = labeller.errors
    for watch in (_watch_modules, _watch_backward, _watch_functional_calls):
        _install(watch, observer, labeller, undo)
    _watch_collections(observer, undo)
    watch_pipelining(observer, errors, undo)


def _install(
    watch: Callable[[Observer, Labeller, ExitStack], None], observer: Observer, labeller: Labeller, undo: ExitStack
) -> None:
    try:
        watch(observer, labeller, undo)
    except InstrumentError as error:
        labeller.errors.report(f"names, labels and phases are incomplete: {error}")


def _watch_modules(observer: Observer, labeller: Labeller, undo: ExitStack) -> None:
    """Watch module calls and new modules. torch's global forward hooks would make calls several times slower."""
    errors = labeller.errors
    add_module = errors.protect(labeller.modules.add)
    name_module, label_inputs = errors.protect(labeller.name_module), errors.protect(labeller.label_inputs)
    enter = observer.module_hook(ModuleCalls(labeller.known_modules, name_module, label_inputs, errors.caught))

    def created(_: int, module: torch.nn.Module, __: object) -> None:
        add_module(module)

    call: Any = torch.nn.Module._wrapped_call_impl
    instrument(call, undo, arguments=("self", "args", "kwargs"), enter=enter, leave=observer.pop_module)
    instrument(torch.nn.Module.__init__, undo, result_arguments=("self",), result=created)
    # Copies and unpickled modules have no other beginning.
    instrument(torch.nn.Module.__setstate__, undo, result_arguments=("self",), result=created)


def _watch_backward(observer: Observer, labeller: Labeller, undo: ExitStack) -> None:
    label_gradients = labeller.errors.protect(labeller.label_computed_gradients)

    def computed(_: int, args: tuple[Any, ...], kwargs: dict[str, Any], gradients: object) -> None:
        # _engine_run_backward(outputs, gradients, keep_graph, create_graph, inputs, ..., accumulate_grad=...)
        if kwargs.get("accumulate_grad") is False:
            label_gradients(args[3] if len(args) > 3 else kwargs.get("inputs"), gradients)

    instrument(
        torch.autograd.graph._engine_run_backward,
        undo,
        enter=observer.begin_backward,
        result=computed,
        result_arguments=("args", "kwargs"),
        leave=observer.end_backward,
    )


def _watch_functional_calls(observer: Observer, labeller: Labeller, undo: ExitStack) -> None:
    """Watch ``torch.func.functional_call``, which names the parameters that a program keeps outside its modules."""
    label = labeller.errors.protect(labeller.label_functional_parameters)

    def enter(module: torch.nn.Module, parameters: object) -> int:
        label(module, parameters)
        return -1

    observer.hide_frames_of(enter.__code__)
    arguments = ("module", "parameters_and_buffers")
    instrument(torch.nn.utils.stateless._functional_call, undo, arguments=arguments, enter=enter)


def _watch_collections(observer: Observer, undo: ExitStack) -> None:
    """Record garbage collections that freed objects: reference cycles kept those objects' memory alive."""
    callback = observer.collected

    def remove() -> None:
        # By identity: comparing for equality would run code of the program's callbacks.
        gc.callbacks[:] = [other for other in gc.callbacks if other is not callback]

    gc.callbacks.append(callback)
    undo.callback(remove)


def watch_optimizers(
    labeller: Labeller,
    stepped: Callable[[torch.optim.Optimizer], None],
    is_paused: Callable[[], bool],
    undo: ExitStack,
) -> None:
    """Count the steps of optimizers, and label their tensors; closing ``undo`` ends it.

    Args:
        labeller: labels the parameters, gradients and state of optimizers.
        stepped: called after every optimizer step.
        is_paused: whether nothing is observed at the moment, so that steps are only counted.
        undo: receives what removes the hooks.
    """
    after_step = labeller.errors.protect(stepped)
    label_before = labeller.errors.protect(labeller.before_optimizer_step)
    label_after = labeller.errors.protect(labeller.after_optimizer_step)

    @never_compiled
    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling() and not is_paused():
            label_before(optimizer)

    @never_compiled
    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            if not is_paused():
                label_after(optimizer)
            after_step(optimizer)

    undo.callback(optimizer_hooks.register_optimizer_step_pre_hook(before).remove)
    undo.callback(optimizer_hooks.register_optimizer_step_post_hook(after).remove)
