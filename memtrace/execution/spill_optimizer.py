"""Optimizer steps of a spilled model: shard by shard, with the optimizer state of one shard on the device."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from memtrace.errors import MemtraceError
from memtrace.execution.moved_storage import find_storages
from memtrace.execution.spill_residency import Residency, is_movable

_PROBE_STEPS: Final = 3
_PARTS: Final = 8
"""Parts of a shard between whose updates the copies of other shards go on."""


class ShardedStep:
    """Replaces the step of an optimizer by one step for each shard.

    torch's own call then finds empty parameter groups, so that its hooks and those of the program run once.

    Args:
        optimizer: The optimizer.
        residency: Moves the shards.
        owner: The shard of each parameter, by the parameter's id.

    Raises:
        MemtraceError: The optimizer does not update every parameter by itself.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, residency: Residency, owner: Mapping[int, int]) -> None:
        self._optimizer, self._residency, self._owner = optimizer, residency, owner
        self._step = _inner_step(optimizer)
        updates = probe_optimizer(optimizer, self._step)
        if updates is None:
            raise MemtraceError(
                f"{type(optimizer).__name__} updates parameters together, so that their updates cannot be made one "
                "shard after the other. Spill works with optimizers such as SGD, Adam and AdamW."
            )
        self._writes_gradients = updates.writes_gradients
        self._handles: list[Any] = []
        self._whole: list[list[torch.Tensor]] | None = None

    def attach(self) -> None:
        """Begin to update shard by shard, and find the optimizer state that exists."""
        optimizer = self._optimizer
        self._handles = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        # Hooks of the program see whole parameter groups again.
        optimizer._optimizer_step_post_hooks.move_to_end(self._handles[1].id, last=False)  # type: ignore[attr-defined]
        for number in range(len(self._residency.shards)):
            self._collect_state(number)

    def detach(self) -> None:
        """Update as before."""
        for handle in self._handles:
            handle.remove()
        self._restore_groups()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._restore_groups()
        args, kwargs, closure = _take_closure(args, kwargs)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            kwargs["closure"] = lambda: loss
        whole = [group["params"] for group in optimizer.param_groups]
        try:
            self._update_shards(whole, args, {key: value for key, value in kwargs.items() if key != "closure"})
        finally:
            self._set_groups(whole)
        self._set_groups([[] for _ in whole])
        self._whole = whole
        return (optimizer, *args), kwargs

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._restore_groups()

    def _set_groups(self, parameters: Sequence[list[torch.Tensor]]) -> None:
        for group, members in zip(self._optimizer.param_groups, parameters, strict=True):
            group["params"] = members

    def _restore_groups(self) -> None:
        if self._whole is not None:
            self._set_groups(self._whole)
            self._whole = None

    def _update_shards(self, whole: Sequence[list[torch.Tensor]], args: Any, kwargs: dict[str, Any]) -> None:
        """Update the parameters of no shard first, then each shard that has gradients."""
        shards = self._residency.shards
        for shard in shards:
            shard.collect_gradients()
        numbers = sorted(
            {self._owner[id(p)] for group in whole for p in group if id(p) in self._owner and _has_grad(p)}
        )
        resident = [[p for p in group if id(p) not in self._owner] for group in whole]
        if any(resident):
            self._set_groups(resident)
            self._step(self._optimizer, *args, **kwargs)
        for place, number in enumerate(numbers):
            following = numbers[place + 1] if place + 1 < len(numbers) else None
            self._residency.use(number, following, updates=True)
            for moved in (*shards[number].storages, *shards[number].state):
                moved.mark_changed()
            if self._writes_gradients or getattr(self._optimizer, "grad_scale", None) is not None:
                for moved in shards[number].gradients:
                    moved.mark_changed()
            self._put_state_beside_parameters(number)
            for part in self._parts(number, whole):
                self._set_groups(part)
                self._step(self._optimizer, *args, **kwargs)
                self._residency.go_on()
            self._collect_state(number)
        self._residency.empty()

    def _parts(self, number: int, whole: Sequence[list[torch.Tensor]]) -> list[list[list[torch.Tensor]]]:
        """Return the parameters of a shard in parts to update: several while copies are under way."""
        groups = [[p for p in group if self._owner.get(id(p)) == number] for group in whole]
        if not self._residency.is_moving:
            return [groups]
        total, seen = sum(p.nbytes for group in groups for p in group if _has_grad(p)), 0
        parts: list[list[list[torch.Tensor]]] = [[[] for _ in groups] for _ in range(_PARTS)]
        for place, group in enumerate(groups):
            for parameter in filter(_has_grad, group):
                parts[seen * _PARTS // total][place].append(parameter)
                seen += parameter.nbytes
        return [part for part in parts if any(part)]

    def _put_state_beside_parameters(self, number: int) -> None:
        """Move state that ``load_state_dict`` has put elsewhere, as a parameter was in host memory then."""
        for parameter in self._residency.shards[number].parameters:
            state = self._optimizer.state.get(parameter, {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.numel() > 1 and value.device != parameter.device:
                    state[key] = value.to(parameter.device)

    def _collect_state(self, number: int) -> None:
        """Find the state that the optimizer has for a shard. Scalars such as step counts stay where they are."""
        shard = self._residency.shards[number]
        current = {
            id(value): value
            for parameter in shard.parameters
            for value in self._optimizer.state.get(parameter, {}).values()
            if isinstance(value, torch.Tensor) and value.numel() > 1 and is_movable(value)
        }
        before = shard.state_of.get(id(self._optimizer), [])
        known = [moved for moved in before if any(id(tensor) in current for tensor in moved.tensors)]
        for moved in known:
            for tensor in moved.tensors:
                current.pop(id(tensor), None)
        shard.state_of[id(self._optimizer)] = known + find_storages(current.values())


def _has_grad(parameter: torch.Tensor) -> bool:
    return parameter.grad is not None


def _take_closure(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any], Callable[[], Any] | None]:
    """Return the arguments of a step without its closure, and the closure."""
    kwargs = dict(kwargs)
    # The first argument is the optimizer.
    rest = list(args[1:])
    closure = kwargs.pop("closure", None)
    if rest and closure is None:
        closure = rest.pop(0)
    return tuple(rest), kwargs, closure


def _inner_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the step of an optimizer without the hooks around it."""
    step: Callable[..., Any] | None = getattr(type(optimizer).step, "__wrapped__", None)
    if step is None:
        raise MemtraceError(
            f"{type(optimizer).__name__} does not run the hooks of torch.optim.Optimizer, which spill needs. Make its "
            "class call Optimizer.__init__."
        )
    return step


@dataclass(frozen=True)
class IndependentUpdates:
    """What is known of an optimizer that gives the same result when it updates one parameter after the other."""

    writes_gradients: bool
    """Whether it writes gradients without counting it in their versions."""


def probe_optimizer(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> IndependentUpdates | None:
    """Return what an optimizer does; None: it updates parameters together, or fails.

    It is tried on three small parameters for each group, with the settings of the optimizer.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            together, writes_gradients = _probe(optimizer, step, one_by_one=False)
            alone, _ = _probe(optimizer, step, one_by_one=True)
    except Exception:
        return None
    return IndependentUpdates(writes_gradients) if all(map(torch.equal, together, alone)) else None


def _probe(
    optimizer: torch.optim.Optimizer, step: Callable[..., Any], *, one_by_one: bool
) -> tuple[list[torch.Tensor], bool]:
    """Return what small parameters become, and whether gradients were written without a new version."""
    generator = torch.Generator().manual_seed(0)
    probe = _copy_without_state(optimizer)
    for group, original in zip(probe.param_groups, optimizer.param_groups, strict=True):
        device = original["params"][0].device if original["params"] else torch.device("cpu")
        group["params"] = [torch.randn(4, 3, generator=generator).to(device).requires_grad_() for _ in range(3)]
    whole = [group["params"] for group in probe.param_groups]
    every = [parameter for members in whole for parameter in members]
    parts = [[[p for p in members if p is only] for members in whole] for only in every] if one_by_one else [whole]
    writes_gradients = False
    for _ in range(_PROBE_STEPS):
        gradients = [torch.randn(4, 3, generator=generator).to(parameter.device) for parameter in every]
        for parameter, gradient in zip(every, gradients, strict=True):
            parameter.grad = gradient.clone()
        before = [parameter.grad._version for parameter in every if parameter.grad is not None]
        for part in parts:
            for group, members in zip(probe.param_groups, part, strict=True):
                group["params"] = members
            step(probe)
        for parameter, gradient, version in zip(every, gradients, before, strict=True):
            after = parameter.grad
            writes_gradients |= after is not None and after._version == version and not torch.equal(after, gradient)
    return [parameter.detach() for parameter in every], writes_gradients


def _copy_without_state(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return an optimizer with the same settings. ``copy.copy`` leaves out what a class of the program adds to one."""
    probe = object.__new__(type(optimizer))
    probe.__dict__.update({name: copy.copy(value) for name, value in optimizer.__dict__.items()})
    probe.state = defaultdict(dict)
    probe.param_groups = [{key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
                          for group in optimizer.param_groups]  # fmt: skip
    return probe
