"""Reads objects of the recorded program without running the program's code.

Modules, optimizers, tensors and containers can be of classes that override anything: ``__len__``, ``__eq__``,
``__getattr__``, ``__class__``, ``named_parameters``, ``__iter__``. What they hold is therefore read from their instance
dictionaries and with the methods of the built-in base classes, which Python code cannot override.
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator
from typing import Any, Final, cast

import torch

_TYPE_NAME: Final = type.__dict__["__name__"].__get__
_MRO: Final = type.__dict__["__mro__"].__get__
_CLASS_DICT: Final = type.__dict__["__dict__"].__get__
_MODULE_DICT: Final = torch.nn.Module.__dict__["__dict__"].__get__
_OPTIMIZER_DICT: Final = torch.optim.Optimizer.__dict__["__dict__"].__get__
_TENSOR_DICT: Final = torch.Tensor.__dict__["__dict__"].__get__
_TENSOR: Final = torch.Tensor
_PARAMETER: Final = torch.nn.Parameter
_PLAIN_TENSORS: Final = (_TENSOR, _PARAMETER)
_FAKE_TENSOR: Final = "torch._subclasses.fake_tensor"
_SCRIPT_MODULE: Final = "torch.jit._script"
_MAX_ITEMS: Final = 4096
"""Number of items that are looked at in one container with all that it contains."""


def type_name(value: object) -> str:
    """The name of the class of ``value``."""
    return cast(str, _TYPE_NAME(type(value)))


def is_module(value: object) -> bool:
    """Whether ``value`` is a module. ``isinstance`` would ask it for its ``__class__``."""
    return issubclass(type(value), torch.nn.Module)


def is_script(module: torch.nn.Module) -> bool:
    """Whether a module is TorchScript, which holds its tensors in C++."""
    return type(module).__module__ == _SCRIPT_MODULE


def is_tensor(value: object) -> bool:
    """Whether ``value`` is a tensor."""
    kind = type(value)
    return kind is _PARAMETER or kind is _TENSOR or issubclass(kind, _TENSOR)


def instances_of(bases: tuple[type, ...], objects: list[Any]) -> list[Any]:
    """Those of ``objects`` whose own type is one of ``bases`` or derived from it.

    There are hundreds of thousands of objects, so all that is done for each of them is done in C. Types are compared by
    their ids: a metaclass can override their hash and equality.
    """
    type_ids = set(map(id, _with_subclasses(bases)))
    return list(itertools.compress(objects, map(type_ids.__contains__, map(id, map(type, objects)))))


def _with_subclasses(bases: tuple[type, ...]) -> list[type]:
    types: list[type] = list(bases)
    known = set(map(id, bases))
    for kind in types:  # grows in the loop
        for subclass in cast("list[type]", type.__subclasses__(kind)):
            if id(subclass) not in known:
                known.add(id(subclass))
                types.append(subclass)
    return types


def are_plain_tensors(tensors: list[torch.Tensor]) -> bool:
    """Whether all of ``tensors`` hold their memory themselves (see ``memory_parts``)."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return all(type(tensor) in _PLAIN_TENSORS and not is_wrapped(tensor) for tensor in tensors)


def overrides_dispatch(kind: type) -> bool:
    """Whether a class of tensors has a ``__torch_dispatch__`` of its own."""
    definitions = (_CLASS_DICT(base) for base in _MRO(kind))
    handler = next((names["__torch_dispatch__"] for names in definitions if "__torch_dispatch__" in names), None)
    return handler is not _CLASS_DICT(torch.Tensor)["__torch_dispatch__"]


def module_members(module: torch.nn.Module, kind: str) -> list[tuple[str, Any]]:
    """The entries of ``_modules``, ``_parameters`` or ``_buffers`` that are not None.

    A module whose ``super().__init__()`` has not run has none.
    """
    members: Any = dict.get(_MODULE_DICT(module), kind)
    if issubclass(type(members), dict):
        return [(name, value) for name, value in dict.items(members) if type(name) is str and value is not None]
    if type(members).__module__ == _SCRIPT_MODULE:  # torch's own wrappers of what TorchScript holds in C++
        return [(name, value) for name, value in members.items() if value is not None]
    return []


