"""Carries out ``Spill``: only the shard that computes is on the device, the rest of the model is in host memory.

Source: Hydra (technical report, 2022): model spilling, shard units and double buffering.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from memtrace.errors import MemtraceError
from memtrace.execution.host_memory import host_memory_for
from memtrace.execution.moved_storage import MovedStorage, StorageMover, find_storages
from memtrace.execution.spill_layers import SpilledForward, SpilledLayers
from memtrace.execution.spill_optimizer import ShardedStep
from memtrace.execution.spill_residency import Residency, Shard, is_movable
from memtrace.execution.target import Target, is_compiled
from memtrace.planning.actions import Spill
from memtrace.recording.plain_access import walk_modules, walk_tensors


@contextmanager
def apply_action(action: Spill, target: Target) -> Iterator[None]:
    """Spill a model while the block runs.

    Raises:
        MemtraceError: The model or an optimizer cannot be spilled. Nothing has been changed then.
    """
    modules = _modules_of_shards(action, target)
    _check_model(target, [module for members in modules for module in members])
    parameters = [
        list({id(p): p for module in members for _, p in walk_tensors(module, "_parameters") if is_movable(p)}.values())
        for members in modules
    ]
    every = [parameter for members in parameters for parameter in members]
    device = _only_device(every)
    memory = host_memory_for(device)
    owner: dict[int, int] = {}
    for number, members in enumerate(parameters):
        for parameter in members:
            owner.setdefault(id(parameter), number)
    mover = StorageMover(memory)
    residency = Residency(_make_shards(parameters, owner, find_storages(every)), mover, action.buffer_bytes)
    layers = SpilledLayers(residency, recompute=action.recompute)
    steps = [ShardedStep(optimizer, residency, owner) for optimizer in target.optimizers]
    forwards = [SpilledForward(module, number, layers) for number, members in enumerate(modules) for module in members]
    with ExitStack() as stack:
        stack.callback(memory.close)
        stack.callback(residency.restore)
        for step in steps:
            stack.callback(step.detach)
            step.attach()
        for forward in forwards:
            stack.callback(forward.detach)
            forward.attach()
        for handle in (_watch_evaluation(target.model, residency), *_watch_gradients(layers, owner, every)):
            stack.callback(handle.remove)
        residency.empty()
        yield


def _modules_of_shards(action: Spill, target: Target) -> list[list[torch.nn.Module]]:
    """Return the modules of every shard; a module that has several names once."""
    named = target.find_modules(name for shard in action.shards for name in shard)
    seen: set[int] = set()
    shards: list[list[torch.nn.Module]] = []
    for names in action.shards:
        members = {id(module): module for module in (named[name] for name in names) if id(module) not in seen}
        seen |= members.keys()
        if members:
            shards.append(list(members.values()))
    return shards


def _check_model(target: Target, modules: Sequence[torch.nn.Module]) -> None:
    if not target.optimizers:
        raise MemtraceError(
            "the plan spills the model: pass the optimizer too, memtrace.apply(plan, model, optimizer)."
        )
    inside = {id(part) for module in modules for _, part in walk_modules(module) if part is not module}
    nested = [type(module).__name__ for module in modules if id(module) in inside]
    if nested:
        raise MemtraceError(
            f"the plan spills a {nested[0]} and a module that contains it. Name only one of them in the plan."
        )
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    wrapper = next((part for _, part in walk_modules(target.model) if isinstance(part, wrappers)), None)
    if wrapper is not None:
        raise MemtraceError(
            f"{type(wrapper).__name__} keeps gradients in buffers of its own, so that they cannot be spilled. Apply "
            "the plan to a model that one process trains."
        )
    if any(is_compiled(part) for _, part in walk_modules(target.model)):
        raise MemtraceError(
            "the plan spills a model compiled by torch.compile, whose code expects parameters to stay where they are. "
            "Apply the plan to the model without torch.compile."
        )
    scripted = next((part for part in modules if isinstance(part, torch.jit.ScriptModule)), None)
    if scripted is not None:
        raise MemtraceError("the plan spills a TorchScript module, whose forward memtrace cannot replace.")


def _only_device(parameters: Sequence[torch.Tensor]) -> torch.device:
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1:
        names = ", ".join(sorted(map(str, devices))) or "no device"
        raise MemtraceError(f"the modules to spill have their parameters on {names}: put them on one device.")
    return devices.pop()


def _make_shards(
    parameters: Sequence[Sequence[torch.Tensor]], owner: dict[int, int], storages: Sequence[MovedStorage]
) -> list[Shard]:
    """Return shards; a parameter of several shards is loaded with each of them and updated with the first."""
    of_tensor = {id(tensor): moved for moved in storages for tensor in moved.tensors}
    shards = []
    for number, members in enumerate(parameters):
        used = list({id(moved): moved for p in members for moved in (of_tensor[id(p)],)}.values())
        shards.append(Shard([p for p in members if owner[id(p)] == number], used))
    return shards


def _watch_evaluation(model: torch.nn.Module, residency: Residency) -> Any:
    """Move all shards to host memory after a forward of the model that no backward follows; return the hook's handle.

    A hook of all modules is not copied with the model.
    """

    def after_forward(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if module is model and not torch.is_grad_enabled():
            residency.empty()

    return torch.nn.modules.module.register_module_forward_hook(after_forward, always_call=True)


def _watch_gradients(layers: SpilledLayers, owner: dict[int, int], parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Keep gradients on the device while autograd adds to them, and return the handles of the hooks."""
    residency = layers.residency

    def watch(parameter: torch.Tensor) -> list[Any]:
        number = owner[id(parameter)]
        shard = residency.shards[number]

        def before(gradient: torch.Tensor) -> None:
            layers.watch_backward()
            residency.go_on()
            if (current := parameter.grad) is not None:
                residency.mover.load(
                    moved for moved in shard.gradients if any(tensor is current for tensor in moved.tensors)
                )

        def after(parameter: torch.Tensor) -> None:
            if residency.current != number:
                shard.collect_gradients()
                residency.store(shard.gradients)

        hooked: Any = parameter
        return [hooked.register_hook(before), hooked.register_post_accumulate_grad_hook(after)]

    unique = {id(parameter): parameter for parameter in parameters if parameter.requires_grad}
    return [handle for parameter in unique.values() for handle in watch(parameter)]
