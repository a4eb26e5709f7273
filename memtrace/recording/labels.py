"""Labels blocks as parameters, gradients, optimizer state or inputs, with the qualified names of their tensors.

Models do not have to be passed in: the modules that exist when the recording starts are detected, and so is every
module that is created later. Names are those of ``named_parameters``, prefixed with the class name of the root module
(``GPT.blocks.0.attn.qkv.weight``). Names of a model that is passed in have no such prefix.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch

from memtrace.format.schema import CATEGORIES, NAME_KINDS
from memtrace.recording.hook_errors import HookErrors
from memtrace.recording.module_registry import ModuleRegistry
from memtrace.recording.observers import Observer
from memtrace.recording.plain_access import (
    are_plain_tensors,
    child_module,
    is_script,
    is_tensor,
    memory_parts,
    module_tensors,
    optimizer_groups,
    optimizer_state,
    tensors_in,
    type_name,
    walk_modules,
)

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


def unwrap(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Wrappers such as DistributedDataParallel, outermost first, and then the module of the program within them."""
    modules = [module]
    while (attribute := _WRAPPERS.get(type_name(modules[-1]))) is not None:
        inner = child_module(modules[-1], attribute)
        if inner is None:
            break
        modules.append(inner)
    return modules


@dataclass(frozen=True, slots=True)
class _NamedModule:
    name_id: int
    prefix: str
    """What the names of its parameters begin with."""
    reference: weakref.ref[torch.nn.Module]


@dataclass(frozen=True, slots=True)
class _NamedTensor:
    reference: weakref.ref[torch.Tensor]
    name: str
    name_id: int
    state_name_ids: dict[str, int] = field(default_factory=dict)
    """By key of the optimizer state."""


@dataclass(frozen=True, slots=True)
class _LabelledParameters:
    """What was last labelled before a step of an optimizer. Labels are made in every step, but rarely change."""

    optimizer: weakref.ref[torch.optim.Optimizer]
    parameter_ids: list[int]
    name_ids: list[int]
    names_version: tuple[int, int]
    """``Labeller._names_version`` at that time: with the same version, an id stands for the same parameter."""


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


