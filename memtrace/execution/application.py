"""``memtrace.apply``: a context manager that carries out a plan around the user's training loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from memtrace.errors import MemtraceError
from memtrace.execution.target import Target
from memtrace.planning.plan import Plan, PlanAction, read_plan

if TYPE_CHECKING:
    import torch

_APPLIERS: Final[dict[str, str]] = {
    "offload": "memtrace.execution.offload",
    "recompute": "memtrace.execution.recompute",
    "spill": "memtrace.execution.spill",
}
"""For each kind of action the module that carries it out, with a function
``apply_action(action, target: Target) -> AbstractContextManager``."""


@contextmanager
def apply(
    plan: Plan | str | os.PathLike[str],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
) -> Iterator[None]:
    """Carry out a plan while the ``with`` block runs; afterwards the model is as it was.

        with memtrace.apply("plan.json", model, optimizer):
            train(model, optimizer)

    Losses and gradients are those of the program without the plan, bit by bit, where its operators are deterministic.

    Args:
        plan: The plan, or the path of its file.
        model: The model that the plan was made for.
        optimizer: The optimizer, or several. Needed where the plan moves parameters (spill).

    Raises:
        MemtraceError: The plan cannot be read, or names something that the model does not have. The model has not been
            changed then.
    """
    actions = (plan if isinstance(plan, Plan) else read_plan(os.fspath(plan))).actions
    with apply_actions(actions, Target(model, _optimizer_tuple(optimizer))):
        yield


@contextmanager
def apply_actions(actions: Iterable[PlanAction], target: Target) -> Iterator[None]:
    """Carry out actions while the ``with`` block runs; errors as in `apply`."""
    contexts = [_applier(action)(action, target) for action in actions]
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _optimizer_tuple(
    optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer],
) -> tuple[torch.optim.Optimizer, ...]:
    import torch

    return (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)


def _applier(action: PlanAction) -> Callable[[Any, Target], AbstractContextManager[None]]:
    if action.kind not in _APPLIERS:
        raise MemtraceError(f"{action.describe()} memtrace cannot carry this out in a running program.")
    found: Callable[[Any, Target], AbstractContextManager[None]] = import_module(_APPLIERS[action.kind]).apply_action
    return found
