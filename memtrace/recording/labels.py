"""Labels blocks as parameters, gradients, optimizer state or inputs, with the qualified names of their tensors.

Models do not have to be passed in: the modules that exist when the recording starts are detected, and so is the
container of every unknown module that is called. Names are those of ``named_parameters``, prefixed with the class name
of the root module (``GPT.blocks.0.attn.qkv.weight``). Names of a model that is passed in have no such prefix.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any, Final, NamedTuple

import torch

from memtrace.format.schema import CATEGORIES, NAME_KINDS
from memtrace.recording.observers import Observer

PARAMETER: Final = CATEGORIES.index("parameter")
GRADIENT: Final = CATEGORIES.index("gradient")
OPTIMIZER_STATE: Final = CATEGORIES.index("optimizer_state")
INPUT: Final = CATEGORIES.index("input")
_MODULE_NAME: Final = NAME_KINDS.index("module")
_TENSOR_NAME: Final = NAME_KINDS.index("tensor")

_WRAPPERS: Final = {
    "DistributedDataParallel": "module",
    "DataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


def tensors_in(value: object, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors in nested lists, tuples and mappings, up to ``depth`` levels deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 0 and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth > 0 and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, depth - 1)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside wrappers such as DistributedDataParallel and that of torch.compile."""
    while (attribute := _WRAPPERS.get(type(module).__name__)) is not None and isinstance(
        getattr(module, attribute, None), torch.nn.Module
    ):
        module = getattr(module, attribute)
    return module


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory this process holds: the local shard of a DTensor (FSDP2), otherwise the tensor itself."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    part = getattr(tensor, "_local_tensor", tensor)
    return part if isinstance(part, torch.Tensor) else tensor


class _NamedTensor(NamedTuple):
    reference: weakref.ref[torch.Tensor]
    name: str
    name_id: int