class Labeller:
    """Names the modules and tensors of one recording and passes their labels to the observer.

    Attributes:
        errors: keeps errors away from the program.
        modules: the modules of the process.
        known_modules: named modules by id; an entry is removed together with its module.
    """

    def __init__(self, observer: Observer, errors: HookErrors) -> None:
        self._observer = observer
        self.errors = errors
        self.modules = ModuleRegistry()
        self.known_modules: dict[int, _NamedModule] = {}
        self._named_tensors: dict[int, _NamedTensor] = {}  # by id(tensor); removed together with the tensor
        self._num_named_tensors = 0
        self._labelled_parameters: dict[int, _LabelledParameters] = {}  # by id(optimizer); removed together with it
        self._labelled_state: dict[int, tuple[weakref.ref[torch.optim.Optimizer], list[int]]] = {}
        self._num_roots: dict[str, int] = {}

    def name_module(self, module: torch.nn.Module) -> None:
        """Name a module that is being called, with the model that it is part of."""
        if id(module) not in self.known_modules:
            self.add_model(self.modules.root_of(module))
        if id(module) not in self.known_modules:
            self._name_module(module, type_name(module))

    def module_name(self, key: int, kind: object) -> int:
        """Return the name id of the module with the id ``key`` and the class ``kind``; -1 if there is none."""
        module = self.modules.find(key)
        if module is None or type(module) is not kind:
            return -1
        self.name_module(module)
        return self.known_modules[key].name_id

    def owner_name(self, key: int, kind: object, path: str) -> int:
        """Return the name id of the module that contains the module ``key`` at ``path``; -1 if there is none."""
        if self.module_name(key, kind) < 0:
            return -1
        name = self.known_modules[key].prefix
        owner = name.removesuffix(path).removesuffix(".")
        known = [named.name_id for named in list(self.known_modules.values()) if named.prefix == owner]
        return known[0] if known and owner != name else -1

    def add_model(self, root: torch.nn.Module, prefix: str | None = None) -> None:
        """Name a model, its submodules, and their parameters and buffers. What has a name keeps it.

        Args:
            root: the model.
            prefix: first part of all names; None for the class name of the model.
        """
        *wrappers, inner = unwrap(root)
        if prefix is None:
            known = self.known_modules.get(id(inner))
            prefix = self._unique_root_name(type_name(inner)) if known is None else known.prefix
        tensors = []
        for name, module in walk_modules(inner):
            module_prefix = _join(prefix, name)
            if id(module) not in self.known_modules:
                self._name_module(module, module_prefix)
            for tensor_name, tensor in module_tensors(module):
                tensors.append(self._name_tensor(tensor, _join(module_prefix, tensor_name)))
        for wrapper in wrappers:
            if id(wrapper) not in self.known_modules:
                self._name_module(wrapper, prefix, f"{type_name(wrapper)}({prefix or type_name(inner)})")
        self.label_parameters(tensors)

    def _unique_root_name(self, name: str) -> str:
        number = self._num_roots[name] = self._num_roots.get(name, 0) + 1
        return name if number == 1 else f"{name}#{number}"

    def _name_module(self, module: torch.nn.Module, prefix: str, name: str | None = None) -> _NamedModule:
        key = id(module)
        # Callbacks of weak references are implemented in C: an interrupt that arrives in Python code there is lost.
        reference = weakref.ref(module, partial(self.known_modules.pop, key))
        name_id = self._observer.name_id(_MODULE_NAME, name or prefix or type_name(module))
        named = self.known_modules[key] = _NamedModule(name_id, prefix, reference)
        self.modules.named(module)
        return named

    def _name_tensor(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        key = id(tensor)
        if key not in self._named_tensors:
            reference = weakref.ref(tensor, partial(self._named_tensors.pop, key))
            self._named_tensors[key] = _NamedTensor(reference, name, self._observer.name_id(_TENSOR_NAME, name))
            self._num_named_tensors += 1
        return tensor

    def _name_new_models(self) -> None:
        """Name the models that the program has created, also those that it never calls, such as averaged copies."""
        new = self.modules.unnamed_modules()
        if new:
            for root in self.modules.roots(new):
                self.add_model(root)

    def label_parameters(self, parameters: list[torch.Tensor]) -> None:
        """Label parameters, and the gradients they have at the moment."""
        known = self._named_tensors
        tensors, names, gradients, gradient_names = [], [], [], []
        for tensor in parameters:
            name = named.name_id if (named := known.get(id(tensor))) is not None else -1
            parts = memory_parts(tensor)
            tensors += parts
            names += [name] * len(parts)
            if parts[0] is not tensor and (gradient := _gradient(tensor)) is not None:
                local_gradients = memory_parts(gradient)
                gradients += local_gradients
                gradient_names += [name] * len(local_gradients)
        self._observer.label(tensors, PARAMETER, names, GRADIENT)
        if gradients:
            self._observer.label(gradients, GRADIENT, gradient_names, -1)

    def label_inputs(self, value: object) -> None:
        """Label the tensors in ``value`` as inputs, except parameters and results of autograd operators."""
        inputs = [tensor for tensor in tensors_in(value) if id(tensor) not in self._named_tensors]
        if inputs:
            self._observer.label_inputs([part for tensor in inputs for part in memory_parts(tensor)], INPUT)

    def label_functional_parameters(self, module: torch.nn.Module, parameters: object) -> None:
        """Label tensors that ``torch.func.functional_call`` uses in place of the parameters of ``module``."""
        if type(parameters) is not dict:
            return
        self.name_module(module)
        prefix = self.known_modules[id(module)].prefix
        tensors = []
        for key, tensor in parameters.items():
            if type(key) is str and is_tensor(tensor):
                tensors += [self._name_tensor(part, _join(prefix, key)) for part in memory_parts(tensor)]
        self.label_parameters(tensors)

    def label_computed_gradients(self, inputs: object, gradients: object) -> None:
        """Label the gradients of parameters that autograd returned instead of accumulating them."""
        if type(inputs) is not tuple or type(gradients) is not tuple:
            return
        tensors, names = [], []
        for value, gradient in zip(inputs, gradients, strict=False):
            if not (is_tensor(value) and is_tensor(gradient)):
                continue
            parameter = self._named_tensors.get(id(value)) or self._named_tensors.get(id(memory_parts(value)[0]))
            if parameter is not None:
                parts = memory_parts(gradient)
                tensors += parts
                names += [parameter.name_id] * len(parts)
        if tensors:
            self._observer.label(tensors, GRADIENT, names, -1)

    def before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Label the parameters that an optimizer is about to update, and their gradients."""
        self._name_new_models()
        key, contents = id(optimizer), optimizer_groups(optimizer)
        known, listed = self._labelled_parameters.get(key), list(itertools.chain.from_iterable(contents))
        if (
            known is not None
            and known.names_version == self._names_version
            and known.parameter_ids == list(map(id, listed))
        ):
            self._observer.label(listed, PARAMETER, known.name_ids, GRADIENT)
            return
        groups = [list(filter(is_tensor, content)) for content in contents]
        parameters = list(itertools.chain.from_iterable(groups))
        parameter_ids = list(map(id, parameters))
        for group_number, group in enumerate(groups):
            for index, parameter in enumerate(group):
                self._name_tensor(parameter, f"param_groups.{group_number}.{index}")
        self.label_parameters(parameters)
        self._labelled_parameters.pop(key, None)
        if are_plain_tensors(parameters):  # other tensors can hold other memory in the next step
            name_ids = [self._named_tensors[parameter_id].name_id for parameter_id in parameter_ids]
            reference = weakref.ref(optimizer, partial(self._labelled_parameters.pop, key))
            version = self._names_version
            self._labelled_parameters[key] = _LabelledParameters(reference, parameter_ids, name_ids, version)

    @property
    def _names_version(self) -> tuple[int, int]:
        """Changes when a tensor gets a name, and when a tensor with a name is freed."""
        return self._num_named_tensors, len(self._named_tensors)

    def after_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Label the state of an optimizer."""
        key = id(optimizer)
        first = [id(tensor) for _, values in optimizer_state(optimizer, 1) for tensor in tensors_in(values)]
        if first and key in self._labelled_state and self._labelled_state[key][1] == first:
            return  # the optimizer updates its state in place, and the state is labelled
        reference = weakref.ref(optimizer, partial(self._labelled_state.pop, key))
        self._labelled_state[key] = (reference, first)
        tensors, names = [], []
        for parameter, values in optimizer_state(optimizer):
            for entry, value in dict.items(values):
                parts = [part for tensor in tensors_in(value) for part in memory_parts(tensor)]
                if parts:
                    tensors += parts
                    names += [self._state_name(optimizer, parameter, entry, value)] * len(parts)
        self._observer.label(tensors, OPTIMIZER_STATE, names, -1)

    def _state_name(self, optimizer: torch.optim.Optimizer, parameter: object, entry: object, value: object) -> int:
        text = entry if type(entry) is str else "state"
        owner = self._named_tensors.get(id(parameter))
        if owner is None or not _belongs_to_one(value, parameter):
            # LBFGS keeps the history of all parameters with the first one.
            return self._observer.name_id(_TENSOR_NAME, f"{type_name(optimizer)}.{text}")
        if text not in owner.state_name_ids:
            owner.state_name_ids[text] = self._observer.name_id(_TENSOR_NAME, f"{owner.name}.{text}")
        return owner.state_name_ids[text]

    def label_remaining_gradients(self) -> None:
        """Label gradients that no optimizer step has seen, for example after an exception in backward."""
        known = list(self._named_tensors.values())
        self.label_parameters([tensor for entry in known if (tensor := entry.reference()) is not None])

    def label_live_optimizers(self) -> None:
        """Label what the optimizers of the process hold, as at their steps, some of which were not observed."""
        (optimizers,) = self._observer.live_instances((torch.optim.Optimizer,))
        for optimizer in optimizers:
            self.before_optimizer_step(optimizer)
            self.after_optimizer_step(optimizer)

    def label_existing_tensors(self) -> None:
        """Record all tensors that exist when the recording starts, and name the modules among the live objects."""
        modules, tensors = self._observer.live_instances((torch.nn.Module, torch.Tensor))
        in_scripts = [tensor for module in modules if is_script(module) for _, tensor in module_tensors(module)]
        self._observer.baseline(tensors + in_scripts)
        for module in modules:
            self.modules.add(module)
            if id(module) in self.known_modules:
                self.modules.named(module)
        self._name_new_models()


def _belongs_to_one(value: object, parameter: object) -> bool:
    """Whether an entry of the optimizer state describes ``parameter`` alone, judged by its size."""
    if type(value) is not torch.Tensor or type(parameter) not in (torch.Tensor, torch.nn.Parameter):
        return is_tensor(value)
    with torch._C.DisableTorchFunction():
        return value.numel() <= _as_tensor(parameter).numel()


def _as_tensor(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value
    return tensor


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient of a parameter. Asking a tensor that is not a leaf would cause a warning."""
    with torch._C.DisableTorchFunction():
        return tensor.grad if tensor.is_leaf else None
