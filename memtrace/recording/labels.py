"""What the program itself knows of its blocks: parameters, gradients, optimizer state, inputs, and qualified names.

Modules are found without being passed in: those alive when the recording begins, and the container of each module
that is called and not yet known. Names are those of ``named_parameters``, after the class name of the root
(``GPT.blocks.0.attn.qkv.weight``); a model that is passed in gives its names without that prefix.
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
    """The tensors in a value, looking into lists, tuples and dicts, ``depth`` levels deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif depth > 0 and isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif depth > 0 and isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, depth - 1)


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside wrappers such as DistributedDataParallel and torch.compile's."""
    while (inner := _WRAPPERS.get(type(module).__name__)) is not None and isinstance(
        getattr(module, inner, None), torch.nn.Module
    ):
        module = getattr(module, inner)
    return module


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """The memory behind a tensor: of a distributed one (DTensor, as FSDP2's) the part that this process holds."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return tensor
    part = getattr(tensor, "_local_tensor", tensor)
    return part if isinstance(part, torch.Tensor) else tensor


class _Parameter(NamedTuple):
    reference: weakref.ref[torch.Tensor]
    text: str
    name: int


class Labeller:
    """Names modules and tensors of one recording and tells the observer of them."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.known_modules: dict[int, int] = {}  # id(module) -> name id; entries go with their module
        self._references: dict[int, weakref.ref[torch.nn.Module]] = {}
        self._parameters: dict[int, _Parameter] = {}  # by id(tensor); entries go with their tensor
        self._state_names: dict[int, dict[str, int]] = {}
        self._seen_state: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[int]] = weakref.WeakKeyDictionary()
        self._root_names: dict[str, int] = {}

    def module_name(self, module: torch.nn.Module) -> int:
        """The name id of a module that is being called; finds out who contains it at first sight."""
        name = self.known_modules.get(id(module))
        if name is None:
            self.adopt(_container(module) or module)
            name = self.known_modules.get(id(module))
        return self._remember(module, type(module).__name__) if name is None else name

    def adopt(self, root: torch.nn.Module, prefix: str | None = None) -> None:
        """Learn the names of a module, of its submodules and of their parameters and buffers."""
        inner = unwrap(root)
        if prefix is None:
            prefix = self._unique_root_name(type(inner).__name__)
        for name, module in inner.named_modules():
            if id(module) not in self.known_modules:
                self._remember(module, ".".join(part for part in (prefix, name) if part) or type(inner).__name__)
        if root is not inner:
            self._remember(root, f"{type(root).__name__}({prefix or type(inner).__name__})")
        named = [(name, tensor) for name, tensor in (*inner.named_parameters(), *inner.named_buffers())]
        for name, tensor in named:
            self._named(tensor, ".".join(part for part in (prefix, name) if part))
        self.label_parameters([tensor for _, tensor in named])

    def _unique_root_name(self, name: str) -> str:
        count = self._root_names[name] = self._root_names.get(name, 0) + 1
        return name if count == 1 else f"{name}#{count}"

    def _remember(self, module: torch.nn.Module, name: str) -> int:
        key = id(module)

        def forget(_: weakref.ref[torch.nn.Module], key: int = key) -> None:
            self.known_modules.pop(key, None)
            self._references.pop(key, None)

        self._references[key] = weakref.ref(module, forget)
        self.known_modules[key] = self._observer.name_id(_MODULE_NAME, name)
        return self.known_modules[key]

    def _named(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        key = id(tensor)
        if key not in self._parameters:

            def forget(_: weakref.ref[torch.Tensor], key: int = key) -> None:
                self._parameters.pop(key, None)
                self._state_names.pop(key, None)

            reference = weakref.ref(tensor, forget)
            self._parameters[key] = _Parameter(reference, name, self._observer.name_id(_TENSOR_NAME, name))
        return tensor

    def label_parameters(self, parameters: list[torch.Tensor]) -> None:
        """Tell of parameters and of the gradients they have at this moment."""
        known = self._parameters
        names = [known[key].name if (key := id(tensor)) in known else -1 for tensor in parameters]
        parts = [local_part(tensor) for tensor in parameters]
        self._observer.label(parts, PARAMETER, names, GRADIENT)
        sharded = [place for place, part in enumerate(parts) if part is not parameters[place]]
        gradients = [(parameters[place].grad, names[place]) for place in sharded]
        found = [(local_part(gradient), name) for gradient, name in gradients if gradient is not None]
        if found:
            self._observer.label([part for part, _ in found], GRADIENT, [name for _, name in found], -1)

    def label_inputs(self, value: object) -> None:
        """Tell of the tensors of a batch: leaves that no operator of the graph made."""
        found = [
            tensor for tensor in tensors_in(value) if tensor.grad_fn is None and id(tensor) not in self._parameters
        ]
        if found:
            self._observer.label(found, INPUT, [-1] * len(found), -1)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell of the parameters an optimizer is about to update, and of their gradients."""
        self.label_parameters(
            [
                self._named(parameter, f"param_groups.{number}.{place}")
                for number, group in enumerate(optimizer.param_groups)
                for place, parameter in enumerate(group["params"])
            ]
        )

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell of the state the optimizer keeps."""
        first = next(iter(optimizer.state.values()), None)
        tensors_of_first = [id(value) for value in first.values()] if isinstance(first, dict) else []
        if tensors_of_first and self._seen_state.get(optimizer) == tensors_of_first:
            return  # an optimizer that updates its state in place: told already
        self._seen_state[optimizer] = tensors_of_first
        tensors, names = [], []
        for parameter, state in optimizer.state.items():
            if not isinstance(state, dict):
                continue
            known = self._state_names.setdefault(id(parameter), {})
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors.append(local_part(value))
                    names.append(known[key] if key in known else self._name_state(known, parameter, key))
        self._observer.label(tensors, OPTIMIZER_STATE, names, -1)

    def _name_state(self, known: dict[str, int], parameter: object, key: str) -> int:
        owner = self._parameters.get(id(parameter))
        known[key] = self._observer.name_id(_TENSOR_NAME, f"{owner.text if owner else '?'}.{key}")
        return known[key]

    def label_leftover_gradients(self) -> None:
        """Tell of gradients that no optimizer step has seen, such as those of a run that died in backward."""
        alive = [tensor for known in self._parameters.values() if (tensor := known.reference()) is not None]
        self.label_parameters(alive)

    def label_older_tensors(self) -> None:
        """Tell of every module and tensor that is alive when the recording begins."""
        # type(), not isinstance: asking a lazy proxy for its class can run its code.
        found: dict[type, list[Any]] = {torch.nn.Module: [], torch.Tensor: []}
        wanted: dict[type, list[Any] | None] = {}  # a process holds few types and many objects
        for item in gc.get_objects():
            kind = type(item)
            if kind not in wanted:
                wanted[kind] = next((found[base] for base in found if issubclass(kind, base)), None)
            if (place := wanted[kind]) is not None:
                place.append(item)
        modules = found[torch.nn.Module]
        self._observer.baseline(found[torch.Tensor])
        children = {id(child) for module in modules for child in _children(module)}
        for module in modules:
            if id(module) not in children and id(module) not in self.known_modules:
                self.adopt(module)


def _children(module: torch.nn.Module) -> Iterable[torch.nn.Module]:
    return [child for child in module.__dict__.get("_modules", {}).values() if child is not None]


def _local_values(frame: FrameType) -> list[Any]:
    """The values of a frame's variables.

    Before Python 3.13 the frame of a function keeps the dict that it makes of them for as long as the function runs,
    with every tensor of that moment: it is emptied, unless the program holds it too.
    """
    variables = frame.f_locals
    values = list(variables.values())
    is_copy = bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED) and type(variables) is dict
    if is_copy and sys.getrefcount(variables) == 3:  # the frame's, this function's, and the argument
        variables.clear()
    return values


def _container(module: torch.nn.Module) -> torch.nn.Module | None:
    """The largest module in the calling frames that contains this one: ``model.encode(x)`` calls parts of ``model``."""
    best, best_size = None, 0
    seen: set[int] = set()
    frame = sys._getframe(1)
    while frame is not None:
        for value in _local_values(frame):
            if issubclass(type(value), torch.nn.Module) and id(value) not in seen:
                seen.add(id(value))
                parts = list(value.modules())
                if len(parts) > best_size and any(part is module for part in parts):
                    best, best_size = value, len(parts)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return best