class Labeller:
    """Names the modules and tensors of one recording and passes their labels to the observer.

    Attributes:
        known_modules: maps id(module) to the name id of the module; an entry is removed together with its module.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.known_modules: dict[int, int] = {}
        self._module_references: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._named_tensors: dict[int, _NamedTensor] = {}  # by id(tensor); removed together with the tensor
        self._state_name_ids: dict[int, dict[str, int]] = {}  # by id(parameter), then by key of the optimizer state
        self._labelled_state: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]] = weakref.WeakKeyDictionary()
        self._num_roots: dict[str, int] = {}

    def module_name(self, module: torch.nn.Module) -> int:
        """The name id of a module that is being called. An unknown module is searched for in its callers' variables."""
        name = self.known_modules.get(id(module))
        if name is None:
            self.add_model(_container(module) or module)
            name = self.known_modules.get(id(module))
        return self._name_module(module, type(module).__name__) if name is None else name

    def add_model(self, root: torch.nn.Module, prefix: str | None = None) -> None:
        """Name a model, its submodules, and their parameters and buffers.

        Args:
            root: the model.
            prefix: first part of all names; None for the class name of the model.
        """
        inner = unwrap(root)
        if prefix is None:
            prefix = self._unique_root_name(type(inner).__name__)
        for name, module in inner.named_modules():
            if id(module) not in self.known_modules:
                self._name_module(module, ".".join(part for part in (prefix, name) if part) or type(inner).__name__)
        if root is not inner:
            self._name_module(root, f"{type(root).__name__}({prefix or type(inner).__name__})")
        named = [(name, tensor) for name, tensor in (*inner.named_parameters(), *inner.named_buffers())]
        for name, tensor in named:
            self._name_tensor(tensor, ".".join(part for part in (prefix, name) if part))
        self.label_parameters([tensor for _, tensor in named])

    def _unique_root_name(self, name: str) -> str:
        number = self._num_roots[name] = self._num_roots.get(name, 0) + 1
        return name if number == 1 else f"{name}#{number}"

    def _name_module(self, module: torch.nn.Module, name: str) -> int:
        key = id(module)

        def forget(_: weakref.ref[torch.nn.Module], key: int = key) -> None:
            self.known_modules.pop(key, None)
            self._module_references.pop(key, None)

        self._module_references[key] = weakref.ref(module, forget)
        self.known_modules[key] = self._observer.name_id(_MODULE_NAME, name)
        return self.known_modules[key]

    def _name_tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        key = id(tensor)
        if key not in self._named_tensors:

            def forget(_: weakref.ref[torch.Tensor], key: int = key) -> None:
                self._named_tensors.pop(key, None)
                self._state_name_ids.pop(key, None)

            reference = weakref.ref(tensor, forget)
            self._named_tensors[key] = _NamedTensor(reference, name, self._observer.name_id(_TENSOR_NAME, name))
        return tensor

    def label_parameters(self, parameters: list[torch.Tensor]) -> None:
        """Label parameters, and the gradients they have at the moment."""
        known = self._named_tensors
        names = [known[key].name_id if (key := id(tensor)) in known else -1 for tensor in parameters]
        local_parts = [local_part(tensor) for tensor in parameters]
        self._observer.label(local_parts, PARAMETER, names, GRADIENT)
        sharded = [index for index, part in enumerate(local_parts) if part is not parameters[index]]
        gradients = [(parameters[index].grad, names[index]) for index in sharded]
        local_gradients = [(local_part(gradient), name) for gradient, name in gradients if gradient is not None]
        if local_gradients:
            tensors, tensor_names = [part for part, _ in local_gradients], [name for _, name in local_gradients]
            self._observer.label(tensors, GRADIENT, tensor_names, -1)

    def label_inputs(self, value: object) -> None:
        """Label the tensors in ``value`` as inputs, except parameters and results of autograd operators."""
        inputs = [
            tensor for tensor in tensors_in(value) if tensor.grad_fn is None and id(tensor) not in self._named_tensors
        ]
        if inputs:
            self._observer.label(inputs, INPUT, [-1] * len(inputs), -1)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Label the parameters that an optimizer is about to update, and their gradients."""
        self.label_parameters(
            [
                self._name_tensor(parameter, f"param_groups.{group_number}.{index}")
                for group_number, group in enumerate(optimizer.param_groups)
                for index, parameter in enumerate(group["params"])
            ]
        )

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Label the state of an optimizer."""
        first = next(iter(optimizer.state.values()), None)
        first_tensors = [id(value) for value in first.values()] if isinstance(first, dict) else []
        if first_tensors and self._labelled_state.get(optimizer) == first_tensors:
            return  # the optimizer updates its state in place, and the state is labelled
        self._labelled_state[optimizer] = first_tensors
        tensors, names = [], []
        for parameter, state in optimizer.state.items():
            if not isinstance(state, dict):
                continue
            known = self._state_name_ids.setdefault(id(parameter), {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors.append(local_part(value))
                    names.append(known[key] if key in known else self._name_state(known, parameter, key))
        self._observer.label(tensors, OPTIMIZER_STATE, names, -1)

    def _name_state(self, known: dict[str, int], parameter: object, key: str) -> int:
        owner = self._named_tensors.get(id(parameter))
        known[key] = self._observer.name_id(_TENSOR_NAME, f"{owner.name if owner else '?'}.{key}")
        return known[key]

    def label_remaining_gradients(self) -> None:
        """Label gradients that no optimizer step has seen, for example after an exception in backward."""
        known = self._named_tensors.values()
        self.label_parameters([tensor for entry in known if (tensor := entry.reference()) is not None])

    def label_existing_tensors(self) -> None:
        """Record all tensors that exist when the recording starts, and name the modules among the live objects."""
        modules, tensors = self._observer.instances(gc.get_objects(), (torch.nn.Module, torch.Tensor))
        self._observer.baseline(tensors)
        children = {id(child) for module in modules for child in _children(module)}
        for module in modules:
            if id(module) not in children and id(module) not in self.known_modules:
                self.add_model(module)


def _children(module: torch.nn.Module) -> Iterable[torch.nn.Module]:
    return [child for child in module.__dict__.get("_modules", {}).values() if child is not None]


def _local_values(frame: FrameType) -> list[Any]:
    """The values of a frame's variables.

    Before Python 3.13, ``f_locals`` of a function's frame is a dict that the frame keeps until the function returns. It
    would keep every tensor of that moment alive, so it is emptied unless the program refers to it as well.
    """
    variables = frame.f_locals
    values = list(variables.values())
    is_copy = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and type(variables) is dict
    if is_copy and sys.getrefcount(variables) == 3:  # references: the frame, this function, getrefcount's argument
        variables.clear()
    return values


def _container(module: torch.nn.Module) -> torch.nn.Module | None:
    """The largest module in the callers' variables that contains ``module``; None if there is none.

    A call such as ``model.encode(x)`` calls parts of ``model`` without a call of ``model`` itself.
    """
    largest, largest_size = None, 0
    seen: set[int] = set()
    frame = sys._getframe(1)
    while frame is not None:
        for value in _local_values(frame):
            if issubclass(type(value), torch.nn.Module) and id(value) not in seen:
                seen.add(id(value))
                parts = list(value.modules())
                if len(parts) > largest_size and any(part is module for part in parts):
                    largest, largest_size = value, len(parts)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return largest
