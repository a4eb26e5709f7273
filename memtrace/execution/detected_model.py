"""Applies a plan to a program that does not mention memtrace: to the first model that has all modules of the plan."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from memtrace.errors import MemtraceError
from memtrace.execution.application import apply_actions
from memtrace.execution.target import Target
from memtrace.planning.plan import Plan

if TYPE_CHECKING:
    import torch


@contextmanager
def apply_to_detected_model(plan: Plan) -> Iterator[None]:
    """Carry out a plan on the first model that is called and has all modules of the plan, before that call.

    A warning says so where no such model was called, or why the plan cannot be applied; the program runs without the
    plan then.
    """
    from torch.nn.modules.module import register_module_forward_pre_hook

    if not plan.actions:
        yield
        return
    seen: set[int] = set()  # only addresses: a module that was deleted could be skipped in favour of a new one there
    with ExitStack() as applied:
        was_applied = False

        def apply_before_first_call(module: torch.nn.Module, arguments: Any) -> None:
            nonlocal was_applied
            if was_applied or id(module) in seen:
                return
            seen.add(id(module))
            try:
                target = Target(module, tuple(_find_optimizers(module)))
                if not target.has_modules(plan.module_names()):
                    return
                was_applied = True
                hook.remove()
                applied.enter_context(apply_actions(plan.actions, target))
            except MemtraceError as error:
                was_applied = True
                warnings.warn(f"memtrace: the plan was not applied: {error}", stacklevel=1)

        hook = register_module_forward_pre_hook(apply_before_first_call)
        try:
            yield
        finally:
            hook.remove()
            if not was_applied:
                warnings.warn("memtrace: the plan was not applied: no model with its modules was called.", stacklevel=1)


def _find_optimizers(model: torch.nn.Module) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers that update parameters of a model."""
    import torch

    from memtrace.recording.plain_access import module_members, walk_modules

    parameters = {id(value) for _, module in walk_modules(model) for _, value in module_members(module, "_parameters")}
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.optim.Optimizer) and any(
            id(parameter) in parameters for group in candidate.param_groups for parameter in group["params"]
        ):
            yield candidate