def walk_modules(root: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """A module and all modules in it with their qualified names, each once, as ``named_modules`` orders them."""
    seen = {id(root)}
    open_modules = [("", root)]
    while open_modules:
        name, module = open_modules.pop()
        yield name, module
        children = []
        for child_name, child in module_members(module, "_modules"):
            if is_module(child) and id(child) not in seen:
                seen.add(id(child))
                children.append((f"{name}.{child_name}" if name else child_name, child))
        open_modules += reversed(children)


def walk_tensors(root: torch.nn.Module, kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The ``_parameters`` or the ``_buffers`` of a module and of all modules in it, with qualified names, each once."""
    seen = set()
    for prefix, module in walk_modules(root):
        for name, tensor in module_members(module, kind):
            if is_tensor(tensor) and id(tensor) not in seen:
                seen.add(id(tensor))
                yield f"{prefix}.{name}" if prefix else name, tensor


def module_tensors(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module itself."""
    members = (*module_members(module, "_parameters"), *module_members(module, "_buffers"))
    return [(name, tensor) for name, tensor in members if is_tensor(tensor)]


def child_module(module: torch.nn.Module, name: str) -> torch.nn.Module | None:
    """The direct child ``name`` of a module; None if there is none."""
    return next((child for key, child in module_members(module, "_modules") if key == name and is_module(child)), None)


def optimizer_groups(optimizer: torch.optim.Optimizer) -> list[list[Any]]:
    """What the list of parameters of each parameter group of an optimizer contains."""
    groups: Any = dict.get(_OPTIMIZER_DICT(optimizer), "param_groups")
    if not issubclass(type(groups), list):
        return []
    contents: list[Any] = [
        dict.get(group, "params") for group in list.__iter__(groups) if issubclass(type(group), dict)
    ]
    return [list.copy(content) if issubclass(type(content), list) else [] for content in contents]


def optimizer_state(
    optimizer: torch.optim.Optimizer, max_parameters: int | None = None
) -> list[tuple[object, dict[str, Any]]]:
    """The state of each parameter of an optimizer, or of the first ``max_parameters``."""
    state: Any = dict.get(_OPTIMIZER_DICT(optimizer), "state")
    if not issubclass(type(state), dict):
        return []
    entries = itertools.islice(dict.items(state), max_parameters)
    return [(parameter, values) for parameter, values in entries if issubclass(type(values), dict)]


def tensors_in(value: object, depth: int = 3) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dictionaries, up to ``depth`` levels deep.

    Subclasses such as named tuples and the outputs of Hugging Face models are read as their base classes. Other
    containers are not looked into: to iterate over one is to run its code.
    """
    tensors: list[torch.Tensor] = []
    level: list[Any] = [value]
    num_items = 0
    for _ in range(depth + 1):
        level = level[: _MAX_ITEMS - num_items]
        num_items += len(level)
        following: list[Any] = []
        for item in level:
            kind = type(item)
            if issubclass(kind, _TENSOR):
                tensors.append(item)
            elif issubclass(kind, dict):
                following += list(dict.values(item))[:_MAX_ITEMS]
            elif issubclass(kind, list):
                following += list.__getitem__(item, slice(_MAX_ITEMS))
            elif issubclass(kind, tuple):
                following += tuple.__getitem__(item, slice(_MAX_ITEMS))
        if not following:
            break
        level = following
    return tensors


def memory_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors whose memory this process holds for ``tensor``.

    That is the tensor itself, unless functorch or a tensor subclass wraps it: then it is what is wrapped, such as the
    local shard of a DTensor or the data and the scales of a quantized tensor. Call with torch functions disabled.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    if type(tensor) in _PLAIN_TENSORS or _CLASS_DICT(type(tensor)).get("__module__") == _FAKE_TENSOR:
        return [tensor]  # a fake tensor may hold a real one with its value, which is not its memory
    parts = [part for part in _attributes(tensor) if type(part) in _PLAIN_TENSORS]
    if parts:
        return parts
    nested = [part for part in _attributes(tensor) if is_tensor(part)]
    return [inner for part in nested for inner in _attributes(part) if type(inner) in _PLAIN_TENSORS] or [tensor]


def _attributes(tensor: torch.Tensor) -> list[Any]:
    """The values of the instance attributes of a tensor, in its dictionary or in slots."""
    values = list(dict.values(_TENSOR_DICT(tensor)))
    for base in type.__dict__["__mro__"].__get__(type(tensor)):
        for slot in type.__dict__["__dict__"].__get__(base).values():
            if type(slot) is types.MemberDescriptorType:
                try:
                    values.append(slot.__get__(tensor))
                except AttributeError:
                    continue  # the slot is empty
    return values
